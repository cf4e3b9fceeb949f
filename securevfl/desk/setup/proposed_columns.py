"""Descriptions of tables' columns, from which a federation file is proposed.

Facts of a table on this machine are counted from its records. Facts that a partner sent are a
:class:`ColumnList`: names, kinds, what the partner declares, and the form of keys.
"""

import fnmatch
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pandas as pd

from securevfl.core import checks, files
from securevfl.core.column_names import BIRTH, ONE_PERSON, meaning_of, words_of
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.settings import read_settings
from securevfl.data.cells import day_number, share_with_zone, texts_of
from securevfl.data.column_kinds import ColumnKind, infer, is_row_number
from securevfl.data.scaling import MAX_CATEGORIES
from securevfl.data.sources.read import read_dates
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.desk.setup.spelling import KeyForm, Zone, form_of, zone_of

Held = Literal["number", "boolean", "words", "date", "text", "unusable"]
"""Content of a column; ``text`` has too many different words to be a feature."""

Bounds = tuple[float, float] | tuple[str, str]
"""``(low, high)``; of dates, as texts in ISO form."""

_FEWEST: Final = 20
_LARGEST_DELTA: Final = 1e-5
_SHOWN: Final = 20
_NEARLY_ALL: Final = 0.95

# With dots and hyphens, the day comes first wherever the year is last, but for the hyphens of
# North America.
_DATE_FORMS: Final = tuple(
    day + time
    for day in ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d")
    for time in ("", " %H:%M", " %H:%M:%S")
)
_LIKE_A_DATE: Final = r"\s*(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./]\d{1,2}[./]\d{1,2})( .*)?"

# Names of things, not of people.
_THINGS: Final = frozenset(
    {"product", "item", "brand", "model", "plan", "file", "column", "event", "campaign", "shop"}
    | {"store", "channel", "category", "type", "class", "species", "station", "sensor"}
)

T = TypeVar("T")

