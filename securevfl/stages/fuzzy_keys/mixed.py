"""Keys of several fields (names, dates, numbers): a weighted mean of one similarity a field.

For a pair of rows, ``distance = sum_f w_f (1 - s_f) / sum_f w_f`` over all fields f, with s_f in
[0, 1]. A field that is missing at either party has a fixed similarity, so that a record does not
come nearer by leaving fields out. Memory: a block has at most :data:`_CHUNK_CELLS` float64
distances, and three times as much for one field's similarities, besides the memory of selection
(:func:`~securevfl.linkage.links.nearest_in_block`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, nearest_by_block
from securevfl.linkage.metrics.metric import Columns, Field, KeySpec, Metric
from securevfl.linkage.text import present_texts
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules
from securevfl.stages.fuzzy_keys.candidate_pairs import PairwiseKeys
from securevfl.stages.fuzzy_keys.edits import edit_distances, pair_edits

_CHUNK_CELLS: Final = 2**21
_FAR: Final = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedKeys(PairwiseKeys):
    """Several fields a row. Make it with :meth:`of`."""

    primary: "_Table"
    """The primary's key columns."""

    records: "_Table"
    """The secondary's key columns."""

    fields: tuple[Field, ...]
    """Columns to compare, and how."""

    missing_similarity: float = 0.5
    """Similarity of a field that one of two rows does not have, in [0, 1]."""

    @classmethod
    def of(
        cls,
        primary: Columns,
        records: Columns,
        fields: Sequence[Field],
        *,
        missing_similarity: float = 0.5,
    ) -> "MixedKeys":
        """Read both parties' key columns.

        Raises:
            DataError: If a column is empty or of the wrong kind.
        """
        return cls(
            primary=_Table.read(primary, fields, whose="the primary"),
            records=_Table.read(records, fields, whose="the secondary"),
            fields=tuple(fields),
            missing_similarity=missing_similarity,
        )

    def nearest_of(self, keys: "_Table", ids: Chosen, k: int) -> LinkTable:
        """Link every row to the ``k`` records of the smallest weighted distance, in [0, 1]."""
        records = self.records[ids]

        def block(start: int, end: int) -> Float64[np.ndarray, "chunk records"]:
            part, distance = keys[np.arange(start, end)], np.zeros((end - start, len(ids)))
            for field, weight, mine, theirs in self._fields_of(part, records):
                similarity = _similarity(mine, theirs, field, self.missing_similarity)
                distance += weight * (1 - similarity)
            return distance

        return nearest_by_block(block, rows=len(keys), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the weighted distance of each row to the record at its place."""
        distance = np.zeros(len(rows))
        for field, weight, mine, theirs in self._fields_of(self.primary, self.records):
            row_value, record_value = mine.value_of[rows], theirs.value_of[records]
            similarity = np.full(len(rows), self.missing_similarity)
            there = (row_value >= 0) & (record_value >= 0)
            # Two values as one number; the pairs of different values are far fewer than the pairs.
            both, of_pair = np.unique(
                row_value[there] * len(theirs.values) + record_value[there], return_inverse=True
            )
            left, other = np.divmod(both, max(len(theirs.values), 1))
            alike = _alike(mine.values[left], theirs.values[other], field, pair_edits)
            similarity[there] = alike[of_pair]
            distance += weight * (1 - similarity)
        return distance

    def _fields_of(
        self, primary: "_Table", records: "_Table"
    ) -> Iterator[tuple[Field, float, "_Column", "_Column"]]:
        """Yield each field with its share of the mean and both parties' columns."""
        total = sum(field.weight for field in self.fields)
        columns = zip(primary.columns, records.columns, strict=True)
        for field, (mine, theirs) in zip(self.fields, columns, strict=True):
            yield field, field.weight / total, mine, theirs


class Mixed(Metric):
    """The weighted mean of what two rows lack of each other's fields, in [0, 1]."""

    name: ClassVar[str] = "mixed"
    unit: ClassVar[str] = "0 to 1"
    largest: ClassVar[float] = 1.0
    reads: ClassVar[frozenset[str]] = frozenset({"fields", "blocking", "spelling"})

    def check(self, spec: KeySpec) -> None:
        """Ask for fields."""
        if not spec.fields:
            raise ConfigError(
                'linkage.fields: metric = "mixed" needs a table [linkage.fields.COLUMN] for every '
                'key column, with its kind: "text", "number" or "exact"'
            )
        if spec.blocking is not None:
            BlockingRules.parse(spec.blocking, spec.kinds)

    def far_distance(self, keys: KeyTable) -> float:
        """Return half of the largest distance."""
        return _FAR

    def compare(
        self,
        spec: KeySpec,
        primary: KeyTable,
        records: KeyTable,
        *,
        neighbours: int,
    ) -> MixedKeys:
        """Compare field by field; with rules that block, say what leaving pairs out loses."""
        keys = MixedKeys.of(
            primary.columns,
            records.columns,
            spec.fields or (),
            missing_similarity=spec.missing_similarity,
        )
        return keys.blocked(spec, primary, records, neighbours)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Column:
    """A column as its different values, and which of them each row has."""

    values: Shaped[np.ndarray, " values"]
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
        different: list[str] = sorted({word for word in words if word})
        # A blank text says no more than a missing one.
        position: dict[str | None, int] = {None: -1, "": -1}
        position |= {word: number for number, word in enumerate(different)}
        value_of = np.array([position[word] for word in words], dtype=np.int64)
        return cls(values=np.array(different, dtype=object), value_of=value_of)

    def take(self, rows: Chosen) -> "_Column":
        """Return the column of the chosen rows, with the values that they have."""
        chosen = self.value_of[rows]
        present = chosen >= 0
        used, inverse = np.unique(chosen[present], return_inverse=True)
        value_of = np.full(len(rows), -1, dtype=np.int64)
        value_of[present] = inverse
        return _Column(values=self.values[used], value_of=value_of)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A party's fields; indexed by rows."""

    columns: Sequence[_Column]

    @classmethod
    def read(cls, columns: Columns, fields: Sequence[Field], *, whose: str) -> "_Table":
        if any(len(columns[field.name]) == 0 for field in fields):
            raise DataError(f"keys of {whose}: has no rows")
        return cls([_Column.read(columns[field.name], field, whose=whose) for field in fields])

    def __len__(self) -> int:
        return len(self.columns[0].value_of)

    def __getitem__(self, rows: Chosen) -> "_Table":
        return _Table([column.take(rows) for column in self.columns])


def _similarity(
    mine: _Column, theirs: _Column, field: Field, missing: float
) -> Float64[np.ndarray, "chunk records"]:
    """Return similarities of all pairs: compared once for each pair of different values."""
    table = np.full((len(mine.values) + 1, len(theirs.values) + 1), missing)
    if len(mine.values) and len(theirs.values):
        table[:-1, :-1] = _alike(mine.values[:, None], theirs.values[None], field, edit_distances)
    # -1 picks the last row or column, which stands for a missing value.
    return table[mine.value_of][:, theirs.value_of]


def _alike(
    mine: Shaped[np.ndarray, "*shape"],
    theirs: Shaped[np.ndarray, "*shape_2"],
    field: Field,
    edits: Callable[[Sequence[str], Sequence[str]], np.ndarray],
) -> Float64[np.ndarray, "*joint"]:
    """Return similarities of values that broadcast to one another; ``edits`` compares texts."""
    if field.scale is not None:  # of numbers alone
        return np.maximum(0, 1 - np.abs(mine - theirs) / field.scale)
    if field.kind == "exact":
        return np.asarray(mine == theirs, dtype=np.float64)
    lengths = (np.vectorize(len, otypes=[np.int64])(words) for words in (mine, theirs))
    return 1 - edits(mine.ravel().tolist(), theirs.ravel().tolist()) / np.maximum(*lengths)
