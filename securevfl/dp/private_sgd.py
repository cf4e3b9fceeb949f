"""Gradients of single records, clipped and summed as integers behind exact noise: DP-SGD's step."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core import checks
from securevfl.core.errors import PrivacyError
from securevfl.dp.ring_noise import ExactDiscreteGaussian

# With C = 1 and 16 bits, noise of 0.001 to 1,000 times C is within what the sampler draws.
_BITS: Final = 16
# Keeps a clipped gradient inside the ball in spite of rounding.
_INSIDE: Final = 1 - 1e-9


class NoisedGradientSum:
    """``sum_i clip(g_i, C) + N(0, (z C)^2 I)`` over the records of a Poisson sample.

    Each record's gradient is clipped, rounded towards zero into whole units, and summed exactly, so
    that one record changes the sum by at most C in the integers to which the noise is added.

    References:
        [ACGMMTZ16] Algorithm 1, without the division by the sample's expected size: what steps
        along the sum must not depend on its scale (Adam does not), and then nothing needs to know
        how many records there are.
    """

    def __init__(self, *, clip_norm: float, noise_multiplier: float | None) -> None:
        """Make a mechanism; ``noise_multiplier`` None adds no noise, and promises nothing."""
        checks.positive(clip_norm=clip_norm)
        self.clip_norm = clip_norm
        self._noise = (
            None
            if noise_multiplier is None
            else ExactDiscreteGaussian(noise_multiplier * clip_norm * 2.0**_BITS)
        )

    def __call__(
        self, gradients: Float[Tensor, "records parameters"]
    ) -> Float[Tensor, " parameters"]:
        """Return the noised sum; of no records, the noise alone.

        Raises:
            PrivacyError: If a gradient is not finite.
        """
        exact = gradients.double()
        norm = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
        longest = self.clip_norm * _INSIDE
        units = torch.trunc(exact * (longest * 2.0**_BITS / norm.clamp_min(longest)))
        squares = units.square().sum(dim=1)
        if not bool((squares <= (self.clip_norm * 2.0**_BITS) ** 2).all()):
            raise PrivacyError("a record's gradient is not finite; fitting has diverged")
        total = units.sum(dim=0)
        if self._noise is not None:
            total = total + self._noise.sample(total.shape, device=total.device)
        return (total * 2.0**-_BITS).to(gradients.dtype)
