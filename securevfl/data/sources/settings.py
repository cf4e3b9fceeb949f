"""What a user says of a table's source: how a file is written, which query gives the rows."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from securevfl.core.errors import ConfigError

NO_SEPARATOR: Final = frozenset('"\r\n0123456789+-.')
"""What can't separate cells, as cells begin with it."""

_MOST_SKIPPED: Final = 1000
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How a table's file is written. What is left out is recognised, or asked for in one line."""

    separator: str | None = None
    """What stands between the cells of a text file: one character. ``,``, ``;``, tab and ``|`` are
    recognised."""

    decimal: Literal[".", ","] | None = None
    """The decimal mark of a text file. A comma is recognised where no number could be read
    otherwise; ``"1,234"`` alone is asked about."""

    thousands: Literal[",", ".", "'", " ", "_"] | None = None
    """The mark between thousands in a text file. Never recognised: a number that has one is refused
    until it is named here. A space stands for no-break spaces too."""

    encoding: str | None = None
    """Of a text file, as Python names it. UTF-8 and UTF-16 are recognised; others, such as
    ``windows-1252``, must be named."""

    skip_lines: int | None = None
    """Lines of a text file before its header, such as a title, that are no part of the table. A
    first line ``sep=;``, as spreadsheets write it, needs no setting."""

    header: tuple[str, ...] | None = None
    """Column names of a text file whose first line is already a row."""

    empty: tuple[str, ...] | None = None
    """Cells of a text file that stand for no value. Default: what pandas takes for missing, such as
    the empty cell, ``NA`` and ``null``; where ``NA`` is a word, write ``empty = [""]``."""

    table: str | None = None
    """A database's table or view, ``name`` or ``schema.name``."""

    query: str | None = None
    """Instead of ``table``: one SQL query. It must have an ORDER BY, as a run that goes on later
    needs the rows in the same order."""

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
            try:
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
            twice = [name for name in self.header if self.header.count(name) > 1]
            if twice:
                raise ConfigError(f"header: two columns are called {twice[0]!r}")
        if self.table is not None and self.query is not None:
            raise ConfigError("query: table and query exclude one another; leave one out")

    @property
    def of_text(self) -> list[str]:
        """The settings given that only a text file has."""
        dialect = ("separator", "decimal", "thousands", "encoding")
        names = (*dialect, "skip_lines", "header", "empty")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def of_database(self) -> list[str]:
        """The settings given that only a database has."""
        return [name for name in ("table", "query") if getattr(self, name) is not None]


AS_IT_IS: Final = Reading()
"""Nothing is said: everything is recognised, or asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(Reading):
    """A ``NAME.source.toml`` file, which only its own party has: where its table lies."""

    file: str | None = None
    """The table's file, relative to the source file."""

    url: str | None = None
    """Instead of ``file``: a database, as SQLAlchemy writes its address
    (``postgresql+psycopg://reader@db.example/bank``); never with a password."""

    password_env: str | None = None
    """The environment variable that holds the database's password. Without it the driver finds its
    own (``~/.pgpass``, a socket, a ticket)."""

    def __post_init__(self) -> None:
        # A slotted dataclass is made anew, so super() without arguments does not find its parent.
        Reading.__post_init__(self)
        if (self.file is None) == (self.url is None):
            raise ConfigError("file: must be given, or url instead")
        if self.password_env is not None:
            if self.url is None:
                raise ConfigError("password_env: goes with url alone")
            if not _ENV_NAME.fullmatch(self.password_env):
                # Not shown: it may be the password itself.
                raise ConfigError("password_env: must be the name of an environment variable")

    @property
    def reading(self) -> Reading:
        """How the file is written, or which rows of the database are meant."""
        return Reading(
            separator=self.separator,
            decimal=self.decimal,
            thousands=self.thousands,
            encoding=self.encoding,
            skip_lines=self.skip_lines,
            header=self.header,
            empty=self.empty,
            table=self.table,
            query=self.query,
        )


def written(**settings: str | int) -> str:
    """Return what to write into a federation file, for messages: ``reading = { … }``."""
    pairs = (f"{name} = {_in_toml(value)}" for name, value in settings.items())
    return f"reading = {{ {', '.join(pairs)} }}"


def _in_toml(value: str | int) -> str:
    quotes = {"\t": r"\t", '"': r"\""}
    if isinstance(value, int):
        return str(value)
    return f'"{"".join(quotes.get(letter, letter) for letter in value)}"'
