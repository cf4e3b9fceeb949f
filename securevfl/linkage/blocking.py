"""Nearest texts among those that share q-grams: fewer pairs are compared, and some are lost.

Two texts are *candidates* of one another if the cosine of their sets of q-grams reaches a threshold
(exact, by a sparse product; nothing is hashed into bands that a pair may miss by chance). That
depends on the two texts alone, whoever's they are, so a record's choice of rows does not depend on
other records: caps (:mod:`securevfl.linkage.capped`) and samples keep their promises.

What blocking loses is measured when it is set up and stays with the keys
(:class:`BlockingQuality`): there is no way to block without it.

Memory beside the texts, their q-grams and the links: :data:`_CHUNK_CELLS` pairs (or one row of
them) of about 60 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.linkage.levenshtein import nearest_texts, pair_edits
from securevfl.linkage.links import LinkTable, empty_links, fill_slots
from securevfl.linkage.text import checked_texts
from securevfl.linkage.topk import batches, eligible_ids

_CHUNK_CELLS: Final = 2**21
# Different q-grams that meet in one column only make a few pairs more candidates.
_COLUMNS: Final = 2**20
# No blanks, as the vectoriser takes a run of them for one.
_START, _END = "\x02", "\x03"


@dataclass(frozen=True, kw_only=True, slots=True)
class QGramBlocking:
    """Which pairs of texts are compared."""

    q: int = 3
    """Letters of a q-gram, >= 1; longer ones are shared by fewer texts."""

    least_overlap: float = 0.2
    """Least cosine of two sets of q-grams, in (0, 1): less of it compares and finds more."""

    def __post_init__(self) -> None:
        checks.at_least(1, q=self.q)
        checks.open_unit(least_overlap=self.least_overlap)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockingQuality:
    """What blocking found and spared, on rows that were linked both ways."""

    rows_measured: int
    """Rows that were also compared with every record."""

    links_per_row: int
    """K."""

    recall_at_1: float
    """Share of those rows whose nearest link is as near as the nearest record."""

    recall_at_k: float
    """Share of their K nearest that were found; others as near as the K-th count as well."""

    candidates_per_row: float
    """Records that a row was compared with, on average."""

    reduction_ratio: float
    """Share of all pairs that were not compared."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


class BlockedTextKeys:
    """Texts by Levenshtein distance among candidates; a row may have fewer than K links.

    Make it with :func:`block_texts`.
    """

    def __init__(
        self,
        primary: "_Grams",
        records: "_Grams",
        blocking: QGramBlocking,
        quality: BlockingQuality,
        *,
        workers: int,
    ) -> None:
        self.quality = quality
        """What blocking loses; also of the swapped keys, as candidates are symmetric."""
        self._primary = primary
        self._records = records
        self._blocking = blocking
        self._workers = workers

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self._primary.texts)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self._records.texts)

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible candidates."""
        ids = eligible_ids(self.num_records, k, eligible)
        mine = self._primary if rows is None else self._primary.take(rows)
        theirs = self._records if eligible is None else self._records.take(ids)
        return _nearest_candidates(mine, theirs, ids, k, self._blocking, workers=self._workers)

    def swapped(self) -> "BlockedTextKeys":
        """Exchange the parties' roles."""
        return BlockedTextKeys(
            self._records, self._primary, self._blocking, self.quality, workers=self._workers
        )

    def figures(self) -> Mapping[str, Any]:
        """Return what blocking lost and spared."""
        return {"blocking": self.quality.as_json()}

    def __repr__(self) -> str:
        return f"BlockedTextKeys({self.num_rows} rows, {self.num_records} records, {self.quality})"


