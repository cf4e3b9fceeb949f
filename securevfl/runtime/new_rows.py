"""New rows of the primary, as a request for predictions takes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedRows:
    """New rows with their names."""

    table: PartyTable
    """Encoded as the model's schema says; labels are not needed."""
    names: Sequence[Any] | None = None
    """None numbers them from 1 on."""
    row_name: str = "row"
    """The heading of the names."""
    linkable: Bool[np.ndarray, " rows"]
    """Mask of the rows that have a key. The others are predicted without the secondaries, and cost
    nothing; where keys are numbers, they have a substitute that nothing is linked by."""

    @classmethod
    def all_of(cls, table: PartyTable) -> "NamedRows":
        """Return the rows of a table that all have keys."""
        return cls(table=table, linkable=np.ones(table.num_rows, dtype=np.bool_))


_ORDINARY: Final = 1e9
"""Values up to here, scaled and as they are, are not looked at further."""

_LARGEST: Final = 1e30
"""Largest size of an output without partners; their average adds what float32 still holds."""


class NotFiniteError(DataError):
    """The model has no finite output for a row; the message quotes no cell."""


def require_finite_outputs(
    table: PartyTable,
    features: Float32[np.ndarray, "rows features"],
    outputs: Callable[[PartyTable], Tensor],
) -> None:
    """Refuse rows for which the primary's half of the model alone has no finite output.

    Args:
        table: The rows.
        features: Theirs, as the model takes them.
        outputs: Returns what the half computes of rows that nothing is linked to.

    Raises:
        NotFiniteError: Naming the first such row.
    """
    # Written so that NaN, which scaling makes of what it cannot hold, is looked at.
    values = np.hstack([features, table.features, table.keys])
    suspects = np.flatnonzero(~(np.abs(values) <= _ORDINARY).all(axis=1))
    if not len(suspects):
        return
    output_values = outputs(table.take(suspects))
    good = torch.all(output_values.abs() <= _LARGEST, dim=1).cpu().numpy()
    if not good.all():
        row = int(suspects[~good][0])
        raise NotFiniteError(
            f"row {row + 1}: the model has no finite prediction for it; a number in it is far "
            f"beyond those of training"
        )
