"""Exact links from few pairs, where each pair is expensive: only near grid cells are compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its trees load when they are first named
from jaxtyping import Int64, UInt64

from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.linkage.links import Chosen, LinkTable
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.linkage.nearest import eligible_ids, nearest_in_block
from securevfl.linkage.spec import LinkSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellBlock:
    """Rows and records that are compared with one another, all pairs."""

    rows: Int64[np.ndarray, " block_rows"]
    """Rows, ascending."""

    records: Int64[np.ndarray, " block_records"]
    """Records, ascending, at least one."""


PassLinker = Callable[[Sequence[CellBlock], int], Iterable[LinkTable]]
"""Links the rows of each block to the block's records: for each row the given number of links, or
one to every record if the block has fewer. Yields one table a block, in which a record is numbered
by its place in the block, and distances are in units of quantised keys."""


def cell_units(spec: LinkSpec) -> int:
    """Return the width of a grid cell in units of quantised keys; 0 without cells."""
    width: float | None = spec.hiding.settings.get("cell")
    return 0 if width is None else max(1, round(width / spec.keys.key_range().step))


def cells_of(units: Int64[np.ndarray, "own key_dim"], width: int) -> Int64[np.ndarray, "own _"]:
    """Return the cell of each quantised key.

    Raises:
        ConfigError: If the width is below 1.

    Reveals:
        To the receiver of the cells: each key up to ``width`` units, and which rows or records are
        near one another. Choose the width by what may be known.
    """
    checks.at_least(1, width=width)
    return units // width


def links_by_cell(
    row_cells: Int64[np.ndarray, "rows key_dim"],
    record_cells: Int64[np.ndarray, "records other_dim"],
    k: int,
    *,
    width: int,
    link: PassLinker,
) -> LinkTable:
    """Link every row exactly, block by block, in two passes.

    Args:
        row_cells: From :func:`cells_of`, of those who seek.
        record_cells: From :func:`cells_of`, of the same width.
        k: Links a row, at most the number of records.
        width: Units of a cell.
        link: Links the blocks of a pass; for Paillier and shares, the whole protocol.

    Returns:
        The links of all pairs, ascending by (distance, record number); distances in units.

    Raises:
        ConfigError: If ``k`` or ``width`` is below 1.
        DataError: If a table is empty, the dimensions differ, or ``k`` exceeds the records.

    Reveals:
        To the party that runs this: the cells, and every distance that ``link`` returns.
    """
    checks.at_least(1, width=width)
    if 0 in row_cells.shape or 0 in record_cells.shape:
        raise DataError("cells: a table is empty")
    if row_cells.shape[1] != record_cells.shape[1]:
        raise DataError(
            f"cells: the primary's have {row_cells.shape[1]} dimensions, the secondary's "
            f"{record_cells.shape[1]}"
        )
    eligible_ids(len(record_cells), k, None)
    seeking, members = _by_cell(row_cells)
    grid = _Grid(record_cells, width=width)
    links = LinkTable.empty(len(row_cells), k)
    first = grid.nearest(seeking, k)
    _compare(links, members, [grid.records_of(cells) for cells in first], link)
    bounds = [float(links.distances[rows, -1].max()) for rows in members]
    rest = [
        np.setdiff1d(grid.within(cell, bound), tried)
        for cell, bound, tried in zip(seeking, bounds, first, strict=True)
    ]
    _compare(links, members, [grid.records_of(cells) for cells in rest], link)
    return links


class _Grid:
    """The cells that hold records."""

    def __init__(self, record_cells: Int64[np.ndarray, "records key_dim"], *, width: int) -> None:
        self._width = width
        self._cells, self._members = _by_cell(record_cells)
        self._sizes = np.array([len(records) for records in self._members])
        self._tree = scipy.spatial.cKDTree(self._cells)

    def nearest(self, cells: Int64[np.ndarray, "own key_dim"], k: int) -> list[np.ndarray]:
        """Return, for each cell, so many of the nearest ones that they hold ``k`` records."""
        neighbours: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(cells)
        pending, count = np.arange(len(cells)), 1
        while len(pending):
            count = min(2 * count, len(self._cells))
            near = np.asarray(self._tree.query(cells[pending], k=np.arange(1, count + 1))[1])
            held = np.cumsum(self._sizes[near], axis=1)
            enough = held[:, -1] >= k
            for place in np.flatnonzero(enough):
                wanted = int(np.searchsorted(held[place], k)) + 1
                neighbours[pending[place]] = near[place, :wanted]
            pending = pending[~enough]
        return neighbours

    def within(self, cell: Int64[np.ndarray, " key_dim"], bound: float) -> Int64[np.ndarray, "_"]:
        """Return the cells that may hold a record at most ``bound`` from a point of a cell."""
        reach = bound / self._width + np.sqrt(len(cell)) + 1
        near = np.array(self._tree.query_ball_point(cell, reach), dtype=np.int64)
        # Points of cells that are d apart in one dimension are (d - 1) widths and a unit apart.
        apart = np.maximum(np.abs(self._cells[near] - cell) - 1, -1)
        gaps = np.where(apart >= 0, apart * self._width + 1, 0).astype(np.float64)
        inside: Int64[np.ndarray, " _"] = near[np.sqrt((gaps**2).sum(axis=1)) <= bound]
        return inside

    def records_of(self, cells: Chosen) -> Int64[np.ndarray, " records"]:
        """Return the records of some cells, ascending."""
        none = np.empty(0, dtype=np.int64)
        return np.sort(np.concatenate([none, *(self._members[cell] for cell in cells)]))


def _compare(
    links: LinkTable,
    members: Sequence[Int64[np.ndarray, " _"]],
    tried: Sequence[Int64[np.ndarray, " _"]],
    link: PassLinker,
) -> None:
    """Compare rows with the records tried now; keep the nearest of these and of earlier ones."""
    blocks = [
        CellBlock(rows=rows, records=records)
        for rows, records in zip(members, tried, strict=True)
        if len(records)
    ]
    for block, near in zip(blocks, link(blocks, links.num_links), strict=True):
        near = near.renumber(block.records)
        indices = np.concatenate([links.indices[block.rows], near.indices], axis=1)
        distances = np.concatenate([links.distances[block.rows], near.distances], axis=1)
        order = np.lexsort((indices, distances), axis=1)[:, : links.num_links]
        links.indices[block.rows] = np.take_along_axis(indices, order, axis=1)
        links.distances[block.rows] = np.take_along_axis(distances, order, axis=1)


def _by_cell(
    cells: Int64[np.ndarray, "own key_dim"],
) -> tuple[Int64[np.ndarray, "different key_dim"], list[Int64[np.ndarray, " _"]]]:
    """Return the different cells, and the members of each, ascending."""
    different, cell_of = np.unique(cells, axis=0, return_inverse=True)
    order = np.argsort(cell_of.ravel(), kind="stable")
    return different, np.split(order, np.cumsum(np.bincount(cell_of.ravel()))[:-1])


def links_from_shares(
    primary: UInt64[np.ndarray, "rows records"],
    secondary: UInt64[np.ndarray, "rows records"],
    k: int,
    *,
    key_dim: int,
) -> LinkTable:
    """Add two shares and link, as the coordinator does.

    Args:
        primary: From :func:`securevfl.stages.encrypted_linkage.shares.primary_share`.
        secondary: From :func:`securevfl.stages.encrypted_linkage.shares.secondary_share`.
        k: Links a row.
        key_dim: Dimensions of the keys, which bound the largest distance.

    Returns:
        The links that :class:`~securevfl.linkage.metrics.metric.ComparedKeys` finds on quantised
        keys.

    Raises:
        DataError: If a sum is no squared distance: the shares do not belong together.

    Reveals:
        The coordinator learns every pairwise distance, hence both parties' keys up to rotation,
        reflection and shift, and all of them if it knows a few. It learns no features.
    """
    squared = primary + secondary
    largest = key_dim * LARGEST_UNIT**2
    if squared.size and int(squared.max()) > largest:
        raise DataError("shares of distances: do not belong together; deal anew and link again")
    near = nearest_in_block(squared, k)
    distances = np.where(near.present, np.sqrt(near.distances), np.inf)
    return LinkTable(indices=near.indices, distances=distances)
