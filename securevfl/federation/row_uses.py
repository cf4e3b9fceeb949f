"""How often each row was released, and row ids in few characters."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from jaxtyping import Int64

# More rows than any table has; an id above it is not one.
_MOST_ROWS: Final = 2**31


class RowUses:
    """How often each row was released: one small number a row."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int32)

    def most_with(self, rows: Int64[np.ndarray, " batch"]) -> int:
        """Return the most releases that one of these rows would have with this one."""
        self._reach(int(rows.max()))
        ids, counts = np.unique(rows, return_counts=True)
        return int((self._counts[ids] + counts).max())

    def add(self, rows: Int64[np.ndarray, " batch"]) -> None:
        """Count a release of these rows."""
        self._reach(int(rows.max()))
        np.add.at(self._counts, rows, 1)

    @property
    def rows(self) -> Int64[np.ndarray, " released"]:
        """Ids of the rows that were released, in order."""
        return np.flatnonzero(self._counts)

    def _reach(self, row: int) -> None:
        if row >= len(self._counts):
            more = max(row + 1, 2 * len(self._counts)) - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.int32)])


def ranges_of(rows: Int64[np.ndarray, " batch"]) -> list[tuple[int, int]]:
    """Return ids as ranges with both ends in them."""
    ids = np.unique(rows)
    ends = np.flatnonzero(np.diff(ids) != 1)
    first, last = ids[np.append(0, ends + 1)], ids[np.append(ends, len(ids) - 1)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def ranges_from(written: Iterable[Iterable[int]], *, rows: int) -> list[tuple[int, int]]:
    """Read what :func:`ranges_of` has made of so many rows.

    Raises:
        ValueError: If these are no ranges, or not of so many rows.
    """
    ranges = [(int(first), int(last)) for first, last in written]
    sizes = [last - first + 1 for first, last in ranges if 0 <= first <= last < _MOST_ROWS]
    if len(sizes) < len(ranges) or sum(sizes) != rows:
        raise ValueError(f"released: is not {rows} rows in ranges")
    return ranges
