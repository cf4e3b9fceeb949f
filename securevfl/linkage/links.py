"""The result of linkage: for each primary row, its nearest records, in a fixed order."""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core.errors import DataError

NO_RECORD: Final = -1
"""Stands where a row has fewer than K links; its distance is infinite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class LinkTable:
    """K links a primary row, ascending by (distance, record number); missing ones come last."""

    indices: Int64[np.ndarray, "rows links"]
    """Record numbers at the secondary, from 0; :data:`NO_RECORD` for none."""

    distances: Float64[np.ndarray, "rows links"]
    """Distances in the metric's unit; infinite for none."""

    def __post_init__(self) -> None:
        if self.indices.shape != self.distances.shape or self.indices.ndim != 2:
            raise DataError(
                f"links: indices {self.indices.shape} and distances {self.distances.shape} "
                f"must be matrices of one shape"
            )

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self.indices.shape[0]

    @property
    def num_links(self) -> int:
        """K, the slots of a row, filled or not."""
        return self.indices.shape[1]

    @property
    def present(self) -> Bool[np.ndarray, "rows links"]:
        """Which slots hold a record."""
        return self.indices != NO_RECORD

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "LinkTable":
        """Return the links of the chosen rows, in that order."""
        return LinkTable(indices=self.indices[rows], distances=self.distances[rows])

    def first(self, num_links: int) -> "LinkTable":
        """Return each row's nearest ``num_links`` links."""
        return LinkTable(
            indices=self.indices[:, :num_links], distances=self.distances[:, :num_links]
        )

    def within(self, limit: float) -> "LinkTable":
        """Return the links of at most that distance; the others' slots hold no record."""
        if limit == math.inf:
            return self  # no link is farther, and a copy of many links takes much memory
        near = self.distances <= limit
        return LinkTable(
            indices=np.where(near, self.indices, NO_RECORD),
            distances=np.where(near, self.distances, np.inf),
        )

    def most_uses(self, num_records: int) -> int:
        """Return the most rows that any one of ``num_records`` records is linked to."""
        used = self.indices[self.present]
        return int(np.bincount(used, minlength=num_records).max()) if used.size else 0

    def __repr__(self) -> str:
        return f"LinkTable({self.num_rows} rows, {self.num_links} links each)"


def empty_links(rows: int, links: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and distances of ``rows`` rows without a link, to be filled in."""
    return (
        np.full((rows, links), NO_RECORD, dtype=np.int64),
        np.full((rows, links), np.inf, dtype=np.float64),
    )


def fill_slots(
    rows: int,
    links: int,
    row: Int64[np.ndarray, " pairs"],
    record: Int64[np.ndarray, " pairs"],
    distance: Float64[np.ndarray, " pairs"],
) -> LinkTable:
    """Make a link table of pairs that are sorted by row, and within a row nearest first."""
    counts = np.bincount(row, minlength=rows)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = slot < links
    indices, distances = empty_links(rows, links)
    indices[row[kept], slot[kept]] = record[kept]
    distances[row[kept], slot[kept]] = distance[kept]
    return LinkTable(indices=indices, distances=distances)
