"""Read a table or a query's rows from DuckDB, SQLite, or any database that SQLAlchemy knows.

Nothing is ever written: DuckDB is opened read-only, and other transactions are rolled back.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, quote_plus, unquote

import pandas as pd

from securevfl.core.errors import DataError, of_an_extra
from securevfl.data.sources.pieces import Pieces, to_pandas
from securevfl.data.sources.settings import Reading, Wanted, require_names

if TYPE_CHECKING:
    import pyarrow as pa
    import sqlalchemy

DUCKDB_SUFFIXES: Final = (".duckdb", ".ddb")
"""Files of DuckDB."""

SQLITE_SUFFIXES: Final = (".sqlite", ".sqlite3", ".db")
"""Files of SQLite."""

_ROWS_OF_A_PIECE: Final = 1 << 16
_ORDERED: Final = re.compile(r"\border\s+by\b", re.IGNORECASE)
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
        with duckdb.connect(str(path), read_only=True, config=settings) as database:
            listing = "select table_schema || '.' || table_name from information_schema.tables"
            tables = [row[0] for row in database.execute(listing).fetchall()]
            query = _query_of(reading, tables, default_schema="main", where=where)
            if reading.table is not None:
                described = database.execute(f"describe {query}").fetchall()
                columns = wanted.choose([row[0] for row in described], where=where)
                wanted = wanted.chosen(columns)
                listed = ", ".join(_quoted(name) for name in columns)
                query = f"select {listed} from ({query})"  # noqa: S608 - names are quoted
            rows = database.sql(query)
            if rows is None:
                raise DataError(f"{where}: query: gives no rows; it must be a SELECT")
            reader = rows.to_arrow_reader(_ROWS_OF_A_PIECE)
            names = list(reader.schema.names)
            return _collected(names, (batch.columns for batch in reader), wanted, where=where)
    except duckdb.Error as error:
        raise DataError(f"{where}: can't be read: {_reason(error)}") from None


def read_url(
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
        where: What messages call the source; neither address nor password is in them.
        password_env: The environment variable that holds the password; None leaves it to the
            driver.

    Raises:
        DataError: If the driver is not installed, or the database refuses.
        OSError: If there is no such SQLite file.
    """
    sqlalchemy = of_an_extra("sqlalchemy", use=f"{where}:")
    address, password = _address(url, password_env, folder, where=where)
    try:
        engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool)
    except ImportError as error:
        driver = getattr(error, "name", None) or "its driver"
        raise DataError(
            f"{where}: the database's driver {driver!r} is not installed; pip install it"
        ) from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise DataError(f"{where}: url: {_reason(error, password)}") from None
    with _told(where, password), engine.connect() as connection:
        if reading.table is not None:
            table = reading.table
            columns, order = _columns_and_order(engine, table, wanted, where=where)
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
        return _collected(names, _pieces(result), wanted, where=where)


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
        file = folder / address.database
        with file.open("rb"):
            pass  # SQLite would make an absent file
        address = address.set(database=str(file.resolve()))
    return address, password


@contextmanager
def _told(where: str, password: str | None) -> Iterator[None]:
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
    if reading.query is not None:
        if not _ORDERED.search(reading.query):
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
    return f"select * from {_quoted(schema)}.{_quoted(name)}"  # noqa: S608 - names are quoted


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _columns_and_order(
    engine: Any, table: str, wanted: Wanted, *, where: str
) -> tuple[list[str], list[str]]:
    """Return the wanted columns of a table, and those of its primary key."""
    import sqlalchemy

    schema, _, name = table.rpartition(".")
    inspector = sqlalchemy.inspect(engine)
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
            return pa.array([None if cell is None else _spelled(cell) for cell in cells])

    while rows := result.fetchmany(_ROWS_OF_A_PIECE):
        yield [column(cells) for cells in zip(*rows, strict=True)]


def _spelled(cell: Any) -> str:
    return format(cell, "f") if isinstance(cell, Decimal) else str(cell)


def _collected(
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
