"""Nearest text keys: equal texts, and the fewest edits (Levenshtein) with optional blocking.

Equal keys go through no floating point, so ids of 16 digits and more stay distinct. Links are found
by hashing and sorting, in time that grows with the tables and not with their product. Memory: both
tables' keys as texts once more while they are numbered, then 8 bytes a key.

Edit distances come from rapidfuzz, in blocks of rows. Memory: a block has at most
:data:`_CHUNK_CELLS` distances (or one row of them) of one or two bytes, a byte each for selection,
and 64 MiB for sorting what was selected: 112 MiB in all, besides the texts and the links.

With blocking by q-grams, two texts are candidates of one another if the cosine of their sets of
q-grams reaches a threshold (exact, by a sparse product; nothing is hashed into bands that a pair
may miss by chance). The number of candidates of a row grows with the table, and with it the square
of the time: texts of one language share q-grams. :mod:`securevfl.linkage.blocking_rules` is for
large tables. Memory, besides the texts and their q-grams: :data:`_GRAM_CELLS` pairs (or one row of
them) of about 60 bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.blocking_rules import (
    BlockingRules,
    CandidatePairs,
    Pairs,
    RuleCandidates,
    blocked_keys,
)
from securevfl.linkage.links import LinkTable, batches, eligible_ids, fill_slots, nearest_by_block
from securevfl.linkage.metrics.metric import (
    Columns,
    ComparedKeys,
    KeyKind,
    KeyMetric,
    Keys,
    KeySpec,
    Metric,
)
from securevfl.linkage.text import checked_texts, joined_texts, normalise_text, trimmed_text

_MISSING = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactKeys(ComparedKeys):
    """One number a row: equal numbers are equal keys, whichever party has them."""

    primary: Int64[np.ndarray, " rows"]
    """The primary's; -1 where the key is missing."""

    records: Int64[np.ndarray, " records"]
    """The secondary's; -1 where the key is missing."""

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link each row to the first ``k`` records of the same key, by number, at distance 0."""
        keys = self.primary if rows is None else self.primary[rows]
        ids = eligible_ids(self.num_records, k, eligible)
        order = self._order if eligible is None else np.argsort(self.records[ids], kind="stable")
        sorted_keys = self.records[ids[order]]
        first = np.searchsorted(sorted_keys, keys, side="left")
        equal = np.searchsorted(sorted_keys, keys, side="right") - first
        count = np.where(keys == _MISSING, 0, np.minimum(equal, k))
        row = np.repeat(np.arange(len(keys)), count)
        place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        record = ids[order[np.repeat(first, count) + place]]
        return fill_slots(len(keys), k, row, record, np.zeros(len(row)))

    @cached_property
    def _order(self) -> Int64[np.ndarray, " records"]:
        """All records by key, then number: rows are often linked part by part."""
        return np.argsort(self.records, kind="stable")


class Exact(Metric):
    """Equal or not: rows are linked to records of the very same key, and to no others."""

    name: ClassVar[str] = "exact"
    unit: ClassVar[str] = "none: linked keys are equal"
    whole: ClassVar[bool] = True
    largest: ClassVar[float] = 0.0
    quick: ClassVar[bool] = True
    coded: ClassVar[bool] = False
    equal_only: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"fold", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:  # noqa: ARG002
        """Return that keys are texts, numbers in their spelling."""
        return "text"

    def compare(
        self,
        spec: KeySpec,
        primary: Keys,
        records: Keys,
        *,
        neighbours: int,  # noqa: ARG002
    ) -> ExactKeys:
        """Number the different keys of both tables."""
        return numbered_keys(exact_texts(spec, primary), exact_texts(spec, records))


def exact_texts(spec: KeySpec, keys: Keys) -> list[str | None]:
    """Return all key columns of a row as one text, equal if and only if every column is.

    Blanks at both ends and format characters (Unicode Cf) do not count, and a letter with a
    combining accent equals its one-character form (Unicode NFC); with ``linkage.fold``, texts are
    compared as :func:`~securevfl.linkage.text.normalise_text` gives them.

    Args:
        spec: Which keys are compared.
        keys: A party's.

    Returns:
        One text a row; None where a column is missing or blank.

    Raises:
        DataError: If there are no rows, or a value is no text.
    """
    form = normalise_text if spec.fold else trimmed_text
    columns = [_formed(keys.columns, name, form, whose=keys.name) for name in keys.columns]
    if not columns or not columns[0]:
        raise DataError(f"keys of {keys.name}: has no rows")
    # With its length before it, a text's end is where it is: "a b", "c" is not "a", "b c".
    return [
        "".join(f"{len(text)}:{text}" for text in row) if all(row) else None
        for row in zip(*columns, strict=True)
    ]


def numbered_keys(primary: Sequence[Any], records: Sequence[Any]) -> ExactKeys:
    """Return two tables of keys as numbers: equal keys have equal ones, and missing ones none.

    Args:
        primary: One hashable key a row; None where it is missing.
        records: The same of the secondary.
    """
    import pandas as pd  # slow to load, and this metric's alone

    both = np.empty(len(primary) + len(records), dtype=object)
    both[: len(primary)], both[len(primary) :] = primary, records
    numbers = pd.factorize(both)[0].astype(np.int64)
    return ExactKeys(primary=numbers[: len(primary)], records=numbers[len(primary) :])


def _formed(columns: Columns, name: str, form: Any, *, whose: str) -> list[str]:
    """Return a column's texts in their form, empty where one is missing."""
    for row, text in enumerate(columns[name], 1):
        if not (text is None or isinstance(text, str)):
            raise DataError(
                f"keys of {whose}: column {name!r}, row {row}: must be text, got "
                f"{type(text).__name__}"
            )
    return ["" if text is None else form(text) for text in columns[name]]


