"""Make a secondary's encoder, and fit it to noised statistics of its own records: booked first."""

import math

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.dp.moments import noised_moments
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.config import FederationConfig, PartySettings
from securevfl.federation.ledger import Ledger
from securevfl.models.directions import DirectionBottom, principal_projection


def build_direction_bottom(
    config: FederationConfig, party: PartySettings, *, num_features: int
) -> DirectionBottom:
    """Return the encoder of one secondary, still random.

    Raises:
        DataError: If the party has fewer features than its encoder has numbers to write.
    """
    assert config.encoder is not None, "asked for by the federation file"
    _, width = config.family.cut_shape(config.model)
    blocks = len(config.secondaries) if config.encoder.layout == "blocks" else 1
    components = width // blocks
    if components > num_features:
        raise DataError(
            f"table of {party.name!r}: has {num_features} features, fewer than the {components} "
            f"numbers that its encoder writes; lower model.hidden"
        )
    return DirectionBottom(
        num_features=num_features,
        components=components,
        width=width,
        offset=components * (config.ranks[party.name] - 1) if blocks > 1 else 0,
        length=config.privacy.clip_norm,
    )


class Fitting:
    """Fits one secondary's encoder when its first release is asked for."""

    def __init__(
        self,
        bottom: DirectionBottom,
        features: Float32[np.ndarray, "records features"],
        *,
        plan: ReleasePlan,
        ledger: Ledger,
    ) -> None:
        self._bottom = bottom
        self._features = features
        self._plan = plan
        self._ledger = ledger

    def __call__(self) -> None:
        """Book, draw the noise, fit.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was computed then.
            PrivacyError: If the encoder was fitted before, or the noise leaves nothing to fit to.

        Reveals:
            To nobody anything by itself: the statistics stay here, and speak through releases.
        """
        self._ledger.charge_fitting()
        moments = noised_moments(
            self._features,
            # Features in declared bounds lie in [-1, 1], so this draws none of them back.
            radius=math.sqrt(self._features.shape[1]),
            noise_multiplier=self._plan.fitting_multiplier(),
        )
        components = self._bottom.projection.shape[1]
        self._bottom.fit(
            centre=moments.mean,
            projection=principal_projection(moments.covariance, components, spread=moments.spread),
        )
