"""Nearest texts: the fewest edits (Levenshtein), with optional blocking.

Edit distances come from rapidfuzz, in blocks of rows. Memory: a block has at most
:data:`_CHUNK_CELLS` distances (or one row of them) of one or two bytes, a byte each for selection,
and 64 MiB for sorting what was selected: 112 MiB in all, besides the texts and the links.

With blocking by q-grams, two texts are candidates of one another if the cosine of their sets of
q-grams reaches a threshold (exact, by a sparse product; nothing is hashed into bands that a pair
may miss by chance). The number of candidates of a row grows with the table, and with it the square
of the time: texts of one language share q-grams. :mod:`securevfl.stages.fuzzy_keys.blocking_rules`
is for large tables. Memory, besides the texts and their q-grams: :data:`_GRAM_CELLS` pairs (or one
row of them) of about 60 bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, UInt

from securevfl.core import checks
from securevfl.linkage.links import Chosen, LinkTable, Sample, batches, nearest_by_block
from securevfl.linkage.metrics.metric import KeyKind, Keys, KeySpec, Metric
from securevfl.linkage.text import checked_texts, joined_texts
from securevfl.stages.fuzzy_keys import blocking_rules, candidate_pairs

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


_GRAM_CELLS: Final = 2**21
# Different q-grams that meet in one column only make a few pairs more candidates.
_COLUMNS: Final = 2**20
# No blanks, as the vectoriser takes a run of them for one.
_START, _END = "\x02", "\x03"
_Q: Final = 3


def gram_matrix(texts: Sequence[str], q: int = _Q) -> Any:
    """Return which q-grams of ``q`` letters each normalised text has: a sparse matrix of 0 and 1.

    Longer q-grams are shared by fewer texts.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    checks.at_least(1, q=q)
    vectors = HashingVectorizer(
        analyzer="char",
        ngram_range=(q, q),
        n_features=_COLUMNS,
        lowercase=False,
        binary=True,
        norm=None,
        alternate_sign=False,
        dtype=np.float32,
    )
    # Signs at both ends give the first and the last letters q-grams of their own.
    width = max(q - 1, 1)
    return vectors.transform(f"{_START * width}{text}{_END * width}" for text in texts)


@dataclass(frozen=True, kw_only=True, eq=False)
class QGramCandidates(candidate_pairs.CandidatePairs):
    """Pairs of texts whose sets of q-grams have at least some cosine.

    ``primary`` and ``records`` are :func:`gram_matrix` of their texts.
    """

    least_overlap: float
    """Least cosine, in (0, 1): less of it compares and finds more."""

    def __post_init__(self) -> None:
        checks.open_unit(least_overlap=self.least_overlap)

    def pairs(
        self, rows: Chosen | None, eligible: Sample | None
    ) -> Iterator[candidate_pairs.Pairs]:
        """Yield candidates; see :meth:`CandidatePairs.pairs`."""
        mine, theirs = self.primary if rows is None else self.primary[rows], self._by_gram
        ids = np.arange(self.records.shape[0], dtype=np.int64)
        if eligible is not None:
            ids = ids[eligible]
            theirs = self.records[ids].T.tocsr()
        if not len(ids):
            return
        texts_with = np.diff(theirs.indptr).astype(np.float64)
        # A row has at most as many pairs as its q-grams have texts.
        most_pairs = np.asarray(mine @ texts_with).astype(np.int64)
        of_row, of_record = (
            np.asarray(matrix.sum(axis=axis), dtype=np.float64).ravel()
            for matrix, axis in ((mine, 1), (theirs, 0))
        )
        for start, end in batches(most_pairs, _GRAM_CELLS):
            common = (mine[start:end] @ theirs).tocoo()
            # Counts are whole numbers, so this is the same whichever party's text comes first.
            sizes = of_row[start + common.row] * of_record[common.col]
            near = common.data >= self.least_overlap * np.sqrt(sizes)
            row, column = (place[near].astype(np.int64) for place in (common.row, common.col))
            yield candidate_pairs.Pairs(start=start, end=end, row=row, record=ids[column])

    @cached_property
    def _by_gram(self) -> Any:
        """All records' q-grams, transposed; kept because rows are often linked part by part."""
        return self.records.T.tocsr()


@dataclass(frozen=True, kw_only=True, eq=False)
class TextKeys(candidate_pairs.PairwiseKeys):
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
    reads: ClassVar[frozenset[str]] = frozenset({"blocking", "rules", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:
        """Return that keys are texts."""
        return "text"

    def check(self, spec: KeySpec) -> None:
        """Read the rules that block."""
        if isinstance(spec.blocking, tuple):
            blocking_rules.BlockingRules.parse(spec.blocking, spec.kinds)

    def far_distance(self, keys: Keys) -> float:
        """Return a quarter of the letters of a usual key."""
        lengths = [
            sum(len(str(value)) for value in row if value is not None)
            for row in zip(*keys.columns.values(), strict=True)
        ]
        return _FAR * float(np.median(lengths))

    def compare(self, spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int) -> TextKeys:
        """Join each row's columns; with ``blocking``, say what leaving pairs out loses."""
        keys = TextKeys.of(joined_texts(primary.columns), joined_texts(records.columns))
        if spec.blocking is None:
            return keys
        candidates: candidate_pairs.CandidatePairs
        if isinstance(spec.blocking, tuple):
            rules = blocking_rules.BlockingRules.parse(spec.blocking, spec.kinds)
            candidates = blocking_rules.RuleCandidates.of(rules, primary.columns, records.columns)
        else:
            candidates = QGramCandidates(
                primary=gram_matrix(keys.primary),
                records=gram_matrix(keys.records),
                least_overlap=spec.blocking,
            )
        return keys.with_candidates(candidates, neighbours)
