"""Exact links from few pairs, where each pair is expensive: only neighbouring grid cells are tried.

Quantised keys fall into square cells of a width. A row is linked to the records of its own cell and
of those that touch it, which hold every record up to one width away. So a row whose K-th link is at
most a width away is done; the others are linked anew with cells of twice the width, until all
records are tried. The links are those of all pairs, whatever the width.

Works with any way to link a block of rows to a block of records (Paillier, secret shares). Blocks
of many rows fill the lanes of Paillier's plaintexts better.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from scipy.spatial import cKDTree

from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.topk import eligible_ids

BlockLinker = Callable[[np.ndarray, np.ndarray, int], LinkTable]
"""Links the given rows to the given records, at most so many links a row; the table's record
numbers are positions among the given records, its distances are in units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellLinks:
    """Links, and what they cost."""

    links: LinkTable
    """Those of all pairs; distances in units."""

    pairs: int
    """Pairs whose distance was computed, counting those that were tried again."""

    passes: int
    """Widths that were tried."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellBlock:
    """Rows of one cell, and the records that are near enough to be tried."""

    rows: Int64[np.ndarray, " block_rows"]
    """Primary rows, ascending."""

    records: Int64[np.ndarray, " block_records"]
    """Records, ascending; perhaps none."""


def cells_of(units: Int64[np.ndarray, "own key_dim"], width: int) -> Int64[np.ndarray, "own _"]:
    """Return the cell of each quantised key.

    Raises:
        ConfigError: If the width is below 1.

    Reveals:
        To whoever gets the cells: each key up to ``width`` units, and which rows or records are
        near one another. Choose the width by what may be known.
    """
    checks.at_least(1, width=width)
    return units // width


def cell_blocks(
    primary_cells: Int64[np.ndarray, "rows key_dim"],
    record_cells: Int64[np.ndarray, "records key_dim"],
) -> list[CellBlock]:
    """Return a block for each cell that holds a row."""
    cells, cell_of = np.unique(primary_cells, axis=0, return_inverse=True)
    theirs, their_cell_of = np.unique(record_cells, axis=0, return_inverse=True)
    by_cell, by_their_cell = _members(cell_of.ravel()), _members(their_cell_of.ravel())
    # Touching cells differ by at most 1 in every dimension.
    touching = cKDTree(theirs).query_ball_point(cells, 1, p=np.inf)
    none = np.empty(0, dtype=np.int64)
    return [
        CellBlock(
            rows=rows,
            records=np.sort(np.concatenate([none, *(by_their_cell[cell] for cell in near)])),
        )
        for rows, near in zip(by_cell, touching, strict=True)
    ]


def links_by_cell(
    primary_cells: Int64[np.ndarray, "rows key_dim"],
    record_cells: Int64[np.ndarray, "records other_dim"],
    k: int,
    *,
    width: int,
    link: BlockLinker,
) -> CellLinks:
    """Link every row exactly, block by block.

    Args:
        primary_cells: From :func:`cells_of`, at the primary.
        record_cells: From :func:`cells_of` at the secondary, of the same width.
        k: Links a row, at most the number of records.
        width: Units of a cell.
        link: Links a block; for Paillier and shares, the whole protocol.

    Returns:
        The links of all pairs, ascending by (distance, record number).

    Raises:
        ConfigError: If ``k`` or ``width`` is below 1.
        DataError: If a table is empty, the dimensions differ, or ``k`` exceeds the records.

    Reveals:
        To whoever runs this: the cells, and which rows have fewer than K records within a width
        (then within two, four, ...).
    """
    checks.at_least(1, width=width)
    if 0 in primary_cells.shape or 0 in record_cells.shape:
        raise DataError("cells: a table is empty")
    if primary_cells.shape[1] != record_cells.shape[1]:
        raise DataError(
            f"cells: the primary's have {primary_cells.shape[1]} dimensions, the secondary's "
            f"{record_cells.shape[1]}"
        )
    num_records = len(record_cells)
    eligible_ids(num_records, k, None)
    indices, distances = empty_links(len(primary_cells), k)
    pending = np.arange(len(primary_cells))
    pairs = passes = 0
    while len(pending):
        passes += 1
        undecided = [np.empty(0, dtype=np.int64)]
        for block in cell_blocks(primary_cells[pending], record_cells):
            rows = pending[block.rows]
            if len(block.records) < k:
                undecided.append(rows)
                continue
            near = link(rows, block.records, k)
            pairs += len(rows) * len(block.records)
            # Records that were not tried are more than a width away.
            done = (near.distances[:, -1] <= width) | (len(block.records) == num_records)
            indices[rows[done]] = block.records[near.indices[done]]
            distances[rows[done]] = near.distances[done]
            undecided.append(rows[~done])
        pending = np.sort(np.concatenate(undecided))
        # Rounding down twice is rounding down once, so coarser cells need no more of the keys.
        primary_cells, record_cells, width = primary_cells // 2, record_cells // 2, 2 * width
    links = LinkTable(indices=indices, distances=distances)
    return CellLinks(links=links, pairs=pairs, passes=passes)


def _members(cell_of: Int64[np.ndarray, " own"]) -> list[Int64[np.ndarray, " members"]]:
    """Return the members of each cell, ascending."""
    order = np.argsort(cell_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(cell_of))[:-1])
