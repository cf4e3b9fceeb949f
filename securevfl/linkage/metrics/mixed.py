"""Keys of several fields (names, dates, numbers): a weighted mean of one similarity a field.

For a pair of rows, ``distance = sum_f w_f (1 - s_f) / sum_f w_f`` over all fields f, with s_f in
[0, 1]. A field that is missing at either party has a fixed similarity, so that a record does not
come nearer by telling less. Where fields block, only pairs are compared that are equal in all of
these, group by group. Memory: a block has at most :data:`_CHUNK_CELLS` float64 distances, and
three times as much for one field's similarities, beside what selection takes
(:func:`~securevfl.linkage.topk.nearest_in_block`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.levenshtein import edit_distances
from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.metrics.metric import Columns, ComparedKeys, Field, Keys, KeySpec, Metric
from securevfl.linkage.text import checked_texts
from securevfl.linkage.topk import eligible_ids, nearest_by_block

_CHUNK_CELLS: Final = 2**21


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
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

    workers: int = 1
    """Threads; -1 takes every core."""

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
            workers=self.workers,
        )


class Mixed(Metric):
    """The weighted mean of what two rows lack of each other's fields, in [0, 1]."""

    name: ClassVar[str] = "mixed"
    unit: ClassVar[str] = "0 to 1"
    largest: ClassVar[float] = 1.0
    reads: ClassVar[frozenset[str]] = frozenset({"fields"})

    def check(self, spec: KeySpec) -> None:
        """Ask for fields."""
        if not spec.fields:
            raise ConfigError(
                'linkage.fields: metric = "mixed" needs a table [linkage.fields.COLUMN] for every '
                'key column, with its kind: "text", "number" or "exact"'
            )
        if all(field.block for field in spec.fields):
            raise ConfigError(
                "linkage.fields: all of them block, so nothing is left to compare; use metric = "
                '"exact"'
            )

    def compare(
        self,
        spec: KeySpec,
        primary: Keys,
        records: Keys,
        *,
        neighbours: int,  # noqa: ARG002
    ) -> MixedKeys:
        """Compare field by field."""
        return MixedKeys(
            primary=primary.columns,
            records=records.columns,
            fields=spec.fields or (),
            missing_similarity=spec.missing_similarity,
        )


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
    workers: int = 1,
) -> LinkTable:
    """Link every primary row to the ``k`` records of the smallest weighted distance.

    Args:
        primary: The primary's key columns.
        records: The secondary's key columns.
        fields: Which columns are compared, and how.
        k: Links a row, at most the number of records.
        missing_similarity: Similarity of a field that one of the two does not have, in [0, 1].
        eligible: Records that may be linked (a round's sample); None allows all.
        workers: Threads; -1 takes every core.

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
    blocking = [field for field in fields if field.block]
    if blocking:
        return _nearest_in_groups(
            primary,
            records,
            fields,
            k,
            missing_similarity=missing_similarity,
            groups=_groups(primary, records, blocking, rows=np.arange(rows), ids=ids),
            rows=rows,
            workers=workers,
        )
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
            similarity = _similarity(part, theirs, field, missing_similarity, workers=workers)
            distance += field.weight / total * (1 - similarity)
        return distance

    return nearest_by_block(block, rows=rows, ids=ids, k=k, chunk_cells=_CHUNK_CELLS)


# Rows of the primary, and records, that may be linked to one another.
_Group = tuple[np.ndarray, np.ndarray]


def _groups(
    primary: Columns,
    records: Columns,
    blocking: Sequence[Field],
    *,
    rows: Int64[np.ndarray, " rows"],
    ids: Int64[np.ndarray, " chosen"],
) -> list[_Group]:
    """Return which rows and which records have equal blocking fields, where both are there."""
    mine, theirs = (
        list(zip(*(_present_words(table[field.name], whose) for field in blocking), strict=True))
        for table, whose in ((primary, "the primary"), (records, "the secondary"))
    )
    groups: dict[tuple[str | None, ...], tuple[list[int], list[int]]] = {}
    for row in rows:
        if None not in mine[row]:
            groups.setdefault(mine[row], ([], []))[0].append(row)
    for record in ids:
        if theirs[record] in groups:
            groups[theirs[record]][1].append(record)
    return [
        (np.array(some, dtype=np.int64), np.array(others, dtype=np.int64))
        for some, others in groups.values()
        if others
    ]


def _present_words(column: Any, whose: str) -> list[str | None]:
    """Return texts as they are compared; None for missing ones."""
    present = [value for value in column if value is not None]
    words = iter(checked_texts(present, whose=whose) if present else [])
    return [None if value is None else next(words) for value in column]


def _nearest_in_groups(
    primary: Columns,
    records: Columns,
    fields: Sequence[Field],
    k: int,
    *,
    missing_similarity: float,
    groups: Sequence[_Group],
    rows: int,
    workers: int,
) -> LinkTable:
    """Return the ``k`` nearest records of each row's own group; fewer where it has fewer."""
    # Equal fields still count in the mean, so that a block takes links away and moves none.
    unblocked = [replace(field, block=False) for field in fields]
    indices, distances = empty_links(rows, k)
    for some, others in groups:
        found = nearest_mixed(
            {name: _rows_of(column, some) for name, column in primary.items()},
            {name: _rows_of(column, others) for name, column in records.items()},
            unblocked,
            min(k, len(others)),
            missing_similarity=missing_similarity,
            workers=workers,
        )
        width = found.num_links
        indices[some, :width] = others[found.indices]
        distances[some, :width] = found.distances
    return LinkTable(indices=indices, distances=distances)


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
        present = np.array([value is not None for value in column], dtype=np.bool_)
        texts = [value for value in column if value is not None]
        words = checked_texts(texts, whose=where) if texts else []
        different = sorted(set(words))
        position = {word: number for number, word in enumerate(different)}
        value_of = np.full(len(present), -1, dtype=np.int64)
        value_of[present] = [position[word] for word in words]
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
    mine: _Column, theirs: _Column, field: Field, missing: float, *, workers: int
) -> Float64[np.ndarray, "chunk records"]:
    """Return similarities of all pairs: compared once for each pair of different values."""
    table = np.full((len(mine.values) + 1, len(theirs.values) + 1), missing)
    if len(mine.values) and len(theirs.values):
        table[:-1, :-1] = _value_similarity(mine.values, theirs.values, field, workers=workers)
    # -1 picks the last row or column, which stands for a missing value.
    return table[mine.value_of][:, theirs.value_of]


def _value_similarity(mine: Any, theirs: Any, field: Field, *, workers: int) -> np.ndarray:
    if field.kind == "number":
        assert field.scale is not None
        return np.maximum(0, 1 - np.abs(mine[:, None] - theirs[None]) / field.scale)
    if field.kind == "exact":
        return (np.array(mine)[:, None] == np.array(theirs)[None]).astype(np.float64)
    longest = np.maximum(
        np.array([len(word) for word in mine])[:, None], np.array([len(word) for word in theirs])
    )
    # Two empty texts are equal, and 0 / 0 is not a number.
    return 1 - edit_distances(mine, theirs, workers=workers) / np.maximum(longest, 1)


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
