"""How a secondary's frozen encoder is built, and fitted to noised statistics of its records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from securevfl.config.encoder import EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.core.errors import DataError
from securevfl.data.scaling import DEVIATIONS
from securevfl.dp.class_sums import noised_moments
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger
from securevfl.models import frozen

FittedBottom = frozen.DirectionBottom | frozen.ScoreBottom
"""An encoder of an ``[encoder]`` table."""


def build_encoder(
    config: FederationConfig,
    encoder: EncoderSettings,
    party: PartySettings,
    *,
    num_features: int,
    words: Sequence[Sequence[int]] = (),
) -> FittedBottom:
    """Return the encoder of one secondary, not fitted yet.

    Args:
        config: The federation file.
        encoder: Its ``[encoder]`` table.
        party: The secondary.
        num_features: Columns of its table.
        words: Places of the features of each column of words.

    Raises:
        DataError: If the party has fewer features than its encoder has numbers to write, or more
            than class sums take.
    """
    if config.encoder_reads_labels and num_features > frozen.MOST_FEATURES:
        raise DataError(
            f"table of {party.name!r}: has {num_features:,} features, and its encoder takes "
            f"{frozen.MOST_FEATURES:,} at most; exclude columns, or declare fewer words"
        )
    if config.scores:
        return frozen.ScoreBottom(
            frozen.RecordShape(features=num_features, words=words),
            length=config.privacy.clip_norm,
            limit=DEVIATIONS if party.scaling in ("standard", "clamped") else 1.0,
            above=0.5 if party.scaling == "none" else 0.0,
        )
    _, width = config.family.cut_shape(config.model)
    blocks = len(config.secondaries) if encoder.in_blocks else 1
    components = width // blocks
    if components > num_features and not config.encoder_reads_labels:
        raise DataError(
            f"table of {party.name!r}: has {num_features} features, fewer than the {components} "
            f"numbers that its encoder writes; lower model.hidden"
        )
    encode = frozen.Projection(num_features=num_features, components=components)
    # Words are 0 and 1 to class sums where bounds say which numbers they are.
    return frozen.DirectionBottom(
        encode,
        frozen.RecordShape(features=num_features, words=words if party.scaling == "bounds" else ()),
        components=components,
        width=width,
        offset=components * (config.ranks[party.name] - 1) if blocks > 1 else 0,
        length=config.privacy.clip_norm,
    )


@dataclass(frozen=True, eq=False)
class PrincipalFitting:
    """Fits one secondary's encoder when its first release is asked for."""

    plan: RunPlan
    bottom: frozen.DirectionBottom
    """The encoder, still random."""
    features: Float32[np.ndarray, "records features"]
    """This party's, scaled."""
    ledger: Ledger
    """This party's own."""

    def __call__(self) -> None:
        """Charge the ledger, unless this run's fitting is booked; fit the encoder behind noise.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was computed then.
            PrivacyError: If the noise leaves nothing to fit to.

        Reveals:
            To nobody anything by itself: what is fitted stays here, and speaks through releases.
        """
        if not self.ledger.encoder_fitted:
            self.ledger.charge_fitting()
        moments = noised_moments(
            self.features,
            # Features in declared bounds lie in [-1, 1], so this draws none of them back.
            radius=math.sqrt(self.features.shape[1]),
            noise_multiplier=self.plan.releases.fitting_multiplier(),
        )
        self.bottom.encode.fit(
            centre=moments.mean,
            projection=frozen.principal_projection(
                moments.covariance, self.bottom.components, spread=moments.spread
            ),
        )
