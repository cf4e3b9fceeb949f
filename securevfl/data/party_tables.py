"""A party's table, read from a file or a data frame."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Bool

from securevfl.core.conventions import Task
from securevfl.core.errors import DataError, NoRowsError
from securevfl.data import doubts, keys_and_labels
from securevfl.data.cells import refuse_rows, require_columns
from securevfl.data.column_kinds import is_row_number
from securevfl.data.columns import WordsColumn
from securevfl.data.scaling import NOTHING_DECLARED, ColumnSettings, FeatureScaler
from securevfl.data.schema import KeyColumn, LabelColumn, TableSchema, first_problem, fit_schema
from securevfl.data.sources.read import ignore_note, read_frame
from securevfl.data.sources.settings import AS_IT_IS, Reading, Wanted, require_one_role
from securevfl.data.tables import Labels, PartyTable

T = TypeVar("T")

ROW: Final = "row"
"""Key column of tensors that are in the same order at all parties."""

# Of fewer rows, whole numbers that all differ may well be sizes.
_FEWEST_IDS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnRoles:
    """Roles of a party's columns: keys, label, features."""

    key: Sequence[str]
    """Numeric key columns, in the order that all parties agreed on; none if keys are texts."""

    task: Task
    """Kind of label: regression, binary or multiclass."""

    label: str | None = None
    """The label column, at the primary; None at a secondary."""

    positive: str | bool | int | float | None = None
    """The label of class 1 of a binary task; None: the one that sorts last."""

    rarer_is_positive: bool = False
    """Whether the rarer of two words is class 1, where ``positive`` says nothing."""

    features: Sequence[str] | None = None
    """Feature columns; None takes every column that has no other purpose and is no row number."""

    exclude: Collection[str] = ()
    """Columns that are neither keys nor features."""

    truth: str | None = None
    """A column with the number of the true entity, for linkage quality only."""

    keys_are_inputs: bool = False
    """Let models read the key, even if it is an identifier."""

    text_key: Sequence[str] = ()
    """Key columns that are compared as texts; they are excluded, but for doubts about keys."""

    random_split: bool = True
    """Whether a primary's rows of one key may come to both sides of the split."""

    def __post_init__(self) -> None:
        label, truth = ([name] if name is not None else [] for name in (self.label, self.truth))
        require_one_role(
            {"key": self.key, "label": label, "truth": truth, "features": self.features or ()}
        )

    def features_of(self, frame: pd.DataFrame, *, where: str) -> list[str]:
        """Return the feature columns of a table.

        A primary may have none: the model then uses its partners' features alone.

        Raises:
            DataError: If a column is not there, or none is left over at a secondary.
        """
        special = self._special
        require_columns(frame, [*special, *(self.features or ()), *self.exclude], where=where)
        if self.features is None:
            unnamed = self.row_numbers_of(frame)
            others = {*special, *self.exclude, *unnamed}
            chosen = [c for c in frame.columns if c not in others]
            if not chosen and self.label is None:
                raise no_features_error(special, where=where)
            return chosen
        return list(self.features)

    def row_numbers_of(self, frame: pd.DataFrame) -> list[str]:
        """Return the columns that are left out as stored indices without a name."""
        named = {*self._special, *self.exclude, *(self.features or ())}
        return [c for c in map(str, frame.columns) if is_row_number(c) and c not in named]

    @property
    def _special(self) -> list[str]:
        return [*self.key, *(column for column in (self.label, self.truth) if column is not None)]


def no_features_error(special: Sequence[str], *, where: str) -> DataError:
    """Return the error of a secondary's table that has only columns with another purpose."""
    beside = f" besides {', '.join(special)}" if special else " once its keys are taken out"
    return DataError(f"{where}: has no feature columns{beside}; a secondary needs at least one")


