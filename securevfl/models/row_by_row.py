"""Bottom models evaluated so that no row of a batch can see another, whoever wrote them."""

import warnings
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn
from torch.func import vmap

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a bottom model computes of features, keys and which links there are."""


def row_by_row(bottom: nn.Module) -> Forward:
    """Return what a bottom model computes, for each row as if it were a batch of its own.

    ``torch.func.vmap`` hands the model one row at a time and computes all of them at once. A model
    that asks for a value (``if x.sum() > 0``, ``x.item()``), or writes values into a buffer, raises
    ``RuntimeError`` whatever the values are.

    Args:
        bottom: A :class:`securevfl.models.split.Bottom`. Layers that drop units drop them for each
            row apart, as they would in a batch.
    """

    def alone(features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        row: Tensor = bottom(features.unsqueeze(0), keys.unsqueeze(0), present.unsqueeze(0))
        return row.squeeze(0)

    each = vmap(alone, randomness="different")

    def together(features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Some layers, of attention above all, then go row after row; that is slower, not wrong.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            out: Tensor = each(features, keys, present)
            return out

    return together
