"""Parquet, Arrow, databases and source files: equal tables, one line each for what is wrong."""

import datetime
import re
import sqlite3
import sys
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import sqlalchemy

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import AS_IT_IS, OwnReading, Reading, Wanted, file_behind
from securevfl.ledger.ledger_file import ledger_of_table
from securevfl.stages.tables import databases

LONG = 2**53 + 1
TABLE = pa.table(
    {
        "id": pa.array([LONG, None, LONG + 2], pa.int64()),
        "a": [0.5, 1.5, None],
        "flag": [True, None, False],
        "who": ["Müller", None, "Łoś"],
        "day": [datetime.date(2020, 1, 31), None, datetime.date(2021, 2, 1)],
        "sum": [Decimal("12.50"), Decimal("1.25"), None],
    }
)
QUERY = "select * from people order by a"


def read(path: Path, **settings: object) -> pd.DataFrame:
    return read_frame(path, where="table", **settings)  # type: ignore[arg-type]


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        read(path, **settings)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 600
    assert caught.value.exit_code == 2
    return said


def write(folder: Path, kind: str) -> tuple[Path, Reading]:
    """Write the table as a file of some kind, and say how it is read."""
    path = folder / f"people.{kind}"
    if kind == "parquet":
        pq.write_table(TABLE, path, row_group_size=2)
    elif kind == "feather":
        pa.feather.write_feather(TABLE, str(path))
    elif kind == "arrow":
        with pa.ipc.new_file(str(path), TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=2)
    elif kind == "ipc":
        with pa.ipc.new_stream(str(path), TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=2)
    elif kind == "duckdb":
        with duckdb.connect(str(path)) as database:
            database.register("given", TABLE)
            database.execute("create table people as select * from given")
        return path, Reading(table="people")
    else:
        engine = sqlalchemy.create_engine(f"sqlite:///{path}")
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "create table people (n integer primary key, id bigint, a real, flag boolean, "
                "who text, day date, sum decimal(10, 2))"
            )
            for n, row in enumerate(TABLE.to_pylist()):
                row |= {
                    "day": row["day"] and str(row["day"]),
                    "sum": row["sum"] and float(row["sum"]),
                }
                names = ", ".join(row)
                marks = ", ".join(f":{name}" for name in row)
                sql = f"insert into people (n, {names}) values ({n}, {marks})"
                connection.execute(sqlalchemy.text(sql), row)
        engine.dispose()
        return path, Reading(table="people")
    return path, AS_IT_IS


KINDS = ("parquet", "feather", "arrow", "ipc", "duckdb", "sqlite")


@pytest.mark.parametrize("kind", KINDS)
def test_one_table_from_many_sources(tmp_path: Path, kind: str) -> None:
    """Whole numbers beside gaps keep all digits, decimal numbers are numbers, texts texts."""
    path, reading = write(tmp_path, kind)
    frame = read(path, reading=reading, wanted=Wanted(exclude=["n"] if kind == "sqlite" else []))

    assert frame.columns.tolist() == TABLE.column_names
    assert frame["id"].dropna().tolist() == [LONG, LONG + 2]
    np.testing.assert_array_equal(frame["a"], [0.5, 1.5, np.nan])
    np.testing.assert_array_equal(frame["sum"], [12.5, 1.25, np.nan])
    assert frame["flag"].dropna().tolist() == [True, False]
    assert frame["who"].dropna().tolist() == ["Müller", "Łoś"]
    assert str(pd.to_datetime(frame["day"]).iloc[0])[:10] == "2020-01-31"


@pytest.mark.parametrize("kind", KINDS)
def test_only_wanted_columns_come_and_bad_names_are_named(tmp_path: Path, kind: str) -> None:
    path, reading = write(tmp_path, kind)
    wanted = Wanted(columns=["who", "a"], exact=["who"])
    frame = read(path, reading=reading, wanted=wanted)

    assert frame.columns.tolist() == ["who", "a"]
    assert frame["a"].dtype == np.float32
    said = refusal(path, reading=reading, wanted=Wanted(columns=["whoo"]))
    assert "has no column 'whoo'; did you mean 'who'?" in said


@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_a_query_gives_the_rows(tmp_path: Path, kind: str) -> None:
    path, _ = write(tmp_path, kind)
    query = "select id, a * 2 as b from people where a is not null order by b desc;"
    frame = read(path, reading=OwnReading(query=query))
    assert frame["b"].tolist() == [3.0, 1.0]


