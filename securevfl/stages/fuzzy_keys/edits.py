"""Nearest texts: the fewest edits (Levenshtein), with optional blocking by rules.

Edit distances come from rapidfuzz, in blocks of rows. Memory: a block has at most
:data:`_CHUNK_CELLS` distances (or one row of them) of one or two bytes, a byte each for selection,
and 64 MiB for sorting what was selected: 112 MiB in all, besides the texts and the links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, UInt

from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, nearest_by_block
from securevfl.linkage.metrics.metric import KeyKind, KeySpec, Metric
from securevfl.linkage.text import checked_texts, joined_texts
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules
from securevfl.stages.fuzzy_keys.candidate_pairs import PairwiseKeys

# Nearest texts that differ in more than this share of their letters are other people's.
_FAR: Final = 0.25
_CHUNK_CELLS: Final = 2**24
_LONGEST_FOR_ONE_BYTE: Final = 255


def edit_distances(rows: Sequence[str], records: Sequence[str]) -> UInt[np.ndarray, "rows records"]:
    """Return the Levenshtein distance of every pair, in the fewest bytes that hold it."""
    # Imported here: only keys of text need it.
    from rapidfuzz import distance, process

    longest = max(max(map(len, rows), default=0), max(map(len, records), default=0))
    dtype = np.uint8 if longest <= _LONGEST_FOR_ONE_BYTE else np.uint16
    edits: np.ndarray = process.cdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=dtype
    )
    return edits


def pair_edits(rows: Sequence[str], records: Sequence[str]) -> UInt[np.ndarray, " pairs"]:
    """Return the Levenshtein distance of each row to the record at its place."""
    from rapidfuzz import distance, process

    edits: np.ndarray = process.cpdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=np.uint16
    )
    return edits


@dataclass(frozen=True, kw_only=True, eq=False)
class TextKeys(PairwiseKeys):
    """One text a row, in normal form (:func:`~securevfl.linkage.text.normalise_text`)."""

    primary: list[str]
    """The primary's texts; empty ones are allowed."""

    records: list[str]
    """The secondary's texts."""

    @classmethod
    def of(cls, primary: Sequence[str], records: Sequence[str]) -> "TextKeys":
        """Bring both parties' texts into normal form.

        Raises:
            DataError: If a table is empty, or a value is no text or too long.
        """
        return cls(
            primary=checked_texts(primary, whose="the primary"),
            records=checked_texts(records, whose="the secondary"),
        )

    def nearest_of(self, keys: list[str], ids: Chosen, k: int) -> LinkTable:
        """Link each text to the ``k`` records whose texts need the fewest edits."""
        # Rows with one text have one answer, so each text is compared once.
        different = sorted(set(keys))
        position = {text: number for number, text in enumerate(different)}
        chosen = [self.records[record] for record in ids]

        def block(start: int, end: int) -> UInt[np.ndarray, "chunk records"]:
            return edit_distances(different[start:end], chosen)

        links = nearest_by_block(block, rows=len(different), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)
        return links.take(np.array([position[text] for text in keys], dtype=np.int64))

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the edits from each row to the record at its place."""
        edits = pair_edits(
            [self.primary[row] for row in rows.tolist()],
            [self.records[record] for record in records.tolist()],
        )
        return edits.astype(np.float64)


class Levenshtein(Metric):
    """Insertions, deletions and substitutions of letters."""

    name: ClassVar[str] = "levenshtein"
    unit: ClassVar[str] = "edits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"blocking", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:
        """Return that keys are texts."""
        return "text"

    def check(self, spec: KeySpec) -> None:
        """Read the rules that block."""
        if spec.blocking is not None:
            BlockingRules.parse(spec.blocking, spec.kinds)

    def far_distance(self, keys: KeyTable) -> float:
        """Return a quarter of the letters of a usual key."""
        lengths = [
            sum(len(str(value)) for value in row if value is not None)
            for row in zip(*keys.columns.values(), strict=True)
        ]
        return _FAR * float(np.median(lengths))

    def compare(
        self, spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> TextKeys:
        """Join each row's columns; with ``blocking``, say what leaving pairs out loses."""
        keys = TextKeys.of(joined_texts(primary.columns), joined_texts(records.columns))
        return keys.blocked(spec, primary, records, neighbours)
