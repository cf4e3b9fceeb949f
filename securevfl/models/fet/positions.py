"""Positional encodings of keys: learnable Fourier features.

D = key dimension, F = Fourier features.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import checks, devices
from securevfl.models.fet.settings import FeTConfig


class FourierPositions(nn.Module):
    """Maps a key to a vector; inner products of vectors fall with the distance between keys.

    With D the key dimension and F the number of Fourier features,

        r(x)  = [cos(W_r x), sin(W_r x)] / sqrt(F),      W_r of shape (F/2, D)
        PE(x) = GELU(r(x) W_1 + b_1) W_2 + b_2

    and W_r starts as N(0, gamma^-2): a variance, so the standard deviation is 1/gamma. Then
    r(x) . r(y) approximates the Gaussian kernel exp(-||x - y||^2 / (2 gamma^2)), halved.

    With ``octaves`` above zero the deviation of row i of W_r is 2^(octaves i / (F/2 - 1)) / gamma,
    and r(x) is sqrt(2) [cos(W_r x), sin(W_r x)]. Frequencies of 1/gamma alone cannot distinguish
    keys that are much nearer than gamma, and training hardly moves them there. The entries of the
    formula's r(x) are so small that the encoding starts far below a record's features. Together
    these keep the encoding from being learned where near keys matter.

    References:
        [Li21] Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding
        (arXiv:2106.02795v3), equations (2), (6) and Algorithm 1, with one positional group.
        Octaves are ours.
    """

    def __init__(
        self,
        key_dim: int,
        *,
        num_features: int,
        hidden: int,
        width: int,
        scale: float,
        octaves: int = 0,
    ) -> None:
        super().__init__()
        checks.positive(scale=scale)
        self.scale = scale
        self.octaves = octaves
        self.frequencies = nn.Parameter(torch.empty(num_features // 2, key_dim))
        self.into = nn.Linear(num_features, hidden)
        self.out = nn.Linear(hidden, width)
        # A default for models that are never initialised from a seed.
        nn.init.normal_(self.frequencies, std=1 / scale)
        self._space_octaves()

    def draw(self, generator: torch.Generator) -> None:
        """Draw the frequencies from N(0, gamma^-2) and spread them over the octaves."""
        with torch.no_grad():
            self.frequencies.normal_(0.0, 1 / self.scale, generator=generator)
        self._space_octaves()

    @torch.no_grad()
    def _space_octaves(self) -> None:
        octaves = torch.linspace(0, self.octaves, len(self.frequencies))
        self.frequencies.mul_((2**octaves).unsqueeze(1))

    def features(
        self, keys: Float[Tensor, "*rows dimension"]
    ) -> Float[Tensor, "*rows fourier_features"]:
        """Return the Fourier features r(x) alone.

        Their squared norm is 1/2; with octaves it is F, so that their mean square is one.
        """
        # Angles are many radians; half precision would lose all significant digits.
        with devices.computing_in("float32", keys.device):
            angles = keys @ self.frequencies.T
        both = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return both * math.sqrt(2) if self.octaves else both / math.sqrt(both.shape[-1])

    def forward(self, keys: Float[Tensor, "*rows dimension"]) -> Float[Tensor, "*rows width"]:
        """Return the positional encoding of each key."""
        encoded: Tensor = self.out(nn.functional.gelu(self.into(self.features(keys))))
        return encoded


def fourier_positions(config: FeTConfig, key_dim: int) -> FourierPositions:
    """Return the positional encoding of the settings, for keys with ``key_dim`` columns."""
    return FourierPositions(
        key_dim,
        num_features=config.fourier_features,
        hidden=config.fourier_width,
        width=config.hidden,
        scale=config.fourier_scale,
        octaves=config.octaves(key_dim),
    )


def position_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the positional-encoding weights of a bottom or top model."""
    positions = model.get_submodule("positions")
    return {name: value.detach() for name, value in positions.named_parameters()}


def load_positions(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy averaged positional-encoding weights into a bottom or top model."""
    with torch.no_grad():
        for name, parameter in model.get_submodule("positions").named_parameters():
            parameter.copy_(weights[name].to(parameter))
