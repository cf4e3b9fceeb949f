"""A party's table, made of a frame: fitted once, and new rows as the first ones were read."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Bool

from securevfl.core.errors import DataError
from securevfl.core.task import Task
from securevfl.data.cells import first_row
from securevfl.data.column_kinds import is_row_number, numbers_rows
from securevfl.data.column_settings import ColumnSettings
from securevfl.data.columns import OTHER, NumberColumn, WordsColumn
from securevfl.data.frames import require_columns
from securevfl.data.key_columns import holds_dates, key_numbers
from securevfl.data.labels import encode_known_labels, encode_labels, encode_some_labels
from securevfl.data.schema import KeyColumn, LabelColumn, TableSchema, fit_schema, raise_first
from securevfl.data.sources.written_numbers import unit_of
from securevfl.data.tables import Labels, PartyTable

T = TypeVar("T")

# Of fewer rows, whole numbers that all differ may well be sizes.
_FEWEST_IDS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRoles:
    """What a party's columns are for."""

    key: Sequence[str]
    """Numeric key columns, in the order that all parties agreed on; none if keys are texts."""

    task: Task
    """What the label is."""

    label: str | None = None
    """The label column, at the primary; None at a secondary."""

    features: Sequence[str] | None = None
    """Feature columns; None takes every column that has no other purpose and is no row number."""

    exclude: Collection[str] = ()
    """Columns that are neither keys nor features."""

    truth: str | None = None
    """A column with the number of the true entity, for linkage quality only."""

    keys_are_inputs: bool = False
    """Whether models are to read the key, whatever it is."""

    empty_labels: bool = False
    """Whether a row may lack its label; it is then marked so."""

    def features_of(self, frame: pd.DataFrame, *, where: str) -> list[str]:
        """Return the feature columns of a table.

        Raises:
            DataError: If a column is not there or named for two purposes, or none is left over.
        """
        special = self._special
        require_columns(frame, [*special, *(self.features or ()), *self.exclude], where=where)
        if len(set(special)) < len(special):
            raise DataError(f"{where}: one column is named for two purposes among {special}")
        if self.features is None:
            unnamed = self.row_numbers_of(frame)
            others = {*special, *self.exclude, *unnamed}
            chosen = [c for c in frame.columns if c not in others]
            if not chosen:
                raise DataError(f"{where}: has no feature columns beside {', '.join(special)}")
            return chosen
        if set(self.features) & set(special):
            both = min(set(self.features) & set(special))
            raise DataError(f"{where}: {both!r} can't be a feature")
        return list(self.features)

    def row_numbers_of(self, frame: pd.DataFrame) -> list[str]:
        """Return the columns that are left out as stored indices without a name."""
        named = {*self._special, *self.exclude, *(self.features or ())}
        return [c for c in map(str, frame.columns) if is_row_number(c) and c not in named]

    @property
    def _special(self) -> list[str]:
        return [*self.key, *(column for column in (self.label, self.truth) if column is not None)]


def fit_party_table(
    frame: pd.DataFrame,
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    name: str,
    where: str,
) -> PartyTable:
    """Make a party's table of a frame, and the schema that reads others like it.

    Args:
        frame: The rows.
        roles: What its columns are for.
        settings: What the party declares of them.
        name: The party's name.
        where: What messages call the table.

    Raises:
        DataError: Naming the first problem, and how many more there are.
    """
    table, problems = _fit(frame, roles, settings, name=name, where=where)
    raise_first(problems)
    assert table is not None, "without a problem there is a table"
    return table


def table_problems(
    frame: pd.DataFrame,
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    name: str,
    where: str,
) -> list[str]:
    """Return all that is wrong with a table, one line each; see :func:`fit_party_table`."""
    return _fit(frame, roles, settings, name=name, where=where)[1]


def new_rows(
    frame: pd.DataFrame,
    schema: TableSchema,
    *,
    name: str,
    where: str,
    truth: str | None = None,
) -> PartyTable:
    """Make a party's table of new rows, read as those were that a schema was fitted to.

    Columns may come in any order and among others. Labels are taken where the label column is
    there and has any; rows without one are marked so.

    Args:
        frame: The rows.
        schema: How they are read.
        name: The party's name.
        where: What messages call the table.
        truth: A column with the number of the true entity, for linkage quality only.

    Raises:
        DataError: Naming the first problem, and how many more there are.
    """
    problems: list[str] = []
    tried = _Tried(problems)
    if len(frame) == 0:
        raise DataError(f"{where}: has no rows")
    require_columns(frame, [column.name for column in schema.keys], where=where)
    keys, kinds = _keys(frame, [column.name for column in schema.keys], tried, where=where)
    if not problems and kinds != tuple(replace(key, is_id=False) for key in schema.keys):
        expected = ", ".join(f"{column.name} ({column.kind})" for column in schema.keys)
        raise DataError(f"{where}: key columns must be {expected}")
    encoded = tried(lambda: schema.encode(frame, where=where))
    labels, label = None, schema.label
    if label is not None and label.name in frame.columns:
        values, place = frame[label.name], f"{where}: label {label.name!r}"
        labels = tried(
            lambda: encode_known_labels(values, task=label.task, classes=label.classes, where=place)
        )
    entities = tried(lambda: _entities(frame, truth, where=where))
    raise_first(problems)
    assert encoded is not None, "without a problem there are features"
    unknown = schema.unknown_words(frame)
    return PartyTable(
        name=name,
        key_names=tuple(column.name for column in schema.keys),
        keys=keys,
        feature_names=encoded[0],
        features=encoded[1],
        labels=None if labels is None else labels[0],
        labelled=None if labels is None or labels[1].all() else labels[1],
        classes=None if labels is None or label is None else label.classes,
        schema=schema,
        entities=entities,
        unknown_words=unknown,
        notes=tuple(
            f"{count} of {len(frame)} cells of column {column!r} hold words that the "
            f"model does not know; they count as none of its words"
            for column, count in unknown.items()
        ),
    )


class _Tried:
    """Call what may find a problem, and keep the problem."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __call__(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except DataError as error:
            self._problems.append(str(error))
            return None


def _fit(
    frame: pd.DataFrame,
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    name: str,
    where: str,
) -> tuple[PartyTable | None, list[str]]:
    problems: list[str] = []
    tried = _Tried(problems)
    chosen = tried(lambda: roles.features_of(frame, where=where))
    if chosen is None or len(frame) == 0:
        return None, problems or [f"{where}: has no rows"]
    declared = [*(settings.categories or ()), *settings.missing_columns]
    tried(lambda: require_columns(frame, declared, where=where))
    keys, kinds = _keys(frame, roles.key, tried, where=where)
    schema, features, wrong = fit_schema(frame, chosen, settings, where=where)
    problems += wrong
    labels = tried(lambda: _labels(frame, roles, where=where))
    entities = tried(lambda: _entities(frame, roles.truth, where=where))
    if problems:
        return None, problems
    values, classes, labelled = labels or (None, None, None)
    if roles.label is not None and not roles.keys_are_inputs:
        kinds = _with_ids(kinds, keys)
    schema = replace(
        schema,
        keys=kinds,
        label=None
        if roles.label is None
        else LabelColumn(name=roles.label, task=roles.task, classes=classes),
    )
    table = PartyTable(
        name=name,
        key_names=tuple(roles.key),
        keys=keys,
        feature_names=schema.feature_names,
        features=features,
        labels=values,
        labelled=labelled,
        classes=classes,
        schema=schema,
        entities=entities,
        notes=(
            *_left_out(frame, roles),
            *_numbering(frame, schema),
            *_with_units(schema, settings),
        ),
    )
    return table, problems


def _left_out(frame: pd.DataFrame, roles: ColumnRoles) -> list[str]:
    return [
        f"column {column!r} has no name of its own, as a stored row number has none, and is left "
        f"out; give it a name to use it"
        for column in roles.row_numbers_of(frame)
    ]


def _numbering(frame: pd.DataFrame, schema: TableSchema) -> list[str]:
    """Return a sentence for each feature that seems to number rows instead of describing them."""
    found = {
        column.name: numbers_rows(frame[column.name])
        for column in schema.columns
        if isinstance(column, NumberColumn) and not column.sign
    }
    return [
        f"column {name!r} looks like an identifier ({why}), and models learn rows by heart by it; "
        f"exclude it, or use it as a key"
        for name, why in found.items()
        if why is not None
    ]


def _with_units(schema: TableSchema, settings: ColumnSettings) -> list[str]:
    """Return a sentence for each column of words that are numbers with a unit."""
    found = {
        column.name: unit_of(word for word in column.words if word != OTHER)
        for column in schema.columns
        if isinstance(column, WordsColumn) and settings.words(column.name) is None
    }
    return [
        f"column {name!r} holds numbers with the unit {unit!r}, which are words, in no order; "
        f"write the numbers alone, or list the words in categories"
        for name, unit in found.items()
        if unit is not None
    ]


def _labels(
    frame: pd.DataFrame, roles: ColumnRoles, *, where: str
) -> tuple[Labels, tuple[Any, ...] | None, Bool[np.ndarray, " rows"] | None] | None:
    if roles.label is None:
        return None
    values, place = frame[roles.label], f"{where}: label {roles.label!r}"
    if roles.empty_labels:
        return encode_some_labels(values, task=roles.task, where=place)
    return (*encode_labels(values, task=roles.task, where=place), None)


def _keys(
    frame: pd.DataFrame, names: Sequence[str], tried: _Tried, *, where: str
) -> tuple[np.ndarray, tuple[KeyColumn, ...]]:
    columns, kinds = [], []
    for name in names:
        found = tried(lambda: _key_column(frame[name], name, where=f"{where}: key {name!r}"))  # noqa: B023
        if found is not None:
            columns.append(found[0])
            kinds.append(found[1])
    stacked = np.column_stack(columns) if columns else np.empty((len(frame), 0))
    return stacked, tuple(kinds)


def _with_ids(kinds: tuple[KeyColumn, ...], keys: np.ndarray) -> tuple[KeyColumn, ...]:
    """Return key columns of which a single one that numbers rows is marked as an id."""
    if len(kinds) != 1 or kinds[0].kind != "number" or len(keys) < _FEWEST_IDS:
        return kinds
    whole = not np.any(keys % 1)
    return (replace(kinds[0], is_id=bool(whole and len(np.unique(keys)) == len(keys))),)


def _key_column(values: "pd.Series[Any]", name: str, *, where: str) -> tuple[np.ndarray, KeyColumn]:
    missing = values.isna().to_numpy(dtype=bool)
    if missing.any():
        raise DataError(
            f"{where}, row {first_row(missing)}: is missing ({missing.sum()} such cells in all); "
            f"fill it in or drop the row"
        )
    numbers = key_numbers(values, where=where)
    return numbers, KeyColumn(name=name, kind="date" if holds_dates(values) else "number")


def _entities(frame: pd.DataFrame, truth: str | None, *, where: str) -> np.ndarray | None:
    if truth is None:
        return None
    require_columns(frame, [truth], where=where)
    values = frame[truth]
    if not pd.api.types.is_integer_dtype(values) or values.isna().any():
        raise DataError(f"{where}: truth {truth!r}: must be whole numbers without gaps")
    return values.to_numpy(dtype=np.int64)
