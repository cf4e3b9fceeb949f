"""How alike positional encodings are: those of one party, and those of two."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

_GRID: Final = 625
_REACH: Final = 2.0
# With more dimensions a grid of three steps a side would be thousands of keys.
_MOST_GRID_DIMENSIONS: Final = 6
_SHOWN_PAIRS: Final = 250


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionsTaken:
    """A party's positional encoding around an average: its own weights, and the mean's."""

    own: Mapping[str, Tensor]
    """By name, as the party sent them into the average."""

    mean: Mapping[str, Tensor]
    """What came back."""


def key_grid(key_dim: int) -> Float[Tensor, "keys dimension"]:
    """Return some 600 made-up keys within two deviations: a grid, or scattered in many dimensions.

    They are the same in every run, and of no table.
    """
    if key_dim <= _MOST_GRID_DIMENSIONS:
        one = torch.linspace(-_REACH, _REACH, round(_GRID ** (1 / key_dim)))
        return torch.cartesian_prod(*[one] * key_dim).view(-1, key_dim)
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(_GRID, key_dim, generator=generator) - 1) * _REACH


def encoded(
    positions: nn.Module, weights: Mapping[str, Tensor], keys: Float[Tensor, "keys dimension"]
) -> Float[Tensor, "keys width"]:
    """Return what a positional encoding with such weights makes of keys, on the CPU."""
    device = next(positions.parameters()).device
    moved = {name: value.to(device) for name, value in weights.items()}
    with torch.no_grad():
        found: Tensor = torch.func.functional_call(positions, moved, (keys.to(device),))
    return found.cpu()


def distance_correlation(
    keys: Float[Tensor, "keys dimension"],
    first: Float[Tensor, "keys width"],
    second: Float[Tensor, "keys width"],
) -> float | None:
    """Return how distances of keys go together with those of their encodings.

    The correlation, over all pairs of keys (x, y), of ||x - y|| and ||first(x) - second(y)||; None
    where either is constant. ``first`` and ``second`` are the encodings of one party or of two.

    References:
        [FeT] section 5.1, Figure 4.
    """
    apart = torch.stack([torch.cdist(keys, keys), torch.cdist(first, second)]).flatten(1)
    found = float(torch.corrcoef(apart)[0, 1])
    return found if -2 < found < 2 else None


def alignment(
    positions: nn.Module,
    taken: PositionsTaken,
    *,
    key_dim: int,
    others: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return Figure 4 of a party: distances of keys against distances of their encodings.

    Args:
        positions: Its positional encoding, of any weights.
        taken: Its weights before an average, and those after it.
        key_dim: Key columns.
        others: Other parties' weights before the average, by name; empty where each party is a
            process of its own, which knows nobody's.

    Returns:
        ``key_distance`` of some pairs of made-up keys, and under ``pictures`` for each comparison
        its ``name``, its ``encoding_distance`` of the same pairs, and its ``correlation`` over all
        pairs.

    References:
        [FeT] section 5.1, Figure 4: (b) within a party, (a) and (c) between two.

    Reveals:
        Weights of whoever is named, by what they make of made-up keys: to whoever reads it.
    """
    keys = key_grid(key_dim)
    own = encoded(positions, taken.own, keys)
    mean = encoded(positions, taken.mean, keys)
    compared = {"before: its own": (own, own)}
    for name, weights in others.items():
        compared[f"before: its own and that of {name}"] = own, encoded(positions, weights, keys)
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


def finite(values: Float[Tensor, "*shape"]) -> list[Any]:
    """Return numbers for a picture, as JSON can hold them: six decimals, 0 where not finite."""
    exact = values.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    found: list[Any] = exact.round(decimals=6).tolist()
    return found
