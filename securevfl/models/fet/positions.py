"""Positional encoding of keys: learnable Fourier features of a point in several dimensions."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import checks


class FourierPositions(nn.Module):
    """Map a key to a vector whose inner products fall off with the distance between keys.

    With D the key dimension and F the number of Fourier features,

        r(x)  = [cos(W_r x), sin(W_r x)] / sqrt(F),      W_r of shape (F/2, D)
        PE(x) = GELU(r(x) W_1 + b_1) W_2 + b_2

    and W_r starts as N(0, gamma^-2): a variance, so the standard deviation is 1/gamma. Then
    r(x) . r(y) approximates the Gaussian kernel exp(-||x - y||^2 / (2 gamma^2)), halved.

    References:
        [Li21] Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding
        (arXiv:2106.02795v3), equations (2), (6) and Algorithm 1, with one positional group.
    """

    def __init__(
        self,
        key_dim: int,
        *,
        num_features: int,
        hidden: int,
        width: int,
        scale: float,
    ) -> None:
        super().__init__()
        checks.positive(scale=scale)
        self.scale = scale
        self.frequencies = nn.Parameter(torch.empty(num_features // 2, key_dim))
        self.into = nn.Linear(num_features, hidden)
        self.out = nn.Linear(hidden, width)
        # A default for models that are never initialised from a seed.
        nn.init.normal_(self.frequencies, std=1 / scale)

    def draw(self, generator: torch.Generator) -> None:
        """Draw the frequencies from N(0, gamma^-2)."""
        with torch.no_grad():
            self.frequencies.normal_(0.0, 1 / self.scale, generator=generator)

    def features(
        self, keys: Float[Tensor, "*rows dimension"]
    ) -> Float[Tensor, "*rows fourier_features"]:
        """Return the Fourier features r(x) alone; their squared norm is 1/2."""
        angles = keys @ self.frequencies.T
        both = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return both / math.sqrt(both.shape[-1])

    def forward(self, keys: Float[Tensor, "*rows dimension"]) -> Float[Tensor, "*rows width"]:
        """Return the positional encoding of each key."""
        encoded: Tensor = self.out(nn.functional.gelu(self.into(self.features(keys))))
        return encoded
