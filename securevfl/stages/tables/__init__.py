"""Tables in databases (DuckDB, SQLite, SQLAlchemy's servers), Excel's workbooks and torch."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    sources={
        **dict.fromkeys((".xlsx", ".xlsm"), "workbooks:WORKBOOK"),
        **dict.fromkeys((".duckdb", ".ddb"), "databases:DUCKDB"),
        **dict.fromkeys((".sqlite", ".sqlite3", ".db"), "databases:SQLITE"),
        "url": "databases:SERVER",
    },
    rows={"torch": "torch_rows:frame_of_rows"},
)
