"""How a coordinator searches quantised keys: which rows and records are compared at once.

Without grid cells it is every row with every record; with them, rows and records of cells that are
near enough (:mod:`securevfl.linkage.grid_cells`), and the links are the same. Each block is
compared at once; its size bounds what the parties hold in memory.
"""

from collections.abc import Callable, Iterator, Sequence
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

# A block of shares has 16 MiB, one of Paillier's answers 8 MiB; each party holds a few of them.
_BLOCK_PAIRS: Final = 2**21
_BLOCK_ANSWERS: Final = 2**14


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Rows and records that are compared at once, each with each."""

    rows: Int64[np.ndarray, " block_rows"]
    """Row numbers of the primary."""

    records: Int64[np.ndarray, " block_records"]
    """Record numbers of the secondary."""

    done: int
    """How many of those who seek (rows, or records under a cap) were in blocks before it."""

    of: int
    """How many will be in any block, as far as is known."""

    due: int
    """Ciphertexts of this block and those after it, as far as is known; 0 without any."""


Ask = Callable[[Block], tuple[UInt64[np.ndarray, "rows records"], UInt64[np.ndarray, "..."]]]
"""Returns the primary's and the secondary's share of a block's squared distances."""


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
        ask: Has the data parties compare a block.
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
        of = self._seen + sum(len(block.rows) for block in blocks)
        parts = [list(self._parts(block)) for block in blocks]
        due = sum(self.ciphertexts(*map(len, self._sides(part))) for some in parts for part in some)
        for some in parts:
            tables = []
            for part in some:
                rows, records = self._sides(part)
                ciphertexts = self.ciphertexts(len(rows), len(records))
                one, other = self._ask(
                    Block(rows=rows, records=records, done=self._seen, of=of, due=due)
                )
                due -= ciphertexts
                self._answered += ciphertexts
                self._pairs += len(rows) * len(records)
                self._seen += len(part.rows)
                if self._capped:
                    one, other = one.T, other.T
                key_dim = len(self._spec.keys.columns)
                most = min(k, len(part.records))
                tables.append(links_from_shares(one, other, most, key_dim=key_dim, step=1.0))
            yield LinkTable(
                indices=np.concatenate([table.indices for table in tables]),
                distances=np.concatenate([table.distances for table in tables]),
            )

    def _parts(self, block: CellBlock) -> Iterator[CellBlock]:
        """Cut a block whose shares or ciphertexts are too many to be held at once."""
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

    def ask(block: Block) -> tuple[UInt64[np.ndarray, "..."], UInt64[np.ndarray, "..."]]:
        own, other = mine[block.rows, None], theirs[None, block.records]
        squared = ((own - other) ** 2).sum(axis=2).astype(np.uint64)
        return squared, np.zeros_like(squared)

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
