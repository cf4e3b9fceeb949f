"""Keys of several fields (names, dates, numbers): a weighted mean of one similarity a field.

For a pair of rows, ``distance = sum_f w_f (1 - s_f) / sum_f w_f`` over all fields f, with s_f in
[0, 1]. A field that is missing at either party has a fixed similarity, so that a record does not
come nearer by leaving fields out. Memory: a block has at most :data:`_CHUNK_CELLS` float64
distances, and three times as much for one field's similarities, besides the memory of selection
(:func:`~securevfl.linkage.links.nearest_in_block`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.blocking_rules import BlockingRules, RuleCandidates, blocked_keys
from securevfl.linkage.links import LinkTable, eligible_ids, nearest_by_block
from securevfl.linkage.metrics.metric import (
    Columns,
    ComparedKeys,
    Field,
    KeyMetric,
    Keys,
    KeySpec,
    Metric,
)
from securevfl.linkage.metrics.texts import edit_distances, pair_edits
from securevfl.linkage.text import present_texts

_CHUNK_CELLS: Final = 2**21


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedKeys(ComparedKeys):
    """Several fields a row."""

    primary: Columns
    """The primary's key columns."""

    records: Columns
    """The secondary's key columns."""

    fields: tuple[Field, ...]
    """Which columns are compared, and how."""

    missing_similarity: float = 0.5
    """Similarity of a field that one of two rows does not have, in [0, 1]."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary[self.fields[0].name])

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records[self.fields[0].name])

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`nearest_mixed` does."""
        columns = self.primary
        if rows is not None:
            columns = {name: _rows_of(column, rows) for name, column in self.primary.items()}
        return nearest_mixed(
            columns,
            self.records,
            self.fields,
            k,
            missing_similarity=self.missing_similarity,
            eligible=eligible,
        )

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the weighted distance of each row to the record at its place."""
        total = sum(field.weight for field in self.fields)
        distance = np.zeros(len(rows))
        for field, (mine, theirs) in zip(self.fields, self._read, strict=True):
            similarity = _pair_similarity(
                mine,
                theirs,
                mine.value_of[rows],
                theirs.value_of[records],
                field,
                self.missing_similarity,
            )
            distance += field.weight / total * (1 - similarity)
        return distance

    @cached_property
    def _read(self) -> "list[tuple[_Column, _Column]]":
        """Both tables' columns, field by field."""
        return [
            (
                _Column.read(self.primary[field.name], field, whose="the primary"),
                _Column.read(self.records[field.name], field, whose="the secondary"),
            )
            for field in self.fields
        ]


class Mixed(Metric):
    """The weighted mean of what two rows lack of each other's fields, in [0, 1]."""

    name: ClassVar[str] = "mixed"
    unit: ClassVar[str] = "0 to 1"
    largest: ClassVar[float] = 1.0
    reads: ClassVar[frozenset[str]] = frozenset({"fields", "rules", "spelling"})

    def check(self, spec: KeySpec) -> None:
        """Ask for fields."""
        if not spec.fields:
            raise ConfigError(
                'linkage.fields: metric = "mixed" needs a table [linkage.fields.COLUMN] for every '
                'key column, with its kind: "text", "number" or "exact"'
            )
        if isinstance(spec.blocking, tuple):
            BlockingRules.parse(spec.blocking, spec.kinds)

    def compare(
        self,
        spec: KeySpec,
        primary: Keys,
        records: Keys,
        *,
        neighbours: int,
    ) -> KeyMetric:
        """Compare field by field; with rules that block, say what leaving pairs out loses."""
        keys = MixedKeys(
            primary=primary.columns,
            records=records.columns,
            fields=spec.fields or (),
            missing_similarity=spec.missing_similarity,
        )
        if not isinstance(spec.blocking, tuple):
            return keys
        rules = BlockingRules.parse(spec.blocking, spec.kinds)
        candidates = RuleCandidates.of(rules, primary.columns, records.columns)
        return blocked_keys(keys, candidates, neighbours)


def _rows_of(column: Any, rows: Int64[np.ndarray, " chosen"]) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    return [column[row] for row in rows]


