"""Settings of a table's source: how a file is written, which query gives its rows."""

import contextlib
import datetime
import difflib
import encodings
import os
import pkgutil
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from encodings.aliases import aliases
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import read_toml
from securevfl.core.formatting import toml_value
from securevfl.core.settings import read_settings

_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Columns to read of a table; others are never in memory."""

    columns: Sequence[str] | None = None
    """Columns to read, in this order; None: all that there are."""

    if_there: Collection[str] = ()
    """Columns to read besides ``columns``, as far as they are there."""

    exclude: Collection[str] = ()
    """Columns that are not read, but must be there."""

    needed: Collection[str] = ()
    """Columns that must be there."""

    expected: Collection[str] = ()
    """More columns that identify the header of a text file."""

    as_text: Collection[str] = ()
    """Columns of a text file that keep their spelling ("0123" stays a text)."""

    exact: Collection[str] | None = None
    """Columns whose numbers keep float64 and int64; others become float32 features anyway. None:
    all."""

    words: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Words by column: such a cell of a text file is a value, even if spelled like a gap."""

    def choose(self, names: Sequence[str], *, where: str) -> list[str]:
        """Return the columns to read.

        Args:
            names: The table's columns.
            where: Name of the table in messages.

        Raises:
            DataError: If two columns have one name, or one that must be there is not.
        """
        require_different(names, where=where)
        require_names(names, [*self.needed, *(self.columns or ()), *self.exclude], where=where)
        if self.columns is not None:
            known = set(names)
            there = [name for name in self.if_there if name in known]
            return list(dict.fromkeys([*self.columns, *there]))
        excluded = set(self.exclude)
        return [name for name in names if name not in excluded]

    def chosen(self, columns: Sequence[str]) -> "Wanted":
        """Return what is wanted of a source that gives the chosen columns alone."""
        return replace(self, columns=columns, if_there=(), exclude=(), needed=())


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs again; None if none does."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def require_different(names: Sequence[str], *, where: str) -> None:
    """Check that no two columns have one name.

    Raises:
        DataError: Naming the first that occurs again.
    """
    if (twice := first_repeated(names)) is not None:
        raise DataError(f"{where}: two columns are called {twice!r}; rename one")


def require_one_role(roles: Mapping[str, Iterable[str]], *, where: str = "") -> None:
    """Check that no column has two roles: a label in a key is shown with the key.

    Args:
        roles: Columns by setting.
        where: Begin of the message.

    Raises:
        ConfigError: Naming the column and both settings.
    """
    taken: dict[str, str] = {}
    for role, columns in roles.items():
        for column in columns:
            if taken.setdefault(column, role) != role:
                raise ConfigError(
                    f"{where}{role}: {column!r} is named in {taken[column]} too; one column has "
                    f"one role"
                )