# Exact K nearest texts by Levenshtein distance: insertions, deletions and substitutions.

_CHUNK_CELLS: Final = 2**24
_LONGEST_FOR_ONE_BYTE: Final = 255


def nearest_texts(
    primary_texts: Sequence[str],
    record_texts: Sequence[str],
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
) -> LinkTable:
    """Link every primary row to the ``k`` records whose texts need the fewest edits.

    Texts are compared as :func:`~securevfl.linkage.text.normalise_text` gives them.

    Args:
        primary_texts: One text a primary row; empty ones are allowed.
        record_texts: One text a record.
        k: Links a row, at most the number of records.
        eligible: Records that may be linked (a round's sample); None allows all.

    Returns:
        Exact links, ascending by (distance, record number).

    Raises:
        ConfigError: If rapidfuzz is not installed, or an argument is out of range.
        DataError: If a table is empty, a value is no text or too long, or ``k`` is too large.
    """
    return nearest_normal_texts(
        checked_texts(primary_texts, whose="the primary"),
        checked_texts(record_texts, whose="the secondary"),
        k,
        eligible=eligible,
    )


def nearest_normal_texts(
    rows: Sequence[str],
    records: Sequence[str],
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
) -> LinkTable:
    """Link texts that are in normal form already; see :func:`nearest_texts`."""
    ids = eligible_ids(len(records), k, eligible)
    # Rows with one text have one answer, so each text is compared once.
    different = sorted(set(rows))
    position = {text: number for number, text in enumerate(different)}
    chosen = [records[record] for record in ids]

    def block(start: int, end: int) -> UInt[np.ndarray, "chunk records"]:
        return edit_distances(different[start:end], chosen)

    links = nearest_by_block(block, rows=len(different), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)
    return links.take(np.array([position[text] for text in rows], dtype=np.int64))


def edit_distances(rows: Sequence[str], records: Sequence[str]) -> UInt[np.ndarray, "rows records"]:
    """Return the Levenshtein distance of every pair, in the fewest bytes that hold it.

    Raises:
        ConfigError: If rapidfuzz is not installed.
    """
    process, distance = _rapidfuzz()
    longest = max(max(map(len, rows), default=0), max(map(len, records), default=0))
    dtype = np.uint8 if longest <= _LONGEST_FOR_ONE_BYTE else np.uint16
    found: np.ndarray = process.cdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=dtype
    )
    return found


def pair_edits(rows: Sequence[str], records: Sequence[str]) -> UInt[np.ndarray, " pairs"]:
    """Return the Levenshtein distance of each row to the record at its place.

    Raises:
        ConfigError: If rapidfuzz is not installed.
    """
    process, distance = _rapidfuzz()
    found: np.ndarray = process.cpdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=np.uint16
    )
    return found


def _rapidfuzz() -> tuple[Any, Any]:
    try:
        from rapidfuzz import distance, process
    except ImportError:
        raise ConfigError(
            "linkage.metric: levenshtein needs the package rapidfuzz; pip install rapidfuzz"
        ) from None
    return process, distance


# Candidates among texts by the q-grams that they share: no columns or rules are needed.

_GRAM_CELLS: Final = 2**21
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
        """Yield candidates; see :class:`~securevfl.linkage.blocking_rules.CandidatePairs`."""
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
        for start, end in batches(most_pairs, _GRAM_CELLS):
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


# The edits from one text to another: all key columns of a row are read as one text.


@dataclass(frozen=True, kw_only=True, eq=False)
class TextKeys(ComparedKeys):
    """One text a row; see :mod:`securevfl.linkage.metrics.texts`."""

    primary: Sequence[str]
    """The primary's texts."""

    records: Sequence[str]
    """The secondary's texts."""

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.metrics.texts.nearest_texts` does."""
        texts = self.normal_primary
        if rows is not None:
            texts = [texts[row] for row in rows]
        return nearest_normal_texts(texts, self.normal_records, k, eligible=eligible)

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the edits from each row to the record at its place."""
        mine, theirs = self.normal_primary, self.normal_records
        edits = pair_edits(
            [mine[row] for row in rows.tolist()],
            [theirs[record] for record in records.tolist()],
        )
        return edits.astype(np.float64)

    @cached_property
    def normal_primary(self) -> list[str]:
        """The primary's texts as they are compared."""
        return checked_texts(self.primary, whose="the primary")

    @cached_property
    def normal_records(self) -> list[str]:
        """The secondary's texts as they are compared."""
        return checked_texts(self.records, whose="the secondary")


class Levenshtein(Metric):
    """Insertions, deletions and substitutions of letters."""

    name: ClassVar[str] = "levenshtein"
    unit: ClassVar[str] = "edits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"blocking", "rules", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:  # noqa: ARG002
        """Return that keys are texts."""
        return "text"

    def check(self, spec: KeySpec) -> None:
        """Read the rules that block."""
        if isinstance(spec.blocking, tuple):
            BlockingRules.parse(spec.blocking, spec.kinds)

    def compare(self, spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int) -> KeyMetric:
        """Join each row's columns; with ``blocking``, say what leaving pairs out loses."""
        mine, theirs = joined_texts(primary.columns), joined_texts(records.columns)
        keys = TextKeys(primary=mine, records=theirs)
        if spec.blocking is None:
            return keys
        candidates: CandidatePairs
        if isinstance(spec.blocking, tuple):
            rules = BlockingRules.parse(spec.blocking, spec.kinds)
            candidates = RuleCandidates.of(rules, primary.columns, records.columns)
        else:
            candidates = QGramCandidates.of(
                keys.normal_primary, keys.normal_records, least_overlap=spec.blocking
            )
        return blocked_keys(keys, candidates, neighbours)
