"""Read a table or a query's rows from DuckDB, SQLite, or any database that SQLAlchemy knows.

Databases are only read. A DuckDB or SQLite file is opened read-only, and an SQLite statement may
do nothing but select. A server's transaction is read-only where SQL has such, else a query may hold
no word that writes; it is rolled back. Each source has a time limit.
"""

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, quote_plus, unquote

import pandas as pd

from securevfl.core.errors import DataError, of_an_extra
from securevfl.data.sources.pieces import Pieces, ReadTable, TableSource, to_pandas
from securevfl.data.sources.settings import OwnReading, Reading, Source, Wanted, require_names

if TYPE_CHECKING:
    import pyarrow as pa
    import sqlalchemy

_ROWS_OF_A_PIECE: Final = 1 << 16
_QUOTED: Final = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/""", re.DOTALL
)
"""Texts, names and comments of SQL: what they say is no part of the statement."""

_SELECTS: Final = re.compile(r"[\s(]*(select|with|values|table|from)\b[^;]*", re.IGNORECASE)
_ORDERED: Final = re.compile(r"\border\s+by\b", re.IGNORECASE)
_WRITES: Final = re.compile(
    r"\b(insert|update|delete|merge|into|drop|alter|create|truncate|exec|execute|call|grant)\b",
    re.IGNORECASE,
)

_TIMEOUT_S: Final = 600.0
_READ_ONLY: Final = ("postgresql", "cockroachdb", "mysql", "mariadb", "oracle")
"""Servers that know ``SET TRANSACTION READ ONLY``."""

_LIMITS: Final[Mapping[str, str]] = {
    "postgresql": "SET LOCAL statement_timeout = {:.0f}",
    "mysql": "SET SESSION max_execution_time = {:.0f}",
}
"""Limits of a statement's time in milliseconds; other drivers are asked to interrupt it."""

_ALLOWED: Final = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_PRAGMAS: Final = ("table_info", "table_xinfo", "read_uncommitted", "data_version")
"""Pragmas that describe a table or a connection, for SQLAlchemy and full-text tables."""

_FOREIGN: Final = ("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer")
"""Functions of SQLite that reach beyond the database."""

_SECRET: Final = re.compile(r"pass|pwd|secret|token|credential|api_?key", re.IGNORECASE)
_LONGEST_REASON: Final = 300


