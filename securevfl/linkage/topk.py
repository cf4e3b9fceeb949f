"""The K nearest of a block of distances, in the order that every metric keeps."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable, empty_links, fill_slots

# Candidates that are sorted together, each taking about 60 bytes meanwhile.
_SORTED_CELLS: Final = 2**20

DistanceBlock = Callable[[int, int], Shaped[np.ndarray, "chunk records"]]
"""Distances of the primary rows from a start to an end, to all eligible records."""


def nearest_by_block(
    block: DistanceBlock,
    *,
    rows: int,
    ids: Int64[np.ndarray, " chosen"],
    k: int,
    chunk_cells: int,
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
    indices, distances = empty_links(rows, k)
    if len(ids):
        step = max(1, chunk_cells // len(ids))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            near = nearest_in_block(block(start, end), k)
            columns = np.where(near.present, near.indices, 0)
            indices[start:end] = np.where(near.present, ids[columns], near.indices)
            distances[start:end] = near.distances
    return LinkTable(indices=indices, distances=distances)


def nearest_in_block(block: Shaped[np.ndarray, "chunk records"], k: int) -> LinkTable:
    """Return each row's ``k`` smallest distances by (distance, column).

    Memory: a byte a cell, and at most :data:`_SORTED_CELLS` cells (or one row) that are sorted
    together, however many distances tie.
    """
    rows, records = block.shape
    indices, distances = empty_links(rows, k)
    # Everything up to the k-th distance is sorted; ties beyond the k-th fall off the end.
    near = block <= _kth_smallest(block, k) if k < records else np.ones(block.shape, np.bool_)
    for start, end in batches(np.count_nonzero(near, axis=1), _SORTED_CELLS):
        row, column = np.divmod(np.flatnonzero(near[start:end]), records)
        distance = block[start + row, column].astype(np.float64)
        order = np.lexsort((column, distance, row))
        links = fill_slots(end - start, k, row[order], column[order], distance[order])
        indices[start:end], distances[start:end] = links.indices, links.distances
    return LinkTable(indices=indices, distances=distances)


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


def eligible_ids(
    records: int, k: int, eligible: Bool[np.ndarray, " records"] | None
) -> Int64[np.ndarray, " chosen"]:
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