def block_texts(
    primary_texts: Sequence[str],
    record_texts: Sequence[str],
    k: int,
    *,
    blocking: QGramBlocking | None = None,
    rows_measured: int = 200,
    workers: int = 1,
) -> BlockedTextKeys:
    """Set up blocking, and measure what it loses.

    Args:
        primary_texts: One text a primary row.
        record_texts: One text a record.
        k: Links a row for which recall is measured.
        blocking: Which pairs are compared; None for the defaults.
        rows_measured: Rows, evenly spread over the table, that are compared with every record.
        workers: Threads; -1 takes every core.

    Returns:
        Keys to link by, which carry their :class:`BlockingQuality`.

    Raises:
        ConfigError: If rapidfuzz is not installed, or an argument is out of range.
        DataError: If a table is empty, a value is no text or too long, or ``k`` is too large.
    """
    checks.at_least(1, rows_measured=rows_measured)
    blocking = blocking or QGramBlocking()
    rows = checked_texts(primary_texts, whose="the primary")
    records = checked_texts(record_texts, whose="the secondary")
    ids = eligible_ids(len(records), k, None)
    mine, theirs = _Grams.of(rows, blocking.q), _Grams.of(records, blocking.q)
    chosen = np.unique(np.linspace(0, len(rows) - 1, rows_measured).astype(np.int64))
    exact = nearest_texts([rows[row] for row in chosen], records, k, workers=workers)
    some = mine.take(chosen)
    found = _nearest_candidates(some, theirs, ids, k, blocking, workers=workers)
    candidates = sum(
        len(row) for _, _, row, _ in _candidates(some, theirs, blocking.least_overlap)
    ) / len(chosen)
    quality = BlockingQuality(
        rows_measured=len(chosen),
        links_per_row=k,
        recall_at_1=float((found.distances[:, 0] == exact.distances[:, 0]).mean()),
        recall_at_k=float((found.distances <= exact.distances[:, -1:]).mean()),
        candidates_per_row=candidates,
        reduction_ratio=1 - candidates / len(records),
    )
    return BlockedTextKeys(mine, theirs, blocking, quality, workers=workers)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Grams:
    """Texts, and which q-grams each has: a sparse matrix of zeros and ones."""

    texts: Sequence[str]
    matrix: Any
    count: Float64[np.ndarray, " rows"]

    @cached_property
    def by_gram(self) -> Any:
        """The transposed matrix, kept because rows are often linked part by part."""
        return self.matrix.T.tocsr()

    @classmethod
    def of(cls, texts: Sequence[str], q: int) -> "_Grams":
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

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "_Grams":
        """Return the chosen texts."""
        return _Grams(
            texts=[self.texts[row] for row in rows],
            matrix=self.matrix[rows],
            count=self.count[rows],
        )


def _nearest_candidates(
    mine: _Grams,
    theirs: _Grams,
    ids: Int64[np.ndarray, " chosen"],
    k: int,
    blocking: QGramBlocking,
    *,
    workers: int,
) -> LinkTable:
    """Return the ``k`` nearest candidates of each row, by (distance, record number)."""
    indices, distances = empty_links(len(mine.texts), k)
    for start, end, row, column in _candidates(mine, theirs, blocking.least_overlap):
        edits = pair_edits(
            [mine.texts[start + one] for one in row],
            [theirs.texts[other] for other in column],
            workers=workers,
        )
        order = np.lexsort((column, edits, row))
        links = fill_slots(
            end - start, k, row[order], ids[column[order]], edits[order].astype(np.float64)
        )
        indices[start:end], distances[start:end] = links.indices, links.distances
    return LinkTable(indices=indices, distances=distances)


def _candidates(mine: _Grams, theirs: _Grams, least_overlap: float) -> Any:
    """Yield, for runs of rows: start, end, and the candidate pairs of a row and a record."""
    if not len(theirs.texts):
        return
    texts_with = np.diff(theirs.by_gram.indptr).astype(np.float64)
    # A row has at most as many pairs as its q-grams have texts.
    most_pairs = np.asarray(mine.matrix @ texts_with).astype(np.int64)
    for start, end in batches(most_pairs, _CHUNK_CELLS):
        common = (mine.matrix[start:end] @ theirs.by_gram).tocoo()
        # Counts are whole numbers, so this is the same whichever party's text comes first.
        wanted = least_overlap * np.sqrt(mine.count[start + common.row] * theirs.count[common.col])
        near = common.data >= wanted
        yield start, end, common.row[near].astype(np.int64), common.col[near].astype(np.int64)
