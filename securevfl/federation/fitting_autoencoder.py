"""Pretrain a frozen encoder on a secondary's own records, by steps that are each noised: DP-SGD."""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, grad, vmap

from securevfl.dp.private_sgd import NoisedGradientSum
from securevfl.linkage.sampling import PoissonSampler
from securevfl.models.autoencoder import ChannelAutoencoder

# Gradients of an error of values in [-1, 1] are mostly longer: every record has one vote.
_CLIP_NORM: Final = 0.1
_LEARNING_RATE: Final = 3e-3


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

    Args:
        model: Initialised without data.
        records: Scaled features, each a function of that record alone.
        steps: Noised steps, >= 1.
        sampling_rate: q of each step's sample, in (0, 1].
        noise_multiplier: Noise over the clip norm; None adds none.
        channel_std: Deviation of the noise on the code, in units of its length.
        generator: Draws that noise, which protects nobody; privacy does not rest on it.

    Raises:
        PrivacyError: If training has diverged.

    Reveals:
        As much as ``steps`` sampled Gaussian releases with that multiplier, of the unit "one record
        of this table, added or removed"; to whom, says the caller.

    References:
        [ACGMMTZ16] Algorithm 1.
    """
    noised = NoisedGradientSum(clip_norm=_CLIP_NORM, noise_multiplier=noise_multiplier)
    sampler = PoissonSampler(len(records), sampling_rate)
    weights = dict(model.named_parameters())
    optimizer = torch.optim.Adam(weights.values(), lr=_LEARNING_RATE)
    of_each = vmap(grad(_loss_of(model)), in_dims=(None, 0, 0))
    for _ in range(steps):
        chosen = records[torch.from_numpy(sampler.draw()).to(records.device)]
        noise = channel_std * torch.randn(len(chosen), model.components, generator=generator)
        if len(chosen):
            gradients = of_each(
                {name: weight.detach() for name, weight in weights.items()},
                chosen,
                noise.to(chosen),
            )
            flat = torch.cat([gradients[name].flatten(1) for name in weights], dim=1)
        else:
            flat = chosen.new_zeros(0, sum(weight.numel() for weight in weights.values()))
        parts = noised(flat).split([weight.numel() for weight in weights.values()])
        for weight, part in zip(weights.values(), parts, strict=True):
            weight.grad = part.view_as(weight)
        optimizer.step()


def _loss_of(
    model: ChannelAutoencoder,
) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    def loss(weights: dict[str, Tensor], record: Tensor, noise: Tensor) -> Tensor:
        out: Tensor = functional_call(model, weights, (record, noise))
        return out

    return loss
