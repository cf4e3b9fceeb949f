"""Encoders of few numbers: built, and fitted to a secondary's own noised statistics."""

import math

import numpy as np
from jaxtyping import Float32

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.core.errors import DataError
from securevfl.dp.class_sums import noised_moments
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger
from securevfl.models.frozen import DirectionBottom, Projection, principal_projection


def build_direction_bottom(
    config: FederationConfig, party: PartySettings, *, num_features: int
) -> DirectionBottom:
    """Return the encoder of one secondary, still random.

    Raises:
        DataError: If the party has fewer features than its encoder has numbers to write.
    """
    assert config.encoder is not None, "asked for by the federation file"
    _, width = config.family.cut_shape(config.model)
    blocks = len(config.secondaries) if config.encoder.in_blocks else 1
    components = width // blocks
    votes = config.encoder.method == "votes"
    if components > num_features and not votes:
        raise DataError(
            f"table of {party.name!r}: has {num_features} features, fewer than the {components} "
            f"numbers that its encoder writes; lower model.hidden"
        )
    encode = Projection(num_features=num_features, components=components)
    return DirectionBottom(
        encode,
        components=components,
        width=width,
        offset=components * (config.ranks[party.name] - 1) if blocks > 1 else 0,
        length=config.privacy.clip_norm,
    )


class Fitting:
    """Fits one secondary's encoder when its first release is asked for."""

    def __init__(
        self,
        plan: RunPlan,
        bottom: DirectionBottom,
        features: Float32[np.ndarray, "records features"],
        ledger: Ledger,
        *,
        name: str,
    ) -> None:
        """Prepare it.

        Args:
            plan: The run.
            bottom: The encoder, still random.
            features: This party's, scaled.
            ledger: This party's own.
            name: This party's.
        """
        self._plan = plan
        self._bottom = bottom
        self._features = features
        self._ledger = ledger
        self._name = name

    def __call__(self) -> None:
        """Charge the ledger, unless this run's fitting is booked; fit the encoder behind noise.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was computed then.
            PrivacyError: If the noise leaves nothing to fit to.

        Reveals:
            To nobody anything by itself: what is fitted stays here, and speaks through releases.
        """
        if not self._ledger.fitted:
            self._ledger.charge_fitting()
        self._fit_projection(self._bottom.encode)

    def _fit_projection(self, encode: Projection) -> None:
        moments = noised_moments(
            self._features,
            # Features in declared bounds lie in [-1, 1], so this draws none of them back.
            radius=math.sqrt(self._features.shape[1]),
            noise_multiplier=self._plan.releases.fitting_multiplier(),
        )
        encode.fit(
            centre=moments.mean,
            projection=principal_projection(
                moments.covariance, self._bottom.components, spread=moments.spread
            ),
        )