def require_names(
    names: Sequence[str], columns: Sequence[str], *, where: str, what: str = "column"
) -> None:
    """Check that all columns, or other named things, are there.

    Raises:
        DataError: Naming the first that is not, the nearest name that is not itself asked for, and
            those that there are, such names first.
    """
    known, asked = set(names), set(columns)
    for column in columns:
        if column not in known:
            others = [name for name in names if name not in asked]
            close = difflib.get_close_matches(column, others, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            ordered = [*others, *(name for name in names if name in asked)]
            shown = (", ".join(ordered[:_SHOWN]) or "none") + more
            raise DataError(f"{where}: has no {what} {column!r}; {hint}It has {shown}")


NO_SEPARATOR: Final = frozenset('"\r\n0123456789+-.')
"""Characters that can't separate cells, as cells begin with them."""

_MOST_SKIPPED: Final = 1000
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Format of a table's file. What is left out is recognised, or an error asks for it."""

    separator: str | None = None
    """The one character between cells."""

    decimal: Literal[".", ","] | None = None
    """Decimal mark."""

    thousands: Literal[",", ".", "'", " ", "_"] | None = None
    """Mark between thousands; a space stands for no-break spaces too."""

    encoding: str | None = None
    """Name of the encoding in Python."""

    skip_lines: int | None = None
    """Lines before the header that are no part of the table."""

    header: tuple[str, ...] | None = None
    """Column names, where the first line is already a row."""

    empty: tuple[str, ...] | None = None
    """Cells without a value; default as pandas. Where ``NA`` is a word, write ``empty = [""]``."""

    dates: str | None = None
    """Form of dates in ``strptime``'s letters: ``"%d.%m.%Y"`` reads 31.12.2020."""

    table: str | None = None
    """A database's table or view, ``name`` or ``schema.name``; a workbook's sheet."""

    ELSEWHERE: ClassVar = {
        "query": "is run on one machine, so it has no place in a file that all parties share; "
        'write file = "…" and query = "…" into NAME.source.toml beside the table, and '
        'data = "NAME.source.toml" here'
    }

    def __post_init__(self) -> None:
        if self.separator is not None and (
            len(self.separator) != 1 or self.separator in NO_SEPARATOR
        ):
            raise ConfigError(
                f"separator: must be one character that is no quote, digit, sign or dot, got "
                f"{self.separator!r}"
            )
        if self.thousands is not None and self.thousands == (self.decimal or "."):
            raise ConfigError(
                f"thousands: {self.thousands!r} is the decimal mark already; write decimal too"
            )
        if self.encoding is not None:
            known = {
                *aliases,
                *(module.name for module in pkgutil.iter_modules(encodings.__path__)),
            }
            try:
                # Python would look for a module of any other name.
                if encodings.normalize_encoding(self.encoding).lower() not in known:
                    raise LookupError
                "".encode(self.encoding)
            except (LookupError, ValueError):
                raise ConfigError(
                    f"encoding: {self.encoding!r} is not known; examples are utf-8, utf-16, "
                    f"windows-1252, latin-1"
                ) from None
        if self.skip_lines is not None and not 1 <= self.skip_lines <= _MOST_SKIPPED:
            raise ConfigError(
                f"skip_lines: must lie between 1 and {_MOST_SKIPPED:,}, got {self.skip_lines}"
            )
        if self.header is not None:
            if not self.header or not all(name.strip() for name in self.header):
                raise ConfigError("header: must name every column of the file")
            if (twice := first_repeated(self.header)) is not None:
                raise ConfigError(f"header: two columns are called {twice!r}")
        if self.dates is not None:
            _require_date_form(self.dates)

    @property
    def given_settings(self) -> dict[str, Any]:
        """The settings that are given, by name."""
        values = {data_field.name: getattr(self, data_field.name) for data_field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


AS_IT_IS: Final = Reading()
"""No settings: all are recognised, or an error asks for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnReading(Reading):
    """Format of a table's file, or query of a database, as its own party says."""

    query: str | None = None
    """Instead of ``table``: one SELECT with an ORDER BY, since a resumed run needs the same
    order."""

    timeout_s: checks.Positive | None = None
    """Most seconds that a database may take; default 600."""

    def __post_init__(self) -> None:
        # A slotted dataclass is made anew, so super() without arguments does not find its parent.
        Reading.__post_init__(self)
        checks.require_limits(self)
        if self.table is not None and self.query is not None:
            raise ConfigError("query: table and query exclude one another; leave one out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(OwnReading):
    """A ``NAME.source.toml`` file, which only its own party has: where its table lies."""

    file: str | None = None
    """The table's file, relative to the source file."""

    url: str | None = None
    """Instead of ``file``: a database's SQLAlchemy address
    (``postgresql+psycopg://reader@db.example/bank``), never with a password."""

    password_env: str | None = None
    """Environment variable of the database's password. Without it the driver finds its own."""

    def __post_init__(self) -> None:
        OwnReading.__post_init__(self)
        if (self.file is None) == (self.url is None):
            raise ConfigError("file: must be given, or url instead")
        if self.file is not None:
            checks.no_control_characters(file=self.file)
        if self.password_env is not None:
            if self.url is None:
                raise ConfigError("password_env: goes with url alone")
            if not _ENV_NAME.fullmatch(self.password_env):
                # Not shown: it may be the password itself.
                raise ConfigError("password_env: must be the name of an environment variable")

    @property
    def reading(self) -> OwnReading:
        """How the file is written, or which rows of the database are meant."""
        return OwnReading(
            **{data_field.name: getattr(self, data_field.name) for data_field in fields(OwnReading)}
        )


WHOLE_DATES: Final = {
    "%Y%m%d": 8,
    "%d%m%Y": 8,
    "%Y%m": 6,
    "%Y%m%d%H%M": 12,
    "%Y%m%d%H%M%S": 14,
}
"""Forms of dates that are whole numbers, and their digits."""


def _require_date_form(form: str) -> None:
    """Refuse a form without day, month and year, or another one that looks like a number."""
    if form in WHOLE_DATES:
        return
    day = datetime.datetime(2001, 2, 3)
    try:
        shown = day.strftime(form)
        # Python warns before it reads a day without its year, and will refuse to.
        read_back = datetime.datetime.strptime(shown, form) if "2001" in shown else None
    except ValueError:
        read_back, shown = None, ""
    if read_back != day or "%y" in form or shown.isdigit():
        raise ConfigError(
            f"dates: must name the day, the month and all four digits of the year, with something "
            f"between them, such as %d.%m.%Y or %m/%d/%Y; got {form!r}"
        )


_WRITTEN: Final = re.compile(r"reading = \{ .*? \}")


def reading_entry(**settings: str | int) -> str:
    """Return what to write into a federation file, for messages: ``reading = { … }``."""
    return f"reading = {toml_value(settings)}"


def as_options(message: str) -> str:
    """Return a message with the options of ``init`` in place of each :func:`reading_entry`."""

    def options(match: re.Match[str]) -> str:
        try:
            settings: dict[str, Any] = tomllib.loads(match[0])["reading"]
        except tomllib.TOMLDecodeError:  # "[...]" stands for names that only the user knows
            return "--reading header=NAME,NAME,..."
        pairs = (
            f"{name}={','.join(value) if isinstance(value, list) else value}"
            for name, value in settings.items()
        )
        return " ".join(f"--reading {shlex.quote(pair)}" for pair in pairs)

    rewritten, count = _WRITTEN.subn(options, message)
    return f"{rewritten} (or into a NAME{SOURCE_SUFFIX} that names the file)" if count else message


def require_own_tables(tables: Iterable[tuple[str, Path, Reading]]) -> None:
    """Check that no two parties have one table: labels would be their partner's columns.

    Args:
        tables: Each party's name, its path and how it is read.

    Raises:
        ConfigError: Naming the two.
    """
    owners: dict[object, str] = {}
    for name, path, reading in tables:
        url = None
        with contextlib.suppress(OSError, DataError):
            if is_source_file(path):
                source = read_source(path, where="")
                path, reading, url = file_behind(path), source.reading, source.url
        place = url or os.path.realpath(path)
        table = (place, reading.table, getattr(reading, "query", None))
        if (other := owners.setdefault(table, name)) != name:
            raise ConfigError(
                f"party.data: {other!r} and {name!r} have one table, {path}; each party needs its "
                f"own"
            )


SOURCE_SUFFIX: Final = ".source.toml"
"""Suffix of files that name the location of a table; each stays with its party."""


def is_source_file(path: Path) -> bool:
    """Return whether a file names the location of a table, and is no table."""
    return path.name.endswith(SOURCE_SUFFIX)


def read_source(path: Path, *, where: str) -> Source:
    """Read a ``NAME.source.toml`` file.

    Raises:
        OSError: If there is no such file.
        DataError: If it is no TOML, or a setting is wrong. Values are not shown.
    """
    try:
        table = read_toml(path)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    try:
        return read_settings(Source, table, where="source")
    except ConfigError as error:
        raise DataError(f"{where}: {str(error).removeprefix('source.')}") from None


def file_behind(path: Path) -> Path:
    """Return the file that holds a party's table: for most, the path itself.

    A source file with an address of a database stands for its table itself.

    Raises:
        OSError: If there is no such source file.
        DataError: As :func:`read_source`.
    """
    if not is_source_file(path):
        return path
    source = read_source(path, where=f"table {path}")
    return path if source.file is None else file_named(path, source.file)


def query_behind(path: Path) -> str | None:
    """Return the query that gives a party's table; None without one, or without a readable file.

    What can't be read is refused where the table is read.
    """
    with contextlib.suppress(OSError, DataError):
        return read_source(path, where="").query if is_source_file(path) else None
    return None


def file_named(path: Path, file: str) -> Path:
    """Return the file that a source file names; relative to its own folder, if it is relative."""
    return path.parent / Path(file).expanduser()
