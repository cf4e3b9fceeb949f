"""How a coordinator searches quantised keys: which rows and records are compared at once.

Without grid cells it is every row with every record; with them, rows and records of cells that are
near enough (:mod:`securevfl.linkage.grid_cells`), and the links are the same. As many blocks as
fit are compared in one exchange; its size bounds what the parties hold in memory.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.linkage.capped import pairs_of_picks
from securevfl.linkage.grid_cells import CellBlock, cells_of, links_by_cell
from securevfl.linkage.links import LinkTable
from securevfl.linkage.shared_distances import links_from_shares
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates, ranked_length
from securevfl.linking.protections.block_shapes import Shapes

# An exchange of shares has 16 MiB, one of Paillier's answers 8 MiB; each party holds a few of them.
_BLOCK_PAIRS: Final = 2**21
_BLOCK_ANSWERS: Final = 2**14
# Small blocks cost their parties some 0.1 ms each, whatever they compare.
_EXCHANGE_BLOCKS: Final = 2**12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Rows and records of which each is compared with each."""

    rows: Int64[np.ndarray, " block_rows"]
    """Row numbers of the primary."""

    records: Int64[np.ndarray, " block_records"]
    """Record numbers of the secondary."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Exchange:
    """Blocks that are compared in one go."""

    blocks: Sequence[Block]

    done: int
    """How many of those who seek (rows, or records under a cap) were in blocks before these."""

    of: int
    """How many will be in any block, as far as is known."""

    due: int
    """Ciphertexts of these blocks and those after them, as far as is known; 0 without any."""

    @property
    def shapes(self) -> Shapes:
        """How large the blocks are."""
        sizes = [(len(block.rows), len(block.records)) for block in self.blocks]
        rows, records = np.array(sizes, dtype=np.int64).T
        return Shapes(rows=rows, records=records)


SquaredShares = tuple[UInt64[np.ndarray, "_ _"], UInt64[np.ndarray, "_ _"]]
"""The primary's and the secondary's share of a block's squared distances, (rows, records)."""

