"""What a trained FeT makes of links: masks over key space, and which links are attended to.

B = rows of a batch, K = links of a row, L = positions of the aggregate, D = key dimension.
"""

import math
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.models.encodings import finite
from securevfl.models.fet.masking import JoinedMask, attention_bias

_POINTS: Final = 200
_PLACES: Final = (-1.0, 0.0, 1.0)
_GOLDEN_ANGLE: Final = math.pi * (3 - math.sqrt(5))
# Of keys that are all equal: any width that can be seen.
_SOME_SPREAD: Final = 0.5


def mask_pictures(
    mask: nn.Module,
    keys: Float[Tensor, "batch links dimension"],
    present: Bool[Tensor, "batch links"],
) -> list[dict[str, Any]]:
    """Return what the mask gives to made-up links around three made-up rows.

    Each row has its links around it, nearest first, as evenly as can be: on a line where keys have
    one dimension, and in a disc of the first two where they have more (the others stay at the
    row's). Where rows lie, and how far their links reach, follows from the batch: rows at the mean
    of the batch's rows and one deviation to either side of it, links with the median row's spread.
    No link of the batch is shown.

    Args:
        mask: A :class:`securevfl.models.fet.masking.DynamicMask` or ``JoinedMask``.
        keys: Keys of a batch's links.
        present: Which links there are.

    Returns:
        For each row ``row`` (D numbers), ``links`` (two numbers each, or one) and ``mask`` (one
        each): what is added to a link's attention scores.

    References:
        [FeT] section 5.1, Dynamic Masking and Figure 3, which shows links of real rows.
    """
    dimension = keys.shape[2]
    shown = min(dimension, 2)
    rows, deviation, spread = _neighbourhoods(keys, present)
    points = keys.shape[1] if isinstance(mask, JoinedMask) else _POINTS
    around = keys.new_zeros(points, dimension)
    around[:, :shown] = (_line(points) if shown == 1 else _disc(points)).to(keys.device)
    around *= spread / around.square().sum(dim=1).mean().sqrt().clamp_min(1e-12)
    pictures = []
    for place in _PLACES:
        row = rows + place * deviation
        links = row + around
        there = torch.ones(1, points, dtype=torch.bool, device=keys.device)
        with torch.no_grad():
            values = mask(links.unsqueeze(0), there).squeeze(0)
        pictures.append(
            {"row": finite(row), "links": finite(links[:, :shown]), "mask": finite(values)}
        )
    return pictures


def _neighbourhoods(keys: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and deviation of where rows' links lie, and how far they reach."""
    linked = present.any(dim=1)
    keys, there = keys[linked].nan_to_num(0.0), present[linked].unsqueeze(-1).to(keys.dtype)
    if not len(keys):
        still = keys.new_zeros(keys.shape[2])
        return still, still + 1, keys.new_tensor(_SOME_SPREAD)
    count = there.sum(dim=1)
    centres = (keys * there).sum(dim=1) / count
    away = ((keys - centres.unsqueeze(1)).square() * there).sum(dim=(1, 2)) / count.squeeze(1)
    spread = away.sqrt().median()
    deviation = centres.std(dim=0, correction=0)
    return centres.mean(dim=0), deviation, spread if float(spread) > 0 else spread + _SOME_SPREAD


def _line(points: int) -> Tensor:
    """Return places left and right of 0 in turns, nearest first; shape (points, 1)."""
    steps = torch.arange(1, points + 1)
    signs = torch.where(steps % 2 == 0, 1.0, -1.0)
    return (signs * torch.div(steps, 2, rounding_mode="floor")).unsqueeze(1)


def _disc(points: int) -> Tensor:
    """Return places that fill a disc evenly, nearest first (Vogel's spiral); (points, 2)."""
    number = torch.arange(points, dtype=torch.float32)
    angle, radius = number * _GOLDEN_ANGLE, (number / points).sqrt()
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def attention_by_rank(
    weights: Float[Tensor, "batch heads queries memory"],
    present: Bool[Tensor, "batch memory"] | None = None,
) -> list[float]:
    """Return how much attention each position gets, in the mean over rows, heads and queries.

    Args:
        weights: Of one layer; each query's sum to 1.
        present: Which links there are, where queries are links too; absent ones ask nothing, and
            rows without a link count for nothing. None: all.

    Returns:
        One number a position, nearest link first; they sum to 1.
    """
    over_heads = weights.mean(dim=1)
    if present is None:
        return finite(over_heads.mean(dim=(0, 1)))
    asks = present.to(weights.dtype).unsqueeze(-1)
    by_row = (over_heads * asks).sum(dim=1) / asks.sum(dim=1).clamp_min(1)
    return finite(by_row[present.any(dim=1)].mean(dim=0))


def mask_by_rank(
    bias: Float[Tensor, "batch links"] | None, present: Bool[Tensor, "batch links"]
) -> list[float]:
    """Return what mask and ranks alone would give each link: the mean softmax of their sum."""
    weights = attention_bias(bias, present).softmax(dim=1)[present.any(dim=1)]
    return finite(weights.mean(dim=0))
