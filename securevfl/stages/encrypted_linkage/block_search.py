"""Blocks of a coordinated search: which rows and records are compared in one exchange.

Quantised keys fall into square cells of a width. The rows of a cell are first compared with the
records of the nearest cells that hold K of them; then, knowing how far their K-th link is at most,
with those of every other cell that has a point as near. The links are those of all pairs, for any
width.

Works with any way to link a block of rows to a block of records (Paillier, secret shares). Blocks
of many rows fill the lanes of Paillier's plaintexts better.

Under a record-side cap the records seek rows, so the two change places: a "row" is the side that
seeks.

An exchange has as many blocks as fit: over a slow line each exchange waits for round trips, however
little it compares, and grid cells make many small blocks.

Without grid cells every row is compared with every record. The size of an exchange bounds what the
parties hold in memory.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import scipy  # its trees load when they are first named
from jaxtyping import Int64, UInt64

from securevfl.core import checks
from securevfl.core.errors import DataError, ProtocolError
from securevfl.linkage.links import Chosen, LinkTable, eligible_ids, nearest_in_block
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.linkage.sampling import pairs_of_picks
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, ranked_length


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shapes:
    """Rows and records of each block."""

    rows: Int64[np.ndarray, " blocks"]
    """Primary rows of each block."""

    records: Int64[np.ndarray, " blocks"]
    """The secondary's records of each block."""

    @classmethod
    def of(
        cls,
        sizes: Int64[np.ndarray, "blocks 2"],
        *,
        most_pairs: int,
        sender: str,
        none_ends: bool = False,
    ) -> "Shapes":
        """Return received sizes, checked.

        Args:
            sizes: Rows and records of each block.
            most_pairs: How many pairs an exchange may have.
            sender: The party that named them.
            none_ends: Whether there may be no block, which ends a secondary's turn.

        Raises:
            ProtocolError: If there is no block, one is empty, or all have more pairs than that.
        """
        # Each size is checked before any is multiplied: products of 64 bits would wrap.
        fits = 1 <= sizes.min() <= sizes.max() <= most_pairs if sizes.size else none_ends
        if not fits or sum(rows * records for rows, records in sizes.tolist()) > most_pairs:
            raise ProtocolError(
                f"{sender}: named no blocks, empty ones, or more than {most_pairs} pairs"
            )
        return cls(rows=sizes[:, 0], records=sizes[:, 1])

    @property
    def sizes(self) -> Int64[np.ndarray, "blocks 2"]:
        """Rows and records of each block, as they are sent."""
        return np.column_stack([self.rows, self.records])

    @property
    def pairs(self) -> int:
        """Pairs of all blocks."""
        return int(self.rows @ self.records)

    def __len__(self) -> int:
        return len(self.rows)

    def by_pairs(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut what has one entry for each pair of each block, into (rows, records)."""
        parts = cut(values, self.rows * self.records)
        sizes = self.sizes.tolist()
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]


def flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all blocks in one row."""
    return parts[0].ravel() if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])


def cut(values: np.ndarray, counts: Int64[np.ndarray, " blocks"]) -> list[np.ndarray]:
    """Cut what has one entry for each row, record or pair of each block.

    Raises:
        ProtocolError: If it has more or fewer.
    """
    if len(values) != counts.sum():
        raise ProtocolError(
            f"blocks: have {counts.sum()} rows or records in all, but {len(values)} came"
        )
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


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
        ConfigError: If ``k`` is below 1.
        DataError: If ``k`` exceeds the records.

    Reveals:
        To the party that runs this: the cells, and every distance that ``link`` returns.
    """
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


# An exchange of shares has 16 MiB, one of Paillier's answers 8 MiB; each party holds a few of them.
_BLOCK_PAIRS: Final = 2**21
_BLOCK_ANSWERS: Final = 2**14

# Each block costs its parties some 0.1 ms, however small.
_EXCHANGE_BLOCKS: Final = 2**12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockExchange:
    """Blocks that are compared in one go: the primary's rows and the secondary's records."""

    blocks: Sequence[CellBlock]

    done: int
    """Number of those who seek (rows, or records under a cap) in blocks before these."""

    of: int
    """Number of them in any block, as far as is known."""

    due: int
    """Ciphertexts of these blocks and those after them, as far as is known; 0 without any."""

    @property
    def shapes(self) -> Shapes:
        """How large the blocks are."""
        sizes = [(len(block.rows), len(block.records)) for block in self.blocks]
        rows, records = np.array(sizes, dtype=np.int64).T
        return Shapes(rows=rows, records=records)

    @property
    def rows(self) -> Int64[np.ndarray, " all_rows"]:
        """The primary's rows of all blocks, one block after another."""
        return flat([block.rows for block in self.blocks])

    @property
    def records(self) -> Int64[np.ndarray, " all_records"]:
        """The secondary's records of all blocks, likewise."""
        return flat([block.records for block in self.blocks])


