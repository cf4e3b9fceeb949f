"""Positional encodings of keys: learnable Fourier features, and their alignment between parties.

D = key dimension, F = Fourier features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import checks, devices
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import finite


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


_GRID: Final = 625
_REACH: Final = 2.0
# In more dimensions, a grid of three steps a side would have thousands of keys.
_MOST_GRID_DIMENSIONS: Final = 6
_SHOWN_PAIRS: Final = 250


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionsTaken:
    """A party's positional encoding before and after an average."""

    own: Mapping[str, Tensor]
    """The party's weights before the average, by name."""

    mean: Mapping[str, Tensor]
    """The average of all parties' weights, by name."""


def key_grid(key_dim: int) -> Float[Tensor, "keys dimension"]:
    """Return about 600 synthetic keys within two standard deviations.

    They form a grid or, in more than six dimensions, are random; the same in every run, from no
    table.
    """
    if key_dim <= _MOST_GRID_DIMENSIONS:
        axis = torch.linspace(-_REACH, _REACH, round(_GRID ** (1 / key_dim)))
        return torch.cartesian_prod(*[axis] * key_dim).view(-1, key_dim)
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(_GRID, key_dim, generator=generator) - 1) * _REACH


def encode_keys(
    positions: nn.Module, weights: Mapping[str, Tensor], keys: Float[Tensor, "keys dimension"]
) -> Float[Tensor, "keys width"]:
    """Return the encodings of keys with the given weights, on the CPU."""
    device = next(positions.parameters()).device
    moved = {name: value.to(device) for name, value in weights.items()}
    with torch.no_grad():
        encoding: Tensor = torch.func.functional_call(positions, moved, (keys.to(device),))
    return encoding.cpu()


def distance_correlation(
    keys: Float[Tensor, "keys dimension"],
    first: Float[Tensor, "keys width"],
    second: Float[Tensor, "keys width"],
) -> float | None:
    """Return the correlation of keys' distances with the distances of their encodings.

    It correlates ||x - y|| with ||first(x) - second(y)|| over all pairs of keys (x, y); None if
    either is constant. ``first`` and ``second`` are the encodings of one party or of two.

    References:
        [FeT] section 5.1, Figure 4.
    """
    apart = torch.stack([torch.cdist(keys, keys), torch.cdist(first, second)]).flatten(1)
    correlation = float(torch.corrcoef(apart)[0, 1])
    return correlation if -2 < correlation < 2 else None


def alignment(
    positions: nn.Module,
    taken: PositionsTaken,
    *,
    key_dim: int,
    others: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return the data of [FeT] Figure 4 for a party: distances of keys and of their encodings.

    Args:
        positions: Its positional encoding, with any weights.
        taken: Its weights before and after an average.
        key_dim: Key columns.
        others: Other parties' weights before the average, by name; empty where parties are separate
            processes and do not know them.

    Returns:
        ``key_distance``: distances of some pairs of synthetic keys. ``pictures``: for each
        comparison its ``name``, the ``encoding_distance`` of the same pairs, and the
        ``correlation`` over all pairs.

    References:
        [FeT] section 5.1, Figure 4: (b) within a party, (a) and (c) between two.

    Reveals:
        To whoever reads the result: encodings of synthetic keys by the weights of each named party.
    """
    keys = key_grid(key_dim)
    own = encode_keys(positions, taken.own, keys)
    mean = encode_keys(positions, taken.mean, keys)
    compared = {"before: its own": (own, own)}
    for name, weights in others.items():
        compared[f"before: its own and that of {name}"] = own, encode_keys(positions, weights, keys)
    if not others:
        compared["its own before, and the average"] = own, mean
    compared["after: the average, which all have"] = mean, mean
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(len(keys), (2, _SHOWN_PAIRS), generator=generator)
    return {
        "key_distance": finite((keys[a] - keys[b]).norm(dim=1)),
        "pictures": [
            {
                "name": name,
                "encoding_distance": finite((first[a] - second[b]).norm(dim=1)),
                "correlation": distance_correlation(keys, first, second),
            }
            for name, (first, second) in compared.items()
        ],
    }


def position_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the positional-encoding weights of a bottom or top model."""
    positions = model.get_submodule("positions")
    return {name: value.detach() for name, value in positions.named_parameters()}


def positions_around(model: nn.Module, mean: Mapping[str, Tensor]) -> PositionsTaken:
    """Return a model's positional-encoding weights, with the names of those that replace them."""
    own = {name: value.clone() for name, value in position_weights(model).items()}
    return PositionsTaken(own=own, mean=mean)


def load_positions(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy averaged positional-encoding weights into a bottom or top model."""
    with torch.no_grad():
        for name, parameter in model.get_submodule("positions").named_parameters():
            parameter.copy_(weights[name].to(parameter))