LIST_FORMAT: Final = "securevfl-columns-1"
"""Names the format of a column list, with its version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedColumn:
    """A column as a list for partners describes it."""

    name: str
    """Name of the column."""

    kind: Held
    """Kind of content."""

    bounds: tuple[float | str, ...] | None = None
    """Declared least and largest value, never taken from records; dates as texts."""

    words: tuple[str, ...] | None = None
    """Declared words, never taken from records."""

    excluded: bool = False
    """True if the owner says that the column is no feature."""

    may_be_missing: bool = False
    """True if the owner says that values may be missing."""

    no_feature: str = ""
    """Reason why the column is no feature, as its owner's list gives it."""

    unit: str = ""
    """Sign behind its numbers, such as ``%``."""

    form: KeyForm | None = None
    """Form of its values, where the column may be a key and its values are many."""

    @property
    def listed(self) -> dict[str, Any]:
        """What a list has of the column, by name."""
        return {known.name: getattr(self, known.name) for known in fields(ListedColumn)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Column(ListedColumn):
    """One column of a table, or of a partner's list."""

    bounds: Bounds | None = None

    declared_by: str = ""
    """Origin of the bounds or words, in words."""

    inferred: ColumnKind | None = None
    """Kind inferred from the records; None if the table is not on this machine."""

    values: "pd.Series[Any] | None" = None

    @property
    def one_each(self) -> bool:
        """Whether each value has one record; True where it is not known."""
        if self.form is None:
            return self.inferred is None or self.unique
        return not self.form.repeats

    @property
    def zone(self) -> Zone | None:
        """Which points in time say their zone; None if that is not known."""
        if self.values is None:
            return None if self.form is None else self.form.zone
        share = share_with_zone(self.values)
        return "all" if share == 1 else "some" if share else "none"

    @property
    def unique(self) -> bool:
        """Whether nearly every record has a value of its own, as far as that is known."""
        if self.inferred is None:
            return False
        present = self.inferred.rows - self.inferred.missing
        return present >= _FEWEST and self.inferred.different >= _NEARLY_ALL * present

    @property
    def constant(self) -> bool:
        """Whether all records have the same value, as far as that is known."""
        return (
            self.inferred is not None and self.inferred.different == 1 and not self.inferred.missing
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Known facts of one party's table."""

    name: str
    """The party's name."""

    data: str
    """Value of ``data`` for the table in the federation file."""

    columns: tuple[Column, ...]
    """Columns in the table's order."""

    rows: int | None = None
    """Number of records; None if the table is not on this machine."""

    delta: float | None = None
    """Largest delta for its records, as its owner's list gives it."""

    reading: Reading = AS_IT_IS
    """Reading settings of its file, and the form of its dates."""

    frame: pd.DataFrame | None = None
    """The table as it was read; None if it is not on this machine."""

    def column(self, name: str) -> Column | None:
        """Return the column of that name."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """The user's declarations of columns, by name or by pattern (``rt_*``)."""

    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    """Columns whose values may be missing."""

    excluded: Sequence[str] = ()
    """Columns that are no features."""

    readings: Mapping[str, Reading] = field(default_factory=dict)
    """Reading settings of files by party; ``""`` stands for all other parties."""

    def reading_of(self, party: str) -> Reading:
        """Return the reading settings of a party's file."""
        return self.readings.get(party, self.readings.get("", AS_IT_IS))


def date_form(frame: pd.DataFrame) -> str | None:
    """Return the only form in which a table's dates can be read.

    None if they are in ISO form, if two forms read all of them, such as 1/2/2020, or if columns
    differ.
    """
    texts = [frame[name].dropna() for name in frame.columns if frame[name].dtype == "str"]
    fitting = [
        {form for form in _DATE_FORMS if read_dates(cells, form).notna().all()}
        for cells in map(pd.Series.drop_duplicates, texts)
        if len(cells) and cells.iloc[:1].str.fullmatch(_LIKE_A_DATE).all()
    ]
    fitting = [forms for forms in fitting if forms]
    common = set.intersection(*fitting) if fitting else set()
    return common.pop() if len(common) == 1 else None


def describe_table(
    frame: pd.DataFrame,
    *,
    name: str,
    data: str,
    types: Mapping[str, str],
    declared: Declared,
    reading: Reading = AS_IT_IS,
) -> Table:
    """Describe a table on this machine.

    Args:
        frame: The table.
        name: The party's name.
        data: Value of ``data`` in the federation file.
        types: Declared types by column, as :func:`declared_types` returns them.
        declared: The user's declarations of columns.
        reading: Reading settings of its file.
    """
    columns = []
    for column in map(str, frame.columns):
        inferred, bounds, declared_by = infer(frame[column]), None, ""
        typed = bounds_of_type(types.get(column, ""))
        if inferred.kind == "number" and typed is not None:
            bounds, declared_by = typed, f"all that its declared type, {types[column]}, can hold"
        columns.append(
            Column(
                name=column,
                kind=held_by(inferred),
                unit=inferred.sign,
                bounds=bounds,
                declared_by=declared_by,
                excluded=is_row_number(column),
                inferred=inferred,
                values=frame[column],
            )
        )
    table = Table(
        name=name,
        data=data,
        columns=tuple(columns),
        rows=len(frame),
        reading=reading,
        frame=frame,
    )
    return with_declared(table, declared)


def with_key_forms(table: Table, read_as_text: Callable[[list[str]], pd.DataFrame]) -> Table:
    """Return a table on this machine with the form of each column that may be a key.

    Args:
        table: The table.
        read_as_text: Reads it again with some columns as the texts that they are as keys: numbers
            have no zeros in front.
    """
    likely = {
        column.name: column.inferred
        for column in table.columns
        if column.inferred is not None
        and not column.excluded
        and (
            column.inferred.identifier is not None
            or meaning_of(column.name) in ("identity", "person", "time")
        )
    }
    numbers = [name for name, inferred in likely.items() if inferred.kind == "number"]
    texts = read_as_text(numbers) if numbers else pd.DataFrame()
    forms = {}
    for column in table.columns:
        inferred, values = likely.get(column.name), column.values
        if inferred is None or values is None:
            continue
        if column.name in texts:
            values = texts[column.name]
        rows = int(values.count())
        zone = zone_of(share_with_zone(values), rows) if inferred.timed else None
        forms[column.name] = form_of(texts_of(values)[1], rows=rows, zone=zone)
    return replace(
        table,
        columns=tuple(replace(column, form=forms.get(column.name)) for column in table.columns),
    )


def with_declared(table: Table, declared: Declared) -> Table:
    """Return a table with the user's declarations, which replace earlier ones."""
    return replace(
        table, columns=tuple(_with_declared(column, declared) for column in table.columns)
    )


def _with_declared(column: Column, declared: Declared) -> Column:
    name = column.name
    bounds, words = _matching(declared.bounds, name), _matching(declared.words, name)
    if bounds is not None or words is not None:
        column = replace(column, bounds=bounds, words=words, declared_by="as you gave it")
    return replace(
        column,
        excluded=column.excluded or _matches(declared.excluded, name),
        may_be_missing=column.may_be_missing or _matches(declared.missing, name),
    )


def require_columns(tables: Sequence[Table], declared: Declared) -> None:
    """Refuse a name or pattern that no column of any table has.

    Raises:
        ConfigError: Naming the option, the name, and the column that was meant.
    """
    known = list(dict.fromkeys(column.name for table in tables for column in table.columns))
    options = {
        "--bounds": declared.bounds,
        "--words": declared.words,
        "--missing": declared.missing,
        "--exclude": declared.excluded,
    }
    for option, patterns in options.items():
        for pattern in patterns:
            if not any(_matches([pattern], name) for name in known):
                raise ConfigError(f"{option} {pattern}: {no_such_column(pattern, known)}")


def no_such_column(name: str, known: Sequence[str]) -> str:
    """Return the complaint about a name that no column has."""
    more = ", ..." if len(known) > _SHOWN else ""
    there = f"; there are {', '.join(known[:_SHOWN])}{more}"
    return f"no column is called so{checks.did_you_mean(name, known) or there}"


def held_by(inferred: ColumnKind) -> Held:
    """Return a column's kind from the kind inferred from its records."""
    if inferred.kind is None:
        return "unusable"
    many = inferred.kind == "words" and (inferred.problem or inferred.different > MAX_CATEGORIES)
    return "text" if many else inferred.kind


def declared_types(path: Path) -> dict[str, str]:
    """Return the types in a file's schema by column; empty for a CSV file."""
    if path.suffix != ".parquet":
        return {}
    import pyarrow.parquet as pq

    return {field.name: str(field.type) for field in pq.read_schema(path)}


def bounds_of_type(declared: str) -> tuple[float, float] | None:
    """Return the range of a declared type if it is narrow, else None.

    Whole numbers of 8 or 16 bits, and decimals of up to six digits: wider ones declare nothing
    about the values.
    """
    if match := re.fullmatch(r"(u?)int(8|16)", declared):
        bits = int(match[2])
        return (0.0, 2.0**bits - 1) if match[1] else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)
    if match := re.fullmatch(r"decimal\d*\((\d+), ?(\d+)\)", declared):
        digits = int(match[1]) - int(match[2])
        return (-(10.0**digits), 10.0**digits) if 0 < digits <= 6 else None
    return None


def _matching(given: Mapping[str, T], column: str) -> T | None:
    if column in given:
        return given[column]
    return next((given[pattern] for pattern in given if _matches([pattern], column)), None)


def _matches(patterns: Sequence[str], column: str) -> bool:
    return any(column == pattern or fnmatch.fnmatchcase(column, pattern) for pattern in patterns)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnList:
    """A table's card: its columns, from which partners propose a federation file."""

    format: str
    party: str
    data: str
    reading: Reading = AS_IT_IS
    delta: float | None = None
    columns: tuple[ListedColumn, ...]


def names_one_person(name: str, kind: str) -> bool:
    """Return whether a column's name suggests that it identifies a person, so is no feature.

    Args:
        name: The column's name.
        kind: The column's kind of values. Numbers and truth values are no names, and a weight at
            birth is no birth date.
    """
    words = set(words_of(name))
    if kind == "boolean" or words & _THINGS:
        return False
    if kind == "number":
        return bool(words & {"dob", "birthdate", "geburtsdatum"}) or {"birth", "date"} <= words
    if words & BIRTH and not words & ONE_PERSON:
        return kind in ("date", "text", "unusable")
    return bool(words & ONE_PERSON)


def excluded_because(column: Column) -> str | None:
    """Return why a column should be no feature, without a figure of the records; None if it may."""
    if is_row_number(column.name):
        return "has no name of its own, as a stored row number has none"
    if column.excluded:
        return "its owner leaves it out"
    if column.words is not None:
        return None
    if column.no_feature:
        return column.no_feature
    if names_one_person(column.name, column.kind):
        return "its name says that it identifies one person"
    if column.kind == "unusable":
        reason = column.inferred.reason if column.inferred else "nothing that a model can use"
        return f"holds {reason}" if reason != "empty" else "is empty in every row"
    if column.kind == "text":
        if column.inferred is not None and not column.inferred.problem:
            return f"has more than {MAX_CATEGORIES} words (max_categories); list those that matter"
        return "holds texts that hardly repeat: an identifier, or free text"
    if meaning_of(column.name) == "identity":
        return "its name says that it numbers or names something: an identifier"
    if column.inferred is not None and (column.inferred.identifier or column.inferred.problem):
        return "hardly a value repeats: it looks like an identifier"
    return "is the same in every row" if column.constant else None


def largest_delta(rows: int | None) -> float:
    """Return a delta below 0.1 divided by the records of a table."""
    return min(_LARGEST_DELTA, 10.0 ** -(math.ceil(math.log10(max(rows or 1, 1))) + 1))


def write_column_list(table: Table, path: Path) -> None:
    """Write a table's card, its columns and its keys' form, from which partners propose a file.

    Raises:
        StorageError: If the file cannot be written.

    Reveals:
        To readers of the file: the party's and its table's name; each column's name, kind and unit;
        bounds and words that were declared; the power of ten above the number of records, behind
        delta, where there are more than 10,000. A kind is told by the records where the file
        declares none: that a column holds numbers, dates, or few different words, is the same in
        every row, or hardly repeats. Of columns that may be keys: what
        :func:`securevfl.desk.setup.spelling.form_of` says. No value, no other count and no range.
    """
    columns = []
    for column in table.columns:
        values = {**column.listed, "no_feature": excluded_because(column) or ""}
        if column.form is not None:
            form = asdict(column.form).items()
            values["form"] = {name: value for name, value in form if value or name == "texts"}
        columns.append({name: value for name, value in values.items() if value})
    content = {
        "format": LIST_FORMAT,
        "party": table.name,
        "data": table.data,
        "delta": largest_delta(table.rows),
        "columns": columns,
    }
    reading = {"reading": table.reading.given_settings} if table.reading.given_settings else {}
    files.write_output(path, json.dumps({**content, **reading}, indent=2) + "\n")


def read_column_list(path: Path) -> Table:
    """Read a partner's column list.

    Raises:
        DataError: If the file can't be read or an entry is wrong.
    """
    where = f"column list {path}"
    try:
        content = json.loads(files.read_text(path))
    except OSError as error:
        raise DataError(f"{where}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{where}: is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != LIST_FORMAT:
        raise DataError(f'{where}: has no "format": "{LIST_FORMAT}"; write it by securevfl columns')
    try:
        listed = read_settings(ColumnList, content, where="list")
        columns = tuple(
            Column(
                **{
                    **column.listed,
                    "bounds": None if column.bounds is None else checked_bounds(column.bounds),
                },
                declared_by="as the party's column list declares",
            )
            for column in listed.columns
        )
    except ConfigError as error:
        raise DataError(f"{where}: {str(error).removeprefix('list.')}") from None
    return Table(
        name=listed.party,
        data=listed.data,
        columns=columns,
        reading=listed.reading,
        delta=listed.delta,
    )


def checked_bounds(pair: Sequence[Any]) -> Bounds:
    """Return ``(low, high)`` as numbers, or as dates in ISO form.

    Raises:
        ConfigError: If they are neither, or not ascending.
    """
    if isinstance(pair, str) or len(pair) != 2:
        raise ConfigError(f"bounds: must be low,high; got {pair!r}")
    try:
        low, high = float(pair[0]), float(pair[1])
    except (TypeError, ValueError):
        return _dates(*map(str, pair))
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        raise ConfigError(f"bounds: must be finite and ascending, got {low:g},{high:g}")
    return low, high


def _dates(low: str, high: str) -> tuple[str, str]:
    try:
        if not day_number(low) < day_number(high):
            raise ConfigError(f"bounds: must be ascending, got {low},{high}")
    except DataError:
        raise ConfigError(
            f"bounds: must be two numbers, or two dates such as 2020-12-31; got {low!r},{high!r}"
        ) from None
    return low, high
