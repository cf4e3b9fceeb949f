"""Gradients of single records, clipped and summed as integers behind exact noise: DP-SGD's step."""

from typing import Final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from securevfl.core import checks
from securevfl.dp.ring_noise import ExactDiscreteGaussian

UNIT: Final = 2.0**-16
"""What gradients are counted in: with C = 1, noise of 0.001 to 1,000 times C can be drawn."""

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
            else ExactDiscreteGaussian(noise_multiplier * clip_norm / UNIT)
        )

    def __call__(
        self, gradients: Float[Tensor, "records parameters"]
    ) -> Float[Tensor, " parameters"]:
        """Return the noised sum; of no records, the noise alone."""
        total = self.units(gradients)
        if self._noise is not None:
            total = total + self._noise.sample(total.shape, device=total.device)
        return (total * UNIT).to(gradients.dtype)

    def units(
        self, gradients: Float[Tensor, "records parameters"]
    ) -> Float64[Tensor, " parameters"]:
        """Return the sum in whole units of ``UNIT``, without noise.

        A gradient that is not finite counts as zero: an error would tell that its record is there.
        """
        exact = gradients.double()
        norm = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
        longest = self.clip_norm * _INSIDE
        units = torch.trunc(exact * (longest / UNIT / norm.clamp_min(longest)))
        # Whole numbers below 2^53 add up exactly in float64, in whatever order.
        return torch.where(norm.isfinite(), units, 0.0).sum(dim=0)