def read_duckdb(path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
    """Read a table or a query's rows of a DuckDB file.

    Raises:
        DataError: If DuckDB is not installed, can't read the file, or refuses the query.
        OSError: If there is no such file.
    """
    with path.open("rb"):
        pass  # DuckDB would call an absent file something else
    duckdb = of_an_extra("duckdb", use=f"{where}:")
    try:
        # No query reads or fetches anything but this file.
        settings: dict[str, Any] = {"enable_external_access": "false"}
        with (
            duckdb.connect(str(path), read_only=True, config=settings) as database,
            _in_time(reading, database.interrupt, where=where),
        ):
            listing = "select table_schema || '.' || table_name from information_schema.tables"
            tables = [row[0] for row in database.execute(listing).fetchall()]
            query = _query_of(reading, tables, default_schema="main", where=where)
            if reading.table is not None:
                described = database.execute(f"describe {query}").fetchall()
                columns = wanted.choose([row[0] for row in described], where=where)
                wanted = wanted.chosen(columns)
                listed = ", ".join(_quote_identifier(name) for name in columns)
                query = f"select {listed} from ({query})"  # noqa: S608 - names are quoted
            rows = database.sql(query)
            if rows is None:
                raise DataError(f"{where}: query: gives no rows; it must be a SELECT")
            reader = rows.to_arrow_reader(_ROWS_OF_A_PIECE)
            names = list(reader.schema.names)
            return _collect_columns(names, (batch.columns for batch in reader), wanted, where=where)
    except duckdb.Error as error:
        raise DataError(f"{where}: can't be read: {_reason(error)}") from None


def read_sqlite(path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
    """Read a table or a query's rows of an SQLite file; see :func:`read_server`."""
    return _read_url(f"sqlite:///{path.name}", reading, wanted, folder=path.parent, where=where)


def read_server(path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
    """Read a table or a query's rows of the database at a source file's address.

    Args:
        path: The source file; a relative path of an SQLite file starts in its folder.
        reading: Its content: the address, and which table or query.
        wanted: Which columns.
        where: Name of the source in messages; neither address nor password is in them.

    Raises:
        DataError: If the driver is not installed, or the database refuses.
        OSError: If there is no such SQLite file.
    """
    assert isinstance(reading, Source), "an address stands in a source file alone"
    return _read_url(
        str(reading.url),
        reading,
        wanted,
        folder=path.parent,
        where=where,
        password_env=reading.password_env,
    )


def _read_url(
    url: str,
    reading: Reading,
    wanted: Wanted,
    *,
    folder: Path,
    where: str,
    password_env: str | None = None,
) -> pd.DataFrame:
    """Read a table or a query's rows of a database.

    Args:
        url: The database's address as SQLAlchemy writes it, without a password.
        reading: Which table or query.
        wanted: Which columns.
        folder: Where a relative path of an SQLite file starts.
        where: Name of the source in messages; neither address nor password is in them.
        password_env: The environment variable that holds the password; None leaves it to the
            driver.

    Raises:
        DataError: If the driver is not installed, or the database refuses.
        OSError: If there is no such SQLite file.
    """
    sqlalchemy = of_an_extra("sqlalchemy", use=f"{where}:")
    address, password = _address(url, password_env, folder, where=where)
    more: dict[str, Any] = {}
    if address.get_backend_name() == "sqlite":
        more = {"creator": partial(_sqlite, Path(str(address.database)))}
        address = sqlalchemy.make_url("sqlite://")
    try:
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, **more)
    except ImportError as error:
        driver = getattr(error, "name", None) or "its driver"
        raise DataError(
            f"{where}: the database's driver {driver!r} is not installed; pip install it"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise DataError(f"{where}: url: {_reason(error, password)}") from None
    with (
        _translate_errors(where, password),
        engine.connect() as connection,
        _in_time(reading, _interrupt_of(connection), where=where),
    ):
        _require_reading(connection, reading, where=where)
        if reading.table is not None:
            table = reading.table
            columns, order = _columns_and_order(connection, table, wanted, where=where)
            query = _select(table, columns, order)
            wanted = wanted.chosen(columns)
            result = connection.execution_options(stream_results=True).execute(query)
        else:
            sql = _query_of(reading, [], default_schema="", where=where)
            options = connection.execution_options(stream_results=True)
            result = options.exec_driver_sql(sql)
        if not result.returns_rows:
            raise DataError(f"{where}: query: gives no rows; it must be a SELECT")
        names = [str(name) for name in result.keys()]  # noqa: SIM118 - it is no dict
        return _collect_columns(names, _pieces(result), wanted, where=where)


def _sqlite(path: Path) -> sqlite3.Connection:
    """Return a connection that can read an SQLite file, and nothing else."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    connection.set_authorizer(_only_reads)
    return connection


def _only_reads(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Return SQLite's word for what a statement wants to do: allowed, or not."""
    reads = (
        action in _ALLOWED
        or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _FOREIGN)
        or (action == sqlite3.SQLITE_PRAGMA and first in _PRAGMAS)
        # Full-text and R-tree tables declare themselves so; the file's own table is read-only.
        or (action == sqlite3.SQLITE_UPDATE and first == "sqlite_master")
    )
    return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY


def _timeout_s(reading: Reading) -> float:
    own = reading.timeout_s if isinstance(reading, OwnReading) else None
    return _TIMEOUT_S if own is None else own


@contextmanager
def _in_time(reading: Reading, interrupt: Callable[[], Any], *, where: str) -> Iterator[None]:
    """Interrupt what a source does for too long.

    Raises:
        DataError: If it took longer than it may.
    """
    limit, began = _timeout_s(reading), time.monotonic()
    timer = threading.Timer(limit, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if time.monotonic() - began < limit:
            raise
        raise DataError(
            f"{where}: took longer than {limit:g} s; correct the query, or write another timeout_s "
            f"into its NAME.source.toml"
        ) from None
    finally:
        timer.cancel()


def _interrupt_of(connection: "sqlalchemy.Connection") -> Callable[[], Any]:
    """Return what ends a connection's statement from another thread, as far as its driver can."""
    driver = connection.connection.driver_connection
    return getattr(driver, "interrupt", None) or getattr(driver, "cancel", None) or (lambda: None)


def _require_reading(connection: "sqlalchemy.Connection", reading: Reading, *, where: str) -> None:
    """Let a server's transaction do nothing but read.

    Raises:
        DataError: If the server can't promise that, and the query has a word that writes.
    """
    server = connection.dialect.name
    if server in _READ_ONLY:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
    elif server != "sqlite" and (writes := _WRITES.search(_bare(reading))):
        raise DataError(f"{where}: query: must only read, and says {writes[0]!r}")
    if server in _LIMITS and not getattr(connection.dialect, "is_mariadb", False):
        connection.exec_driver_sql(_LIMITS[server].format(1000 * _timeout_s(reading)))


def require_no_password(url: str, *, where: str) -> None:
    """Refuse an address that has a password in it, without showing either.

    Raises:
        DataError: If it has one.
    """
    _, scheme, rest = url.partition("://")
    if not scheme:
        raise DataError(
            f"{where}: url: must be an address such as postgresql+psycopg://reader@host/bank"
        )
    authority, _, _ = rest.partition("/")
    user, at, _ = authority.rpartition("@")
    # A whole connection string of ODBC may be one quoted parameter, and there may be no host.
    parameters = re.findall(r"([^?=&;]+)=", unquote(rest))
    if (at and ":" in user) or any(_SECRET.search(name) for name in parameters):
        raise _has_password(where)


def _has_password(where: str) -> DataError:
    return DataError(
        f"{where}: url: has a password or a token in it; take it out, and name the environment "
        f'variable that holds it: password_env = "BANK_PASSWORD"'
    )


def _address(
    url: str, password_env: str | None, folder: Path, *, where: str
) -> "tuple[sqlalchemy.URL, str | None]":
    import sqlalchemy
    from sqlalchemy import exc

    require_no_password(url, where=where)
    try:
        address = sqlalchemy.make_url(url)
    except (exc.ArgumentError, ValueError):
        # The address is not shown, as what is wrong with it may be a password.
        raise DataError(f"{where}: url: is no address of a database") from None
    if address.password is not None:
        raise _has_password(where)
    password = None
    if password_env is not None:
        password = os.environ.get(password_env)
        if not password:
            raise DataError(f"{where}: password_env: the variable {password_env} is not set")
        address = address.set(password=password)
    if address.get_backend_name() == "sqlite":
        if not address.database or address.database == ":memory:":
            raise DataError(f"{where}: url: an SQLite database must be a file")
        if address.query:
            raise DataError(f"{where}: url: an SQLite file takes no parameters; leave them out")
        file = folder / address.database
        with file.open("rb"):
            pass  # SQLite would make an absent file
        address = address.set(database=str(file.resolve()))
    return address, password


@contextmanager
def _translate_errors(where: str, password: str | None) -> Iterator[None]:
    """Turn a driver's errors into one line without secrets."""
    from sqlalchemy import exc

    try:
        yield
    except (DataError, OSError, MemoryError):
        raise
    except exc.DBAPIError as error:
        raise DataError(f"{where}: can't be read: {_reason(error.orig, password)}") from None
    except Exception as error:  # noqa: BLE001 - every driver has errors of its own
        raise DataError(f"{where}: can't be read: {_reason(error, password)}") from None


def _reason(error: BaseException | None, password: str | None = None) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    for secret in {password, quote(password or ""), quote_plus(password or "")}:
        if secret:
            text = text.replace(secret, "***")
    return text[:_LONGEST_REASON]


def _query_of(reading: Reading, tables: Sequence[str], *, default_schema: str, where: str) -> str:
    """Return the query that is meant.

    Args:
        reading: What the user said.
        tables: All tables, as ``schema.name``.
        default_schema: Its tables may be named without it.
        where: Name of the source in messages.

    Raises:
        DataError: If nothing was said, or there is no such table, or the query has no order.
    """
    short = [name.removeprefix(f"{default_schema}.") for name in tables]
    if isinstance(reading, OwnReading) and reading.query is not None:
        if not _SELECTS.fullmatch(bare := _bare(reading)):
            raise DataError(f"{where}: query: must be one SELECT, and nothing after it")
        if not _ORDERED.search(bare):
            raise DataError(
                f"{where}: query: has no ORDER BY; rows must come in the same order every time, "
                f"so order them by a column without equal values"
            )
        return reading.query.rstrip().rstrip(";")
    if reading.table is None:
        there = f"; it has {', '.join(short[:20])}" if short else ""
        raise DataError(f"{where}: table or query: one must be given{there}")
    if reading.table not in tables:
        require_names(short, [reading.table], where=where, what="table")
    place = tables.index(reading.table) if reading.table in tables else short.index(reading.table)
    schema, _, name = tables[place].partition(".")
    return f"select * from {_quote_identifier(schema)}.{_quote_identifier(name)}"  # noqa: S608 - names are quoted


def _bare(reading: Reading) -> str:
    """Return a query without texts, quoted names, comments and its last semicolon."""
    query = getattr(reading, "query", None) or ""
    return _QUOTED.sub(" ", query).rstrip().removesuffix(";")


def _quote_identifier(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _columns_and_order(
    connection: "sqlalchemy.Connection", table: str, wanted: Wanted, *, where: str
) -> tuple[list[str], list[str]]:
    """Return the wanted columns of a table, and those of its primary key."""
    import sqlalchemy

    schema, _, name = table.rpartition(".")
    inspector = sqlalchemy.inspect(connection)
    there = [*inspector.get_table_names(schema or None), *inspector.get_view_names(schema or None)]
    require_names(there, [name], where=where, what="table")
    names = [str(column["name"]) for column in inspector.get_columns(name, schema or None)]
    order = inspector.get_pk_constraint(name, schema or None)["constrained_columns"]
    if not order:
        raise DataError(
            f"{where}: table {table!r}: has no primary key to order its rows by; write a query "
            f"with an ORDER BY instead"
        )
    return wanted.choose(names, where=where), list(order)


def _select(table: str, columns: Sequence[str], order: Sequence[str]) -> "sqlalchemy.Select[Any]":
    import sqlalchemy

    schema, _, name = table.rpartition(".")
    chosen: list[Any] = [sqlalchemy.column(column) for column in columns]
    source = sqlalchemy.table(name, schema=schema or None)
    return sqlalchemy.select(*chosen).select_from(source).order_by(*map(sqlalchemy.column, order))


def _pieces(result: Any) -> "Iterator[list[pa.Array]]":
    """Yield the columns of some rows at a time."""
    import pyarrow as pa

    def column(cells: Sequence[Any]) -> "pa.Array":
        try:
            return pa.array(cells)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            # Of several types, as SQLite may hold them: their texts.
            return pa.array([None if cell is None else _cell_text(cell) for cell in cells])

    while rows := result.fetchmany(_ROWS_OF_A_PIECE):
        yield [column(cells) for cells in zip(*rows, strict=True)]


def _cell_text(cell: Any) -> str:
    return format(cell, "f") if isinstance(cell, Decimal) else str(cell)


def _collect_columns(
    names: list[str], pieces: "Iterable[Sequence[Any]]", wanted: Wanted, *, where: str
) -> pd.DataFrame:
    """Put the wanted columns of all pieces together; each piece has a column of Arrow a name."""
    import pyarrow as pa

    columns = wanted.choose(names, where=where)
    collected = Pieces(exact=wanted.exact)
    collected.add(pd.DataFrame({name: [] for name in columns}))
    for piece in pieces:
        by_name = dict(zip(names, piece, strict=True))
        table = pa.table({name: by_name[name] for name in columns})
        collected.add(to_pandas(table, as_text=wanted.as_text))
    return collected.frame()[columns]


def _database(read: ReadTable) -> TableSource:
    return TableSource(kind="database", settings=("table", "query", "timeout_s"), read=read)


DUCKDB: Final = _database(read_duckdb)
"""Files of DuckDB."""

SQLITE: Final = _database(read_sqlite)
"""Files of SQLite."""

SERVER: Final = _database(read_server)
"""Databases at an address."""