@dataclass(kw_only=True, slots=True)
class FittedTable:
    """What became of a frame, and all that is wrong with it."""

    chosen: Sequence[str] = ()
    """Columns that should be features."""

    schema: TableSchema | None = None
    """The encoding of those that can be such; None where even their names are wrong."""

    features: np.ndarray | None = None
    """Encoded features, shape (rows, features)."""

    unfit: Sequence[str] = ()
    """Problems of columns that cannot be features, one line each."""

    table: PartyTable | None = None
    """None where anything is wrong."""

    problems: list[str] = field(default_factory=list)
    """All that is wrong, one line each."""

    notes: tuple[str, ...] = ()
    """Doubts about it that do not stop, one sentence each."""


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
        roles: Roles of its columns.
        settings: Declared settings of them.
        name: The party's name.
        where: Name of the table in messages.

    Raises:
        DataError: Naming the first problem, and how many more there are.
    """
    fitted = fit_table(frame, roles, settings, name=name, where=where)
    if fitted.table is None:
        raise first_problem(fitted.problems)
    return fitted.table


def fit_table(
    frame: pd.DataFrame,
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    name: str,
    where: str,
) -> FittedTable:
    """Make a party's table of a frame, as far as that is possible; see :func:`fit_party_table`."""
    fitted = FittedTable()
    problems = fitted.problems
    tried = _Tried(problems)
    chosen = tried(lambda: roles.features_of(frame, where=where))
    if chosen is None or len(frame) == 0:
        problems += [] if problems else [f"{where}: has no rows"]
        return fitted
    declared = [*(settings.categories or ()), *settings.missing_columns]
    tried(lambda: require_columns(frame, declared, where=where))
    keys, kinds = _keys(frame, roles.key, tried, where=where)
    schema, features, wrong = fit_schema(frame, chosen, settings, where=where)
    fitted.chosen, fitted.schema, fitted.features, fitted.unfit = chosen, schema, features, wrong
    stopping, fitted.notes = doubts.ask(
        doubts.TableInUse(
            frame=frame,
            key=(*roles.key, *roles.text_key),
            label=roles.label,
            numeric_label=roles.task == "regression",
            features={column.name: column for column in schema.columns},
            settings=settings,
            row_numbers=roles.row_numbers_of(frame),
            random_split=roles.random_split,
        ),
        where=where,
    )
    problems += [*stopping, *wrong]
    labels = tried(lambda: _labels(frame, roles, where=where, may_lack=settings.empty_labels))
    entities = tried(lambda: keys_and_labels.entities_of(frame, roles.truth, where=where))
    if problems:
        return fitted
    values, classes, labelled = labels or (None, None, None)
    if roles.label is not None and not roles.keys_are_inputs:
        kinds = _with_ids(kinds, keys)
    label = None
    if roles.label is not None:
        label = LabelColumn(name=roles.label, task=roles.task, classes=classes)
    schema = replace(schema, keys=kinds, label=label)
    fitted.table = PartyTable(
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
        notes=fitted.notes,
    )
    return fitted


def new_rows(
    frame: pd.DataFrame,
    schema: TableSchema,
    *,
    name: str,
    where: str,
    truth: str | None = None,
    text_key: Sequence[str] = (),
    scaler: FeatureScaler | None = None,
) -> PartyTable:
    """Make a party's table of new rows, read as those were that a schema was fitted to.

    Columns may come in any order and among others. Labels are taken where the label column is
    there and has any; rows without one are marked so.

    Args:
        frame: The rows.
        schema: Their encoding.
        name: The party's name.
        where: Name of the table in messages.
        truth: A column with the number of the true entity, for linkage quality only.
        text_key: Key columns that are compared as texts, for doubts about keys.
        scaler: Scaling of the training rows, for doubts about units.

    Raises:
        NoRowsError: If there are no rows, though all columns are there.
        DataError: Naming the first problem, and how many more there are.
    """
    problems: list[str] = []
    tried = _Tried(problems)
    require_columns(frame, [column.name for column in schema.keys], where=where)
    if len(frame) == 0:
        require_columns(frame, [column.name for column in schema.columns], where=where)
        raise NoRowsError(f"{where}: has no rows")
    keys, kinds = _keys(frame, [column.name for column in schema.keys], tried, where=where)
    if not problems and kinds != tuple(replace(key, is_id=False) for key in schema.keys):
        expected = ", ".join(f"{column.name} ({column.kind})" for column in schema.keys)
        raise DataError(f"{where}: key columns must be {expected}")
    encoded = tried(lambda: schema.encode(frame, where=where))
    labels, label = None, schema.label
    if label is not None and label.name in frame.columns:
        values, place = frame[label.name], f"{where}: label {label.name!r}"
        labels = tried(
            lambda: keys_and_labels.encode_known_labels(values, classes=label.classes, where=place)
        )
    entities = tried(lambda: keys_and_labels.entities_of(frame, truth, where=where))
    stopping, notes = doubts.ask(
        doubts.TableInUse(
            frame=frame,
            key=(*(column.name for column in schema.keys), *text_key),
            features={c.name: c for c in schema.columns if c.name in frame.columns},
            trained=None if encoded is None else schema,
            encoded=None if encoded is None else encoded[1],
            scaler=scaler,
        ),
        where=where,
    )
    problems[:0] = stopping
    if encoded is None or problems:
        raise first_problem(problems)
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
        unknown_words=schema.unknown_words(frame),
        notes=notes,
    )


