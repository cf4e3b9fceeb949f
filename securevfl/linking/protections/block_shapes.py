"""How large the blocks of one exchange are, and how what is sent flat is cut into them.

An exchange has as many blocks as fit: over a slow line each exchange waits for round trips, however
little it compares, and grid cells make many small blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shapes:
    """Rows and records of each block."""

    rows: Int64[np.ndarray, " blocks"]
    """Primary rows of each block."""

    records: Int64[np.ndarray, " blocks"]
    """The secondary's records of each block."""

    @classmethod
    def read(cls, message: Message, *, most_pairs: int, none_ends: bool = False) -> "Shapes":
        """Read them from the tensor that :meth:`tensor` gives.

        Args:
            message: What came.
            most_pairs: How many pairs an exchange may have.
            none_ends: Whether there may be no block, which ends a secondary's turn.

        Raises:
            ProtocolError: If there is no block, one is empty, or all have more pairs than that.
        """
        sizes = message.tensor("sizes", dtype=np.int64, shape=(None, 2))
        # Each size is checked before any is multiplied: products of 64 bits would wrap.
        fits = 1 <= sizes.min() <= sizes.max() <= most_pairs if sizes.size else none_ends
        if not fits or sum(rows * records for rows, records in sizes.tolist()) > most_pairs:
            raise ProtocolError(
                f"{message.sender}: named no blocks, empty ones, or more than {most_pairs} pairs"
            )
        return cls(rows=sizes[:, 0], records=sizes[:, 1])

    @property
    def tensor(self) -> Int64[np.ndarray, "blocks 2"]:
        """They as they are sent."""
        return np.column_stack([self.rows, self.records])

    @property
    def pairs(self) -> int:
        """Pairs of all blocks."""
        return int(self.rows @ self.records)

    def __len__(self) -> int:
        return len(self.rows)

    def by_rows(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut what has one entry for each row of each block."""
        return _cut(values, self.rows)

    def by_records(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut what has one entry for each record of each block."""
        return _cut(values, self.records)

    def by_pairs(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut what has one entry for each pair of each block, into (rows, records)."""
        parts = _cut(values, self.rows * self.records)
        sizes = self.tensor.tolist()
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]


def flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all blocks in one row."""
    return parts[0].ravel() if len(parts) == 1 else np.concatenate([one.ravel() for one in parts])


def _cut(values: np.ndarray, counts: Int64[np.ndarray, " blocks"]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []
