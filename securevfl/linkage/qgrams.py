"""Candidates among texts by the q-grams that they share: no columns or rules are needed.

Two texts are candidates of one another if the cosine of their sets of q-grams reaches a threshold
(exact, by a sparse product; nothing is hashed into bands that a pair may miss by chance).

How many candidates a row has grows with the table, and with it the square of the time: texts of one
language share q-grams whoever's they are. :mod:`securevfl.linkage.rules` is for large tables.

Memory beside the texts and their q-grams: :data:`_CHUNK_CELLS` pairs (or one row of them) of about
60 bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.linkage.blocking import Pairs
from securevfl.linkage.topk import batches

_CHUNK_CELLS: Final = 2**21
# Different q-grams that meet in one column only make a few pairs more candidates.
_COLUMNS: Final = 2**20
# No blanks, as the vectoriser takes a run of them for one.
_START, _END = "\x02", "\x03"
_Q: Final = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Grams:
    """Texts, and which q-grams each has: a sparse matrix of zeros and ones."""

    texts: Sequence[str]
    matrix: Any
    count: Float64[np.ndarray, " rows"]

    @cached_property
    def by_gram(self) -> Any:
        """The transposed matrix, kept because rows are often linked part by part."""
        return self.matrix.T.tocsr()

    @classmethod
    def of(cls, texts: Sequence[str], q: int) -> "Grams":
        """Take normalised texts apart into q-grams of ``q`` letters."""
        from sklearn.feature_extraction.text import HashingVectorizer

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
        matrix = vectors.transform(f"{_START * width}{text}{_END * width}" for text in texts)
        count = np.asarray(matrix.sum(axis=1), dtype=np.float64).ravel()
        return cls(texts=texts, matrix=matrix, count=count)

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "Grams":
        """Return the chosen texts."""
        return Grams(
            texts=[self.texts[row] for row in rows],
            matrix=self.matrix[rows],
            count=self.count[rows],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class QGramCandidates:
    """Pairs of texts whose sets of q-grams have at least some cosine."""

    primary: Grams
    """The primary's texts."""

    records: Grams
    """The secondary's."""

    least_overlap: float
    """Least cosine, in (0, 1): less of it compares and finds more."""

    def __post_init__(self) -> None:
        checks.open_unit(least_overlap=self.least_overlap)

    @classmethod
    def of(
        cls, primary: Sequence[str], records: Sequence[str], *, least_overlap: float, q: int = _Q
    ) -> "QGramCandidates":
        """Take normalised texts apart.

        Args:
            primary: One text a primary row.
            records: One text a record.
            least_overlap: Least cosine, in (0, 1).
            q: Letters of a q-gram, >= 1; longer ones are shared by fewer texts.

        Raises:
            ConfigError: If a value is out of range.
        """
        checks.at_least(1, q=q)
        return cls(
            primary=Grams.of(primary, q),
            records=Grams.of(records, q),
            least_overlap=least_overlap,
        )

    def pairs(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        eligible: Bool[np.ndarray, " records"] | None,
    ) -> Iterator[Pairs]:
        """Yield candidates; see :class:`~securevfl.linkage.blocking.CandidatePairs`."""
        mine = self.primary if rows is None else self.primary.take(rows)
        theirs, ids = self.records, None
        if eligible is not None:
            ids = np.flatnonzero(eligible)
            theirs = self.records.take(ids)
        if not len(theirs.texts):
            return
        texts_with = np.diff(theirs.by_gram.indptr).astype(np.float64)
        # A row has at most as many pairs as its q-grams have texts.
        most_pairs = np.asarray(mine.matrix @ texts_with).astype(np.int64)
        for start, end in batches(most_pairs, _CHUNK_CELLS):
            common = (mine.matrix[start:end] @ theirs.by_gram).tocoo()
            # Counts are whole numbers, so this is the same whichever party's text comes first.
            sizes = mine.count[start + common.row] * theirs.count[common.col]
            near = common.data >= self.least_overlap * np.sqrt(sizes)
            record = common.col[near].astype(np.int64)
            yield Pairs(
                start=start,
                end=end,
                row=common.row[near].astype(np.int64),
                record=record if ids is None else ids[record],
            )

    def swapped(self) -> "QGramCandidates":
        """Exchange the parties' roles."""
        return QGramCandidates(
            primary=self.records, records=self.primary, least_overlap=self.least_overlap
        )

    def figures(self) -> Mapping[str, Any]:
        """Return nothing more."""
        return {}