class _Tried:
    """Call a step, and collect the problem that it raises."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __call__(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except DataError as error:
            self._problems.append(str(error))
            return None


def _labels(
    frame: pd.DataFrame, roles: ColumnRoles, *, where: str, may_lack: bool
) -> tuple[Labels, tuple[Any, ...] | None, Bool[np.ndarray, " rows"] | None] | None:
    if roles.label is None:
        return None
    values, place = frame[roles.label], f"{where}: label {roles.label!r}"
    there = values.notna().to_numpy(dtype=bool)
    if may_lack and not there.any():
        raise DataError(f"{place}: is empty in every row; at least some rows need a label")
    lacks = may_lack and not there.all()
    some, classes = keys_and_labels.encode_labels(
        values[there] if lacks else values,
        task=roles.task,
        where=place,
        positive=roles.positive,
        rarer=roles.rarer_is_positive,
    )
    if not lacks:
        return some, classes, None
    labels = np.zeros(len(values), dtype=some.dtype)
    labels[there] = some
    return labels, classes, there


def _keys(
    frame: pd.DataFrame, names: Sequence[str], tried: _Tried, *, where: str
) -> tuple[np.ndarray, tuple[KeyColumn, ...]]:
    columns, kinds = [], []
    for name in names:
        key_column = tried(lambda: _key_column(frame[name], name, where=f"{where}: key {name!r}"))  # noqa: B023
        if key_column is not None:
            columns.append(key_column[0])
            kinds.append(key_column[1])
    stacked = np.column_stack(columns) if columns else np.empty((len(frame), 0))
    return stacked, tuple(kinds)


def _with_ids(kinds: tuple[KeyColumn, ...], keys: np.ndarray) -> tuple[KeyColumn, ...]:
    """Return key columns, a single one that numbers rows marked as an identifier."""
    if len(kinds) != 1 or kinds[0].kind != "number" or len(keys) < _FEWEST_IDS:
        return kinds
    whole = not np.any(keys % 1)
    return (replace(kinds[0], is_id=bool(whole and len(np.unique(keys)) == len(keys))),)


def _key_column(values: "pd.Series[Any]", name: str, *, where: str) -> tuple[np.ndarray, KeyColumn]:
    missing = values.isna().to_numpy(dtype=bool)
    why = f"is missing ({missing.sum()} such cells in all); fill it in or drop the row"
    refuse_rows(missing, where=where, why=why)
    numbers = keys_and_labels.key_numbers(values, where=where)
    return numbers, KeyColumn(
        name=name, kind="date" if keys_and_labels.holds_dates(values) else "number"
    )


def read_table(
    path: Path,
    roles: ColumnRoles,
    settings: ColumnSettings = NOTHING_DECLARED,
    *,
    name: str,
    reading: Reading = AS_IT_IS,
    notice: Callable[[str], None] = ignore_note,
) -> PartyTable:
    """Read one party's table: a file of any kind, or a database that a source file names.

    Numbers stay numbers, true and false become 1 and 0, dates become days since an origin and the
    place in the year, the week and, if there is one, the day. A column of words becomes one 0/1
    column for each word of its declared list or, without one, for each of its most frequent words
    in sorted order, and one for the rest. Missing values are filled in, and a 0/1 column says
    where. These decisions are the table's schema.

    Args:
        path: The table's file, or a ``NAME.source.toml`` that says where it lies; see
            :func:`securevfl.data.sources.read.read_frame`.
        roles: Roles of its columns. Excluded columns are not read, but must be there.
        settings: Declared settings of its columns.
        name: The party's name, for messages.
        reading: Settings of the file; the others are recognised.
        notice: Receives a line for each unusual format that was recognised.

    Returns:
        The table, with rows in the order of the file.

    Raises:
        DataError: If the file cannot be read, a column is missing or named twice, the table is
            empty, a column can't be a feature, or the label does not fit the task: the first
            problem, and how many more there are. Rows are counted from 1, the header not included.
    """
    where = f"table {path} of {name!r}"
    wanted = columns_of_roles(roles, settings, exclude=roles.exclude)
    frame = read_frame(path, where=where, reading=reading, wanted=wanted, notice=notice)
    return fit_party_table(frame, replace(roles, exclude=()), settings, name=name, where=where)


def columns_of_roles(
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    exclude: Collection[str] = (),
    keys: Sequence[str] | None = None,
    texts: Collection[str] = (),
) -> Wanted:
    """Return the columns to read of a table, and which of them keep all digits.

    Args:
        roles: Roles of its columns.
        settings: Declared settings of them.
        exclude: Columns that are not read, but must be there.
        keys: Key columns of any kind; None takes those of the roles, which are numbers.
        texts: Those of them that are texts.
    """
    others = [column for column in (roles.label, roles.truth) if column is not None]
    special = [*(roles.key if keys is None else keys), *others]
    declared = list(settings.categories or ())
    return Wanted(
        columns=None if roles.features is None else [*special, *roles.features],
        exclude=exclude,
        needed=[*special, *declared, *settings.missing_columns],
        as_text=texts,
        exact=[*special, *declared],
        words=settings.categories or {},
    )


def columns_of_schema(schema: TableSchema, *, truth: str | None = None) -> Wanted:
    """Return the columns to read of new rows: those of the schema, and a label if there is one.

    All features must be there; an error lists the file's own names.
    """
    keys = [column.name for column in schema.keys]
    label = [] if schema.label is None else [schema.label.name]
    special = [*keys, *([truth] if truth is not None else [])]
    words: dict[str, Sequence[str]] = {
        column.name: column.words for column in schema.columns if isinstance(column, WordsColumn)
    }
    if schema.label is not None and schema.label.classes is not None:
        classes = schema.label.classes
        words[schema.label.name] = [value for value in classes if isinstance(value, str)]
    return Wanted(
        columns=[*special, *(column.name for column in schema.columns)],
        if_there=label,
        needed=special,
        exact=[*special, *label],
        words=words,
    )