Ask = Callable[[Iterator[Exchange]], Iterable[Sequence[SquaredShares]]]
"""Yields for each exchange, in their order, the shares of each of its blocks. It may take an
exchange before the one ahead of it is done."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """What the blocks gave together, and what they cost."""

    candidates: Candidates
    """Those of all pairs, whatever was compared."""

    pairs: int
    """Pairs that were compared."""

    ciphertexts: int
    """Ciphertexts that the secondary answered; 0 without any."""


class Search:
    """The search for one secondary's links, over blocks that the data parties compare.

    Args:
        spec: What linking needs.
        rows: How many rows the primary has.
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
        self._seen = self._pairs = self._answered = 0

    def run(
        self, cells: tuple[Int64[np.ndarray, "rows dim"], Int64[np.ndarray, "records dim"]] | None
    ) -> Found:
        """Find all candidates.

        Args:
            cells: The primary's cells and the secondary's; None compares all pairs.

        Raises:
            DataError: If shares do not belong together.
        """
        spec, cap = self._spec, self._spec.choice.links_per_record
        width = spec.cell_units
        if cells is None:
            # One cell holds everything.
            cells, width = (_one_cell(self._rows), _one_cell(self._records)), 1
        k = ranked_length(spec, self._records)
        if cap is not None:
            cells, k = (cells[1], cells[0]), min(cap, self._rows)
        found = links_by_cell(*cells, k, width=width, link=self._link)
        links = LinkTable(
            indices=found.indices,
            distances=found.distances * spec.keys.key_range().step,
        )
        if cap is None:
            candidates = Candidates(ranked=links.within(spec.choice.max_distance))
        else:
            pairs = pairs_of_picks(links, num_rows=self._rows)
            candidates = Candidates(pairs=pairs.within(spec.choice.max_distance))
        return Found(candidates=candidates, pairs=self._pairs, ciphertexts=self._answered)

    def _link(self, blocks: Sequence[CellBlock], k: int) -> Iterator[LinkTable]:
        """Compare the blocks of one pass; those who seek are their rows."""
        parts = [list(self._parts(block)) for block in blocks]
        shares = itertools.chain.from_iterable(
            self._ask(self._exchanges([part for some in parts for part in some]))
        )
        key_dim = len(self._spec.keys.columns)
        for some in parts:
            tables = []
            for part, (one, other) in zip(some, itertools.islice(shares, len(some)), strict=True):
                ours, theirs = (one.T, other.T) if self._capped else (one, other)
                most = min(k, len(part.records))
                tables.append(links_from_shares(ours, theirs, most, key_dim=key_dim, step=1.0))
            yield LinkTable(
                indices=np.concatenate([table.indices for table in tables]),
                distances=np.concatenate([table.distances for table in tables]),
            )

    def _exchanges(self, parts: Sequence[CellBlock]) -> Iterator[Exchange]:
        """Put as many parts into one exchange as its limits allow."""
        of = self._seen + sum(len(part.rows) for part in parts)
        sides = [self._sides(part) for part in parts]
        ciphertexts = [self.ciphertexts(len(rows), len(records)) for rows, records in sides]
        pairs = [len(rows) * len(records) for rows, records in sides]
        due, start = sum(ciphertexts), 0
        while start < len(parts):
            end = start + 1
            most = min(len(parts), start + _EXCHANGE_BLOCKS)
            own_pairs, own_ciphertexts = pairs[start], ciphertexts[start]
            while (
                end < most
                and own_pairs + pairs[end] <= _BLOCK_PAIRS
                and own_ciphertexts + ciphertexts[end] <= _BLOCK_ANSWERS
            ):
                own_pairs += pairs[end]
                own_ciphertexts += ciphertexts[end]
                end += 1
            blocks = [Block(rows=rows, records=records) for rows, records in sides[start:end]]
            exchange = Exchange(blocks=blocks, done=self._seen, of=of, due=due)
            self._seen += sum(len(part.rows) for part in parts[start:end])
            self._pairs += own_pairs
            self._answered += own_ciphertexts
            due -= own_ciphertexts
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

    def ciphertexts(self, rows: int, records: int) -> int:
        """Return how many ciphertexts a secondary answers for so many rows and records."""
        return -(-rows // self._lanes) * records if self._lanes else 0


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
        spec: What linking needs.
        mine: The primary's quantised keys.
        theirs: The secondary's.
        lanes: How many rows of a block share one ciphertext; 0 without any.
    """

    def compared(block: Block) -> SquaredShares:
        own, other = mine[block.rows, None], theirs[None, block.records]
        squared = ((own - other) ** 2).sum(axis=2).astype(np.uint64)
        return squared, np.zeros_like(squared)

    def ask(exchanges: Iterator[Exchange]) -> Iterator[Sequence[SquaredShares]]:
        for exchange in exchanges:
            yield [compared(block) for block in exchange.blocks]

    search = Search(spec, rows=len(mine), records=len(theirs), lanes=lanes, ask=ask)
    width, pairs = spec.cell_units, len(mine) * len(theirs)
    if not width:
        everything = search.ciphertexts(len(mine), len(theirs))
        return {"pairs": pairs, "share_of_pairs": 1.0, "ciphertexts": everything}
    found = search.run((cells_of(mine, width), cells_of(theirs, width)))
    return {
        "pairs": found.pairs,
        "share_of_pairs": found.pairs / pairs,
        "ciphertexts": found.ciphertexts,
    }


def _one_cell(count: int) -> Int64[np.ndarray, "own 1"]:
    return np.zeros((count, 1), dtype=np.int64)


def most_pairs(rows: int, records: int, *, lanes: int) -> int:
    """Return how many pairs an exchange may have; more is refused by whoever is asked.

    Args:
        rows: How many rows the primary has.
        records: How many records the secondary has.
        lanes: How many rows of a block share one ciphertext; 0 without any.
    """
    # One who seeks, or one ciphertext of them, is compared with all others at once.
    return max(_BLOCK_PAIRS, lanes * _BLOCK_ANSWERS, max(1, lanes) * max(rows, records))