WRITES = (
    "drop table people -- order by",
    "vacuum into '{}' -- order by",
    "attach '{}' as n -- order by",
    "pragma user_version = 77 -- order by",
    "pragma journal_mode = wal -- order by",
    "delete from people where n = 1 returning n -- order by",
    "with one as (select 1) delete from people returning n as 'order by'",
    "with one as (select 1) delete from people where n in (select n from people order by n)",
    "select * from people order by n; drop table people",
    "select load_extension('{}') order by 1",
    "select fts3_tokenizer('simple', x'00') order by 1",
    "select * from pragma_journal_mode order by 1",
    "create temp table z as select 1 -- order by",
)


@pytest.mark.parametrize("words", [True, False], ids=["as it is", "by SQLite alone"])
@pytest.mark.parametrize("query", WRITES)
def test_sqlite_only_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, words: bool
) -> None:
    """Also where the query's words would pass."""
    if not words:
        monkeypatch.setattr(databases, "_SELECTS", re.compile(".*", re.DOTALL))
        monkeypatch.setattr(databases, "_ORDERED", re.compile(""))
    path, _ = write(tmp_path, "sqlite")
    before = path.read_bytes()
    refusal(path, reading=OwnReading(query=query.format(tmp_path / "copy")))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_view_and_a_full_text_table_are_read(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "sqlite")
    with sqlite3.connect(path) as database:
        database.execute("create view short as select n, upper(who) as who from people")
        database.execute("create virtual table words using fts5(word)")
        database.execute("insert into words values ('one')")
    database.close()
    frame = read(path, reading=OwnReading(query="select * from short order by n"))
    assert len(frame) == 3
    frame = read(path, reading=OwnReading(query="select word from words order by word"))
    assert frame["word"].tolist() == ["one"]


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_query_without_end_ends(tmp_path: Path, kind: str) -> None:
    path, _ = write(tmp_path, kind)
    endless = (
        "with recursive c(x) as (select 1 union all select (x + 1) % 7 from c) "
        "select count(*) as n from c order by n"
    )
    said = refusal(path, reading=OwnReading(query=endless, timeout_s=0.2))
    assert "took longer than 0.2 s; correct the query, or write another timeout_s" in said


def test_an_index_of_pandas_is_a_column_if_it_has_a_name(tmp_path: Path) -> None:
    """A stored row number must not become a feature, nor an id be lost."""
    frame = pd.DataFrame({"a": [1, 2]}, index=[5, 7])
    frame.to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet").columns.tolist() == ["a"]
    frame.rename_axis("id").to_parquet(tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet")["id"].tolist() == [5, 7]


@pytest.mark.parametrize(
    ("kind", "reading", "message"),
    [
        ("duckdb", {"table": "peple"}, "has no table 'peple'; did you mean 'people'?"),
        ("sqlite", {"table": "peple"}, "has no table 'peple'; did you mean 'people'?"),
        ("duckdb", {}, "table or query: one must be given; it has people"),
        ("sqlite", {}, "table or query: one must be given"),
        ("duckdb", {"query": "select 1 orderr by order by"}, "can't be read: Parser Error"),
        ("sqlite", {"query": "select 1 fro t order by"}, "can't be read: near"),
        ("duckdb", {"query": "select * from people"}, "query: has no ORDER BY"),
        ("sqlite", {"query": "select * from people"}, "query: has no ORDER BY"),
        ("sqlite", {"query": "delete from people -- order by"}, "must be one SELECT"),
        ("duckdb", {"query": "delete from people -- order by"}, "must be one SELECT"),
        ("duckdb", {"query": "from read_csv('/etc/passwd') order by 1"}, "can't be read"),
        ("duckdb", {"query": QUERY, "separator": ";"}, "goes with a text file alone"),
        ("parquet", {"separator": ";"}, "a .parquet file needs none"),
    ],
)
def test_a_wrong_question_gets_one_line(
    tmp_path: Path, kind: str, reading: dict[str, str], message: str
) -> None:
    path, _ = write(tmp_path, kind)
    assert message in refusal(path, reading=OwnReading(**reading))  # type: ignore[arg-type]
    assert len(read(path, reading=write_reading(kind))) == 3


def write_reading(kind: str) -> Reading:
    return AS_IT_IS if kind == "parquet" else Reading(table="people")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", [None, b"", b"rubbish" * 40], ids=["absent", "empty", "rubbish"]
)
def test_a_bad_file_gets_one_line(tmp_path: Path, kind: str, content: bytes | None) -> None:
    path = tmp_path / f"t.{kind}"
    if content is not None:
        path.write_bytes(content)
    said = refusal(path, reading=write_reading("parquet" if kind in KINDS[:4] else kind))
    assert "No such file" in said if content is None else "table" in said
    path.unlink(missing_ok=True)
    path.mkdir()
    assert "Is a directory" in refusal(
        path, reading=write_reading(kind if kind in KINDS[4:] else "parquet")
    )


