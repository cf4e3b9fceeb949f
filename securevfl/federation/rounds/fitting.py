"""Make a secondary's encoder, and fit it to its own records behind noise."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import DataError
from securevfl.dp.class_sums import noised_moments
from securevfl.dp.private_sgd import NoisedGradientSum
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.sampling import PoissonSampler
from securevfl.models.autoencoder import ChannelAutoencoder, small_encoder
from securevfl.models.frozen import DirectionBottom, Projection, principal_projection
from securevfl.models.layers import initialise
from securevfl.models.optimisers import uncompiled

# Gradients of an error of values in [-1, 1] are mostly longer: every record has one vote.
_CLIP_NORM: Final = 0.1
_LEARNING_RATE: Final = 3e-3
# Points of channel noise in a step, one half of them the other's mirror image.
_POINTS: Final = 8
# Records whose gradients are worked out at a time.
_PIECE: Final = 1024


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
            noise_multiplier=self._plan.releases.fitting_multiplier(),
        )
        encode.fit(
            centre=moments.mean,
            projection=principal_projection(
                moments.covariance, self._bottom.components, spread=moments.spread
            ),
        )

    def _pretrain(self, encode: nn.Module) -> None:
        encoder, seed = self._plan.config.encoder, self._plan.config.federation.seed
        assert encoder is not None, "asked for by the federation file"
        releases = self._plan.releases
        # One secondary's coordinates carry the noise of all secondaries' shares.
        noise_std = self._plan.noise_share_std * math.sqrt(releases.parties) * releases.links
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
            noise_multiplier=releases.fitting_multiplier(),
            channel_std=noise_std / releases.privacy.clip_norm,
            generator=torch.Generator().manual_seed(drawn),
        )


def pretrain(
    model: ChannelAutoencoder,
    records: Float[Tensor, "records features"],
    *,
    steps: int,
    sampling_rate: float,
    noise_multiplier: float | None,
    channel_std: float,
    generator: torch.Generator,
) -> None:
    """Train an autoencoder in place; what it learns of any one record is bounded.

    Every step takes a fresh, secret Poisson sample, clips each record's gradient, adds noise to
    their sum and hands it to Adam, which does not ask for its scale: no step needs to know how many
    records there are.

    A record's term of a step's sum is a function of that record, the step and the weights, and of
    nothing else: the noise on the code is a few points that are the same for all records, and a
    gradient is worked out in float64, where a record's place among the others is felt eleven digits
    below a whole unit. So given the noised sums of the steps before, which decide the weights, one
    record changes a step's sum by its own clipped gradient if it was sampled, and by nothing if it
    was not. (Noise drawn record by record from one public generator would shift for all records
    behind it.)

    Args:
        model: Initialised without data.
        records: Scaled features, each a function of that record alone.
        steps: Noised steps, >= 1.
        sampling_rate: q of each step's sample, in (0, 1].
        noise_multiplier: Noise over the clip norm; None adds none.
        channel_std: Deviation of the noise on the code, in units of its length.
        generator: Draws that noise, which protects nobody; privacy does not rest on it. Every step
            takes equally much from it, whoever is sampled.

    Reveals:
        As much as ``steps`` sampled Gaussian releases with that multiplier, of the unit "one record
        of this table, added or removed"; to whom, says the caller.

    References:
        [ACGMMTZ16] Algorithm 1.
    """
    noised = NoisedGradientSum(clip_norm=_CLIP_NORM, noise_multiplier=noise_multiplier)
    sampler = PoissonSampler(len(records), sampling_rate)
    weights = dict(model.named_parameters())
    optimizer = uncompiled(torch.optim.Adam)(weights.values(), lr=_LEARNING_RATE)
    of_each = vmap(grad(_loss_of(model)), in_dims=(None, 0, None), chunk_size=_PIECE)
    sizes = [weight.numel() for weight in weights.values()]
    for _ in range(steps):
        noise = channel_std * torch.randn(_POINTS // 2, model.components, generator=generator)
        chosen = records[torch.from_numpy(sampler.draw()).to(records.device)].double()
        flat = chosen.new_zeros(0, sum(sizes))
        if len(chosen):
            gradients = of_each(
                {name: weight.detach().double() for name, weight in weights.items()},
                chosen,
                torch.cat([noise, -noise]).to(chosen),
            )
            flat = torch.cat([gradients[name].flatten(1) for name in weights], dim=1)
        for weight, part in zip(weights.values(), noised(flat).split(sizes), strict=True):
            weight.grad = part.view_as(weight).to(weight)
        optimizer.step()


def _loss_of(
    model: ChannelAutoencoder,
) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    def loss(weights: dict[str, Tensor], record: Tensor, noise: Tensor) -> Tensor:
        out: Tensor = functional_call(model, weights, (record, noise))
        return out

    return loss
