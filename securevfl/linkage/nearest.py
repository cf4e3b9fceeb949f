"""The K nearest of a block of distances, in the order that every metric keeps."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from jaxtyping import Int64, Shaped

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import Chosen, LinkTable, Sample, nearest_pairs

# Candidates that are sorted together, each taking about 60 bytes meanwhile.
_SORTED_CELLS: Final = 2**20

# A tree's distance and the canonical one differ by a few roundings, far below this fraction.
_RELATIVE_SLACK: Final = 1e-9

# Squares below 1e-300 lose their precision, so distances below 1e-150 may come out equal.
_ABSOLUTE_SLACK: Final = 1e-150

DistanceBlock = Callable[[int, int], Shaped[np.ndarray, "chunk records"]]
"""Distances of the primary rows from a start to an end, to all eligible records."""


def nearest_by_block(
    block: DistanceBlock, *, rows: int, ids: Chosen, k: int, chunk_cells: int
) -> LinkTable:
    """Link rows chunk by chunk, from dense blocks of distances.

    Args:
        block: Computes a block; its columns are the records ``ids``.
        rows: Primary rows.
        ids: Eligible records, ascending.
        k: Links a row.
        chunk_cells: Most distances in memory at a time.

    Returns:
        Links, ascending by (distance, record number).
    """
    links = LinkTable.empty(rows, k)
    if len(ids):
        step = max(1, chunk_cells // len(ids))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            links.put(slice(start, end), nearest_in_block(block(start, end), k).renumber(ids))
    return links


def nearest_in_block(block: Shaped[np.ndarray, "chunk records"], k: int) -> LinkTable:
    """Return each row's ``k`` smallest distances by (distance, column).

    Memory: a byte a cell, and at most :data:`_SORTED_CELLS` cells (or one row) that are sorted
    together, however many distances tie.
    """
    rows, records = block.shape
    links = LinkTable.empty(rows, k)
    # Everything up to the k-th distance is sorted; ties beyond the k-th fall off the end.
    near = block <= _kth_smallest(block, k) if k < records else np.ones(block.shape, np.bool_)
    for start, end in batches(np.count_nonzero(near, axis=1), _SORTED_CELLS):
        row, column = np.divmod(np.flatnonzero(near[start:end]), records)
        distance = block[start + row, column].astype(np.float64)
        links.put(slice(start, end), nearest_pairs(end - start, k, row, column, distance))
    return links


def write_nearest(
    links: LinkTable,
    rows: Chosen,
    ids: Int64[np.ndarray, " eligible"],
    search: Callable[[np.ndarray, int], tuple[Any, Any]],
    measure: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    *,
    width: int,
    chunk_cells: int,
) -> None:
    """Write the exact links of some rows, with an index that breaks ties as it likes.

    Args:
        links: Where they are written.
        rows: Rows that are searched for.
        ids: Record numbers of what the index holds, ascending; at least one.
        search: Returns distances and positions in the index of so many nearest, a line each of
            some rows; distances ascend and are off by less than a rounding or two.
        measure: Returns the exact distances of some rows to positions, given those of ``search``.
        width: How many are asked for at first.
        chunk_cells: Most candidates (rows times width) that are looked at together.
    """
    wanted, count = min(links.num_links, len(ids)), len(ids)
    width = min(width, count)
    while len(rows):
        undecided = []
        step = max(1, chunk_cells // width)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            near, position = map(np.asarray, search(some, width))
            # If the last candidate is as far as the k-th, others as far may be still outside.
            limit = near[:, wanted - 1] * (1 + _RELATIVE_SLACK) + _ABSOLUTE_SLACK
            decided = (near[:, -1] > limit) | (width == count)
            undecided.append(some[~decided])
            some, position = some[decided], position[decided]
            exact = measure(some, position, near[decided])
            _put_in_order(position, exact)
            links.indices[some, :wanted] = ids[position[:, :wanted]]
            links.distances[some, :wanted] = exact[:, :wanted]
        rows = np.concatenate(undecided)
        width = min(2 * width, count)


def _put_in_order(
    position: Int64[np.ndarray, "rows width"], exact: Shaped[np.ndarray, "rows width"]
) -> None:
    """Sort candidates by (distance, position), in place."""
    # Most rows come in order from an index; sorting all of them would cost as much as it.
    unsorted = np.flatnonzero((exact[:, 1:] <= exact[:, :-1]).any(axis=1))
    # Positions ascend with record numbers, so they break ties the same way.
    order = np.lexsort((position[unsorted], exact[unsorted]), axis=1)
    position[unsorted] = np.take_along_axis(position[unsorted], order, axis=1)
    exact[unsorted] = np.take_along_axis(exact[unsorted], order, axis=1)


def batches(sizes: Int64[np.ndarray, " rows"], most: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of runs of rows whose sizes add up to at most ``most``, or of one row."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        done = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield start, end
        start = end


def _kth_smallest(
    block: Shaped[np.ndarray, "chunk records"], k: int
) -> Shaped[np.ndarray, "chunk 1"]:
    """Return each row's k-th smallest distance, as a column."""
    if block.dtype not in (np.uint8, np.uint16):
        return np.partition(block, k - 1, axis=1)[:, k - 1 : k]
    # Short whole numbers are counted, which takes a quarter of the time of partitioning them.
    limits = [np.searchsorted(np.cumsum(np.bincount(row)), k) for row in block]
    return np.array(limits, dtype=block.dtype)[:, None]


def eligible_ids(records: int, k: int, eligible: Sample | None) -> Chosen:
    """Check K and eligibility, and return the records that may be linked.

    Raises:
        ConfigError: If ``k`` is below 1 or ``eligible`` has another length.
        DataError: If there are no records or fewer than ``k``.
    """
    checks.at_least(1, k=k)
    if k > records:
        raise DataError(
            f"K = {k} links were asked for, but the table has only {records} records; "
            f"lower model.neighbours"
        )
    if eligible is None:
        return np.arange(records, dtype=np.int64)
    if eligible.shape != (records,):
        raise ConfigError(f"eligible: must have the length {records}, got {eligible.shape}")
    return np.flatnonzero(eligible)