@pytest.mark.parametrize("package", ["duckdb", "sqlalchemy"])
def test_an_absent_package_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    path, reading = write(tmp_path, "duckdb" if package == "duckdb" else "sqlite")
    monkeypatch.setitem(sys.modules, package, None)
    said = refusal(path, reading=reading)
    assert f"needs the package {package}" in said
    assert "pip install 'securevfl[sql]'" in said


def source(folder: Path, text: str) -> Path:
    path = folder / "bank.source.toml"
    path.write_text(text)
    return path


def test_a_source_file_says_where_the_table_lies(tmp_path: Path) -> None:
    """A file relative to the source file, with its dialect; or a database."""
    (tmp_path / "export").mkdir()
    (tmp_path / "export/a.csv").write_text("1;2,5\n3;4,5\n")
    path = source(tmp_path, 'file = "export/a.csv"\nheader = ["id", "a"]\n')
    assert read(path)["a"].tolist() == [2.5, 4.5]
    assert file_behind(path) == tmp_path / "export/a.csv"
    assert ledger_of_table(path) == ledger_of_table(tmp_path / "export/a.csv")

    write(tmp_path, "sqlite")
    path = source(tmp_path, f'url = "sqlite:///people.sqlite"\nquery = "{QUERY}"\n')
    assert len(read(path)) == 3
    assert ledger_of_table(path).name == "bank.source.toml.ledger.jsonl"


SECRET = "hunter2/?@x"