SquaredShares = tuple[UInt64[np.ndarray, "_ _"], UInt64[np.ndarray, "_ _"]]
"""The primary's and the secondary's share of a block's squared distances, (rows, records)."""

Ask = Callable[[Iterator[BlockExchange]], Iterable[Sequence[SquaredShares]]]
"""Yields for each exchange, in their order, the shares of each of its blocks. It may take an
exchange before the one ahead of it is done."""


class Search:
    """The search for one secondary's links, over blocks that the data parties compare.

    Args:
        spec: Settings of the linkage.
        rows: Number of the primary's rows.
        records: How many records the secondary has.
        lanes: How many rows of a block share one ciphertext; 0 without any.
        ask: Has the data parties compare blocks.
    """

    def __init__(self, spec: LinkSpec, *, rows: int, records: int, lanes: int, ask: Ask) -> None:
        self._spec = spec
        self._rows = rows
        self._records = records
        self._ask = ask
        self._capped = spec.choice.links_per_record is not None
        self._lanes = lanes
        self._seen = 0
        self.pairs = 0
        """Pairs that were compared."""
        self.answered = 0
        """Ciphertexts that the secondary answered; 0 without any."""

    def run(
        self, cells: tuple[Int64[np.ndarray, "rows dim"], Int64[np.ndarray, "records dim"]] | None
    ) -> Candidates:
        """Return the candidates of all pairs.

        Args:
            cells: The primary's cells and the secondary's; None compares all pairs.

        Raises:
            DataError: If shares do not belong together.
        """
        spec, cap = self._spec, self._spec.choice.links_per_record
        width = cell_units(spec)
        if cells is None:
            # One cell holds everything.
            cells, width = (_one_cell(self._rows), _one_cell(self._records)), 1
        k = ranked_length(spec, self._records)
        if cap is not None:
            cells, k = (cells[1], cells[0]), min(cap, self._rows)
        link_table = links_by_cell(*cells, k, width=width, link=self._link)
        links = LinkTable(
            indices=link_table.indices,
            distances=link_table.distances * spec.keys.key_range().step,
        )
        limit = spec.choice.max_distance
        if cap is None:
            return links.within(limit)
        return pairs_of_picks(links, num_rows=self._rows).within(limit)

    def _link(self, blocks: Sequence[CellBlock], k: int) -> Iterator[LinkTable]:
        """Compare the blocks of one pass; those who seek are their rows."""
        parts = [list(self._parts(block)) for block in blocks]
        shares = itertools.chain.from_iterable(
            self._ask(self._exchanges([part for some in parts for part in some]))
        )
        key_dim = len(self._spec.keys.columns)
        for some in parts:
            tables = []
            for part, (first, other) in zip(some, itertools.islice(shares, len(some)), strict=True):
                ours, theirs = (first.T, other.T) if self._capped else (first, other)
                most = min(k, len(part.records))
                tables.append(links_from_shares(ours, theirs, most, key_dim=key_dim))
            yield LinkTable(
                indices=np.concatenate([table.indices for table in tables]),
                distances=np.concatenate([table.distances for table in tables]),
            )

    def _exchanges(self, parts: Sequence[CellBlock]) -> Iterator[BlockExchange]:
        """Put as many parts into one exchange as its limits allow."""
        of = self._seen + sum(len(part.rows) for part in parts)
        sides = [self._sides(part) for part in parts]
        answers = [
            ciphertexts(len(rows), len(records), lanes=self._lanes) for rows, records in sides
        ]
        pairs = [len(rows) * len(records) for rows, records in sides]
        due, start = sum(answers), 0
        while start < len(parts):
            end = start + 1
            most = min(len(parts), start + _EXCHANGE_BLOCKS)
            own_pairs, own_answers = pairs[start], answers[start]
            while (
                end < most
                and own_pairs + pairs[end] <= _BLOCK_PAIRS
                and own_answers + answers[end] <= _BLOCK_ANSWERS
            ):
                own_pairs += pairs[end]
                own_answers += answers[end]
                end += 1
            blocks = [CellBlock(rows=rows, records=records) for rows, records in sides[start:end]]
            exchange = BlockExchange(blocks=blocks, done=self._seen, of=of, due=due)
            self._seen += sum(len(part.rows) for part in parts[start:end])
            self.pairs += own_pairs
            self.answered += own_answers
            due -= own_answers
            start = end
            yield exchange

    def _parts(self, block: CellBlock) -> Iterator[CellBlock]:
        """Cut a block whose shares or ciphertexts are too many for one exchange."""
        step = max(1, _BLOCK_PAIRS // len(block.records))
        if self._lanes and self._capped:
            step = max(1, _BLOCK_ANSWERS // -(-len(block.records) // self._lanes))
        elif self._lanes:
            step = self._lanes * max(1, _BLOCK_ANSWERS // len(block.records))
        for start in range(0, len(block.rows), step):
            yield CellBlock(rows=block.rows[start : start + step], records=block.records)

    def _sides(self, block: CellBlock) -> tuple[np.ndarray, np.ndarray]:
        """Return the primary's rows and the secondary's records of a block."""
        return (block.records, block.rows) if self._capped else (block.rows, block.records)


Compared = Callable[[BlockExchange, UInt64[np.ndarray, " pairs"]], None]
"""Gets an exchange, and the squared distances of its pairs, block after block."""


def search_in_clear(
    spec: LinkSpec,
    mine: Int64[np.ndarray, "rows key_dim"],
    theirs: Int64[np.ndarray, "records key_dim"],
    *,
    lanes: int,
    compared: Compared = lambda _exchange, _squared: None,
) -> Search:
    """Search where both tables may be seen, and return the search.

    Args:
        spec: Settings of the linkage.
        mine: The primary's quantised keys; with grid cells, shifted as their grid is.
        theirs: The secondary's, likewise.
        lanes: How many rows of a block share one ciphertext; 0 without any.
        compared: Called with what a coordinator would see.
    """

    def shares(block: CellBlock) -> SquaredShares:
        own, other = mine[block.rows, None], theirs[None, block.records]
        squared = ((own - other) ** 2).sum(axis=2).astype(np.uint64)
        return squared, np.zeros_like(squared)

    def ask(exchanges: Iterator[BlockExchange]) -> Iterator[Sequence[SquaredShares]]:
        for exchange in exchanges:
            block_shares = [shares(block) for block in exchange.blocks]
            compared(exchange, flat([squared for squared, _ in block_shares]))
            yield block_shares

    search = Search(spec, rows=len(mine), records=len(theirs), lanes=lanes, ask=ask)
    width = cell_units(spec)
    search.run((cells_of(mine, width), cells_of(theirs, width)) if width else None)
    return search


def comparing_cost(
    spec: LinkSpec,
    mine: Int64[np.ndarray, "rows key_dim"],
    theirs: Int64[np.ndarray, "records key_dim"],
    *,
    lanes: int,
) -> dict[str, Any]:
    """Return how many pairs a protected linkage compares; with cells, found by doing so in clear.

    The parties' grid has a random place, so theirs may be a little more or less.

    Args:
        spec: Settings of the linkage.
        mine: The primary's quantised keys.
        theirs: The secondary's.
        lanes: How many rows of a block share one ciphertext; 0 without any.
    """
    pairs = len(mine) * len(theirs)
    if not cell_units(spec):
        everything = ciphertexts(len(mine), len(theirs), lanes=lanes)
        return {"pairs": pairs, "share_of_pairs": 1.0, "ciphertexts": everything}
    search = search_in_clear(spec, mine, theirs, lanes=lanes)
    return {
        "pairs": search.pairs,
        "share_of_pairs": search.pairs / pairs,
        "ciphertexts": search.answered,
    }


def ciphertexts(rows: int, records: int, *, lanes: int) -> int:
    """Return how many ciphertexts a secondary answers for so many rows and records."""
    return -(-rows // lanes) * records if lanes else 0


def _one_cell(count: int) -> Int64[np.ndarray, "own 1"]:
    return np.zeros((count, 1), dtype=np.int64)


def most_pairs(rows: int, records: int, *, lanes: int) -> int:
    """Return how many pairs an exchange may have; parties refuse more.

    Args:
        rows: Number of the primary's rows.
        records: How many records the secondary has.
        lanes: How many rows of a block share one ciphertext; 0 without any.
    """
    # One who seeks, or one ciphertext of them, is compared with all others at once.
    return max(_BLOCK_PAIRS, lanes * _BLOCK_ANSWERS, max(1, lanes) * max(rows, records))
