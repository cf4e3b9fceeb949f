"""Make a secondary's encoder, and fit it to its own records behind noise."""

import math

import numpy as np
import torch
from jaxtyping import Float32
from torch import nn

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.core.errors import DataError
from securevfl.core.seeds import derive_seed
from securevfl.dp.moments import noised_moments
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.fitting_autoencoder import pretrain
from securevfl.federation.ledger import Ledger
from securevfl.models.autoencoder import ChannelAutoencoder, small_encoder
from securevfl.models.directions import DirectionBottom, Projection, principal_projection
from securevfl.models.initial import initialise


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
    encode: nn.Module
    if config.encoder.method == "autoencoder":
        encode = small_encoder(num_features=num_features, components=components)
    else:
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
        config: FederationConfig,
        name: str,
        bottom: DirectionBottom,
        features: Float32[np.ndarray, "records features"],
        *,
        plan: ReleasePlan,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._name = name
        self._bottom = bottom
        self._features = features
        self._plan = plan
        self._ledger = ledger

    def __call__(self) -> None:
        """Charge the ledger, then fit the encoder behind fresh noise.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was computed then.
            PrivacyError: If the encoder was fitted before, or the noise leaves nothing to fit to.

        Reveals:
            To nobody anything by itself: what is fitted stays here, and speaks through releases.
        """
        self._ledger.charge_fitting()
        encode = self._bottom.encode
        if isinstance(encode, Projection):
            self._fit_projection(encode)
        else:
            self._pretrain(encode)

    def _fit_projection(self, encode: Projection) -> None:
        moments = noised_moments(
            self._features,
            # Features in declared bounds lie in [-1, 1], so this draws none of them back.
            radius=math.sqrt(self._features.shape[1]),
            noise_multiplier=self._plan.fitting_multiplier(),
        )
        encode.fit(
            centre=moments.mean,
            projection=principal_projection(
                moments.covariance, self._bottom.components, spread=moments.spread
            ),
        )

    def _pretrain(self, encode: nn.Module) -> None:
        encoder, seed = self._config.encoder, self._config.federation.seed
        assert encoder is not None, "asked for by the federation file"
        plan = self._plan
        # One secondary's coordinates carry the noise of all secondaries' shares.
        noise_std = plan.noise_share_std() * math.sqrt(plan.parties) * plan.links
        device = next(encode.parameters()).device
        # The decoder is made here and forgotten here; only the encoder is kept.
        model = ChannelAutoencoder(
            encode, num_features=self._features.shape[1], components=self._bottom.components
        )
        drawn = derive_seed(seed, "fit", self._name)
        initialise(model.decoder, seed=drawn, positions_seed=0)
        pretrain(
            model.to(device),
            torch.from_numpy(self._features).to(device),
            steps=encoder.steps,
            sampling_rate=encoder.sampling_rate,
            noise_multiplier=plan.fitting_multiplier(),
            channel_std=noise_std / plan.privacy.clip_norm,
            generator=torch.Generator().manual_seed(drawn),
        )