BAD_SOURCES = {
    "nothing": ("", "file: must be given, or url"),
    "both": ('file = "a.csv"\nurl = "sqlite:///a"\n', "file: must be given, or url instead"),
    "no TOML": ("file = \n", "is not TOML"),
    "a misspelt setting": ('fil = "a.csv"\n', "fil: no such field; did you mean 'file'?"),
    "itself": ('file = "bank.source.toml"\n', "names another source file"),
    "a lost file": ('file = "b.csv"\n', "No such file"),
    "a lost database": ('url = "sqlite:///b.sqlite"\ntable = "t"\n', "No such file"),
    "in memory": ('url = "sqlite://"\ntable = "t"\n', "must be a file"),
    "no address": ('url = "bank"\ntable = "t"\n', "url: must be an address"),
    "no dialect": ('url = "klingon://host/bank"\ntable = "t"\n', "url: "),
    "no driver": ('url = "oracle+cx_oracle://u@host/b"\ntable = "t"\n', "is not installed"),
    "a text's setting": ('url = "sqlite:///b"\nseparator = ";"\n', "goes with a text file alone"),
    "no variable": (
        'url = "sqlite:///b"\npassword_env = "BANK_PASSWORD"\ntable = "t"\n',
        "the variable BANK_PASSWORD is not set",
    ),
    "a password as its name": (
        f'url = "sqlite:///b"\npassword_env = "{SECRET}"\n',
        "password_env: must be the name of an environment variable",
    ),
    "a password": (f'url = "postgresql://u:{SECRET}@h/b"\ntable = "t"\n', "url: has a password"),
    "a password as a parameter": (
        f'url = "postgresql://h/b?user=u&password={SECRET}"\ntable = "t"\n',
        "url: has a password",
    ),
    "a password in a quoted string": (
        f'url = "mssql+pyodbc://?odbc_connect=DRIVER%3DX%3BPWD%3D{SECRET}"\ntable = "t"\n',
        "url: has a password",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_bad_source_file_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.delenv("BANK_PASSWORD", raising=False)
    said = refusal(source(tmp_path, text))
    assert message in said
    assert SECRET not in said
    assert "hunter2" not in said


def test_settings_stand_in_one_place(tmp_path: Path) -> None:
    path = source(tmp_path, 'file = "a.csv"\n')
    assert "belong into bank.source.toml" in refusal(path, reading=Reading(separator=";"))


class _Refusing:
    """A driver, as SQLAlchemy knows them, whose server tells everybody the wrong password."""

    paramstyle = "qmark"
    sqlite_version_info = (3, 40, 0)

    class Error(Exception):
        pass

    OperationalError = DatabaseError = Error

    @classmethod
    def connect(cls, *_: object, **given: object) -> None:
        raise cls.Error(f"login of {given}\nfailed: {SECRET} is wrong, so is hunter2%2F%3F%40x")


def test_a_wrong_password_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the driver repeats it, be it quoted or not."""
    from sqlalchemy.dialects import registry
    from sqlalchemy.engine.default import DefaultDialect

    class Dialect(DefaultDialect):
        supports_statement_cache = True

        @classmethod
        def import_dbapi(cls) -> type[_Refusing]:
            return _Refusing

    monkeypatch.setattr(sys.modules[__name__], "RefusingDialect", Dialect, raising=False)
    monkeypatch.setitem(sys.modules, "refusing_dialect", sys.modules[__name__])
    registry.register("refusing", "refusing_dialect", "RefusingDialect")
    monkeypatch.setenv("BANK_PASSWORD", SECRET)
    text = f'url = "refusing://reader@db/bank"\npassword_env = "BANK_PASSWORD"\nquery = "{QUERY}"'
    said = refusal(source(tmp_path, text))

    assert "can't be read: login of" in said
    assert "***" in said
    assert "hunter2" not in said


class _Server:
    """A driver that notes what it is told; a query has one row."""

    paramstyle = "qmark"
    description = (("n", *[None] * 6),)
    Error = OperationalError = DatabaseError = InterfaceError = sqlite3.Error
    said: ClassVar[list[str]] = []

    @classmethod
    def connect(cls, *_: object, **__: object) -> "_Server":
        cls.said.clear()
        return cls()

    def cursor(self, *_: object) -> "_Server":
        self._rows = [(1,)]
        return self

    def execute(self, statement: str, *_: object) -> None:
        self.said.append(statement)

    def fetchmany(self, *_: object) -> list[tuple[int]]:
        rows, self._rows = self._rows, []
        return rows

    def close(self) -> None:
        pass

    rollback = commit = close


@pytest.mark.parametrize(
    ("server", "before"),
    [
        ("postgresql", ["SET TRANSACTION READ ONLY", "SET LOCAL statement_timeout = 9000"]),
        ("mysql", ["SET TRANSACTION READ ONLY", "SET SESSION max_execution_time = 9000"]),
        ("oracle", ["SET TRANSACTION READ ONLY"]),
        ("mssql", []),
    ],
)
def test_a_server_is_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, before: list[str]
) -> None:
    """By its transaction where SQL has that, else by the words of the query; never by two."""
    from sqlalchemy.dialects import registry
    from sqlalchemy.engine.default import DefaultDialect

    class Dialect(DefaultDialect):
        name = server
        supports_statement_cache = True
        import_dbapi = classmethod(lambda _: _Server)
        _get_server_version_info = _get_default_schema_name = lambda *_: None

    monkeypatch.setattr(sys.modules[__name__], "NotingDialect", Dialect, raising=False)
    monkeypatch.setitem(sys.modules, "noting_dialect", sys.modules[__name__])
    registry.register("noting", "noting_dialect", "NotingDialect")
    start = 'url = "noting://reader@db/bank"\ntimeout_s = 9\n'
    assert len(read(source(tmp_path, f'{start}query = "{QUERY}"'))) == 1
    assert _Server.said == [*before, QUERY]
    two = source(tmp_path, f'{start}query = "{QUERY}; commit; drop table people"')
    assert "must be one SELECT" in refusal(two) or not before
    into = source(tmp_path, f'{start}query = "select * into copy from people order by n"')
    if before:
        read(into)  # the server refuses it
    else:
        assert "must only read, and says 'into'" in refusal(into)
    assert "copy" in "".join(_Server.said) or not before


def test_a_renamed_column_is_named_and_no_other(tmp_path: Path) -> None:
    """Of many columns, the one that nobody asked for is what was meant, and is shown."""
    names = [f"bal x{i}" for i in range(30)]
    frame = pd.DataFrame({name: [1.0] for name in names}).rename(columns={"bal x3": "bal_x3"})
    frame[[*frame.columns[4:], *frame.columns[:4]]].to_parquet(tmp_path / "t.parquet")
    said = refusal(tmp_path / "t.parquet", wanted=Wanted(columns=names))
    assert "has no column 'bal x3'; did you mean 'bal_x3'? It has bal_x3, bal x4" in said
