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
from jaxtyping import Int64, UInt64

from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import pairs_of_picks
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.candidates import Candidates, ranked_length
from securevfl.stages.encrypted_linkage.block_messages import Shapes, flat
from securevfl.stages.encrypted_linkage.grid_cells import (
    CellBlock,
    cell_units,
    cells_of,
    links_by_cell,
    links_from_shares,
)

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