def nearest_mixed(
    primary: Columns,
    records: Columns,
    fields: Sequence[Field],
    k: int,
    *,
    missing_similarity: float = 0.5,
    eligible: Bool[np.ndarray, " records"] | None = None,
) -> LinkTable:
    """Link every primary row to the ``k`` records of the smallest weighted distance.

    Args:
        primary: The primary's key columns.
        records: The secondary's key columns.
        fields: Which columns are compared, and how.
        k: Links a row, at most the number of records.
        missing_similarity: Similarity of a field that one of the two does not have, in [0, 1].
        eligible: Records that may be linked (a round's sample); None allows all.

    Returns:
        Exact links, distances in [0, 1], ascending by (distance, record number).

    Raises:
        ConfigError: If no field is given, one is given twice, or an argument is out of range.
        DataError: If a column is missing, of the wrong kind or another length.
    """
    if not fields or len({field.name for field in fields}) < len(fields):
        raise ConfigError("fields: must name at least one key column, and each once")
    if not 0 <= missing_similarity <= 1:
        raise ConfigError(f"missing_similarity must lie in [0, 1], got {missing_similarity!r}")
    rows = _length(primary, fields, whose="the primary")
    ids = eligible_ids(_length(records, fields, whose="the secondary"), k, eligible)
    total = sum(field.weight for field in fields)
    pairs = [
        (
            field,
            _Column.read(primary[field.name], field, whose="the primary"),
            _Column.read(records[field.name], field, whose="the secondary").take(ids),
        )
        for field in fields
    ]

    def block(start: int, end: int) -> Float64[np.ndarray, "chunk records"]:
        distance = np.zeros((end - start, len(ids)))
        for field, mine, theirs in pairs:
            part = mine.take(np.arange(start, end))
            similarity = _similarity(part, theirs, field, missing_similarity)
            distance += field.weight / total * (1 - similarity)
        return distance

    return nearest_by_block(block, rows=rows, ids=ids, k=k, chunk_cells=_CHUNK_CELLS)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Column:
    """A column as its different values, and which of them each row has."""

    values: list[str] | Float64[np.ndarray, " values"]
    value_of: Int64[np.ndarray, " rows"]
    """Position in ``values``; -1 where the value is missing."""

    @classmethod
    def read(cls, column: Any, field: Field, *, whose: str) -> "_Column":
        where = f"{whose}, field {field.name!r}"
        if field.kind == "number":
            numbers = np.asarray(column)
            if numbers.dtype != np.float64 or np.isinf(numbers).any():
                raise DataError(f"keys of {where}: must be float64 numbers, NaN for missing")
            present = ~np.isnan(numbers)
            values, inverse = np.unique(numbers[present], return_inverse=True)
            value_of = np.full(len(numbers), -1, dtype=np.int64)
            value_of[present] = inverse
            return cls(values=values, value_of=value_of)
        words = present_texts(column, whose=where)
        different = sorted({word for word in words if word})
        # A blank text says no more than a missing one.
        position: dict[str | None, int] = {None: -1, "": -1}
        position |= {word: number for number, word in enumerate(different)}
        value_of = np.array([position[word] for word in words], dtype=np.int64)
        return cls(values=different, value_of=value_of)

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "_Column":
        """Return the column of the chosen rows, with the values that they have."""
        chosen = self.value_of[rows]
        present = chosen >= 0
        used, inverse = np.unique(chosen[present], return_inverse=True)
        value_of = np.full(len(rows), -1, dtype=np.int64)
        value_of[present] = inverse
        values: list[str] | np.ndarray
        if isinstance(self.values, list):
            values = [self.values[number] for number in used]
        else:
            values = self.values[used]
        return _Column(values=values, value_of=value_of)


def _similarity(
    mine: _Column, theirs: _Column, field: Field, missing: float
) -> Float64[np.ndarray, "chunk records"]:
    """Return similarities of all pairs: compared once for each pair of different values."""
    table = np.full((len(mine.values) + 1, len(theirs.values) + 1), missing)
    if len(mine.values) and len(theirs.values):
        table[:-1, :-1] = _value_similarity(mine.values, theirs.values, field)
    # -1 picks the last row or column, which stands for a missing value.
    return table[mine.value_of][:, theirs.value_of]


def _pair_similarity(
    mine: _Column,
    theirs: _Column,
    row_value: Int64[np.ndarray, " pairs"],
    record_value: Int64[np.ndarray, " pairs"],
    field: Field,
    missing: float,
) -> Float64[np.ndarray, " pairs"]:
    """Return similarities pair by pair: compared once for each pair of different values."""
    similarity = np.full(len(row_value), missing)
    there = (row_value >= 0) & (record_value >= 0)
    # Two values as one number; the pairs of different values are far fewer than the pairs.
    both, of_pair = np.unique(
        row_value[there] * len(theirs.values) + record_value[there], return_inverse=True
    )
    one, other = np.divmod(both, max(len(theirs.values), 1))
    if field.kind == "number":
        assert field.scale is not None
        apart = np.abs(np.asarray(mine.values)[one] - np.asarray(theirs.values)[other])
        found = np.maximum(0, 1 - apart / field.scale)
    else:
        first = [mine.values[number] for number in one.tolist()]
        second = [theirs.values[number] for number in other.tolist()]
        if field.kind == "exact":
            equal = [a == b for a, b in zip(first, second, strict=True)]
            found = np.array(equal, dtype=np.float64)
        else:
            pairs = zip(first, second, strict=True)
            longest = np.array([max(len(a), len(b), 1) for a, b in pairs], dtype=np.int64)
            found = 1 - pair_edits(first, second) / np.maximum(longest, 1)
    similarity[there] = found[of_pair]
    return similarity


def _value_similarity(mine: Any, theirs: Any, field: Field) -> np.ndarray:
    if field.kind == "number":
        assert field.scale is not None
        return np.maximum(0, 1 - np.abs(mine[:, None] - theirs[None]) / field.scale)
    if field.kind == "exact":
        return (np.array(mine)[:, None] == np.array(theirs)[None]).astype(np.float64)
    longest = np.maximum(
        np.array([len(word) for word in mine])[:, None], np.array([len(word) for word in theirs])
    )
    return 1 - edit_distances(mine, theirs) / longest


def _length(columns: Columns, fields: Sequence[Field], *, whose: str) -> int:
    lengths = set()
    for field in fields:
        if field.name not in columns:
            raise DataError(
                f"keys of {whose}: have no field {field.name!r}; there are {', '.join(columns)}"
            )
        lengths.add(len(columns[field.name]))
    if len(lengths) > 1 or lengths == {0}:
        raise DataError(f"keys of {whose}: fields must have one length above 0, got {lengths}")
    return lengths.pop()
