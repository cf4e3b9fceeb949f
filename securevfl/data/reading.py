"""Read a party's table, and say in one line what is wrong with it."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from securevfl.core.task import Task
from securevfl.data.column_settings import ColumnSettings
from securevfl.data.columns import WordsColumn
from securevfl.data.party_tables import ColumnRoles, fit_party_table, new_rows
from securevfl.data.schema import TableSchema
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.read import read_frame, unnoticed
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.data.tables import PartyTable


def read_table(
    path: Path,
    *,
    name: str,
    key: Sequence[str],
    task: Task,
    label: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    truth: str | None = None,
    columns: ColumnSettings | None = None,
    empty_labels: bool = False,
    schema: TableSchema | None = None,
    reading: Reading = AS_IT_IS,
    notice: Callable[[str], None] = unnoticed,
) -> PartyTable:
    """Read one party's table: a file of any kind, or a database that a source file names.

    Numbers stay numbers, true and false become 1 and 0, dates become days since an origin and the
    place in the year, the week and, if there is one, the day. A column of words becomes one 0/1
    column for each word of its declared list or, without one, for each of its most frequent words
    in sorted order, and one for the rest. Missing values are filled in, and a 0/1 column says
    where. What was decided is kept as the table's schema.

    Args:
        path: The table's file, or a ``NAME.source.toml`` that says where it lies; see
            :func:`securevfl.data.sources.read.read_frame`.
        name: The party's name, for messages.
        key: Numeric key columns, in the order that all parties agreed on; none if keys are texts.
        task: What the label is.
        label: The label column, at the primary; None at a secondary.
        features: Feature columns; None takes every column that has no other purpose.
        exclude: Columns that are neither keys nor features.
        truth: A column with the number of the true entity, for linkage quality only.
        columns: What the party declares of its columns.
        empty_labels: Whether a row may lack its label; it is then marked so.
        schema: How another table was read: the rows are then read as that one's were, and columns'
            roles and settings are its own.
        reading: How the file is written, as far as its user says.
        notice: Hears what was recognised that is not usual, a line each.

    Returns:
        The table, with rows in the order of the file.

    Raises:
        DataError: If the file cannot be read, a column is missing or named twice, the table is
            empty, a column can't be a feature, or the label does not fit the task: the first
            problem, and how many more there are. Rows are counted from 1, the header not included.
    """
    where = f"table {path} of {name!r}"
    settings = columns or ColumnSettings()
    if schema is not None:
        frame = read_frame(
            path,
            where=where,
            reading=reading,
            wanted=columns_of_schema(schema, truth=truth),
            notice=notice,
        )
        return new_rows(frame, schema, name=name, where=where, truth=truth)
    roles = ColumnRoles(
        key=key, task=task, label=label, features=features, truth=truth, empty_labels=empty_labels
    )
    wanted = columns_of_roles(roles, settings, exclude=exclude)
    frame = read_frame(path, where=where, reading=reading, wanted=wanted, notice=notice)
    return fit_party_table(frame, roles, settings, name=name, where=where)


def columns_of_roles(
    roles: ColumnRoles,
    settings: ColumnSettings,
    *,
    exclude: Collection[str] = (),
    keys: Sequence[str] | None = None,
    texts: Collection[str] = (),
) -> Wanted:
    """Return which columns a table is read for, and which of them with all digits.

    Args:
        roles: What its columns are for.
        settings: What the party declares of them.
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
    """Return which columns new rows are read for: those of the schema, as far as they are there."""
    keys = [column.name for column in schema.keys]
    label = [] if schema.label is None else [schema.label.name]
    special = [*keys, *([truth] if truth is not None else [])]
    return Wanted(
        columns=special,
        if_there=[*label, *(column.name for column in schema.columns)],
        needed=special,
        exact=[*special, *label],
        words={**_words_of(schema), **_classes_of(schema)},
    )


def _words_of(schema: TableSchema) -> dict[str, Sequence[str]]:
    return {one.name: one.words for one in schema.columns if isinstance(one, WordsColumn)}


def _classes_of(schema: TableSchema) -> dict[str, Sequence[str]]:
    label = schema.label
    if label is None or label.classes is None:
        return {}
    return {label.name: [value for value in label.classes if isinstance(value, str)]}
