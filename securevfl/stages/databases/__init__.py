"""Tables in databases: DuckDB, SQLite, and servers that SQLAlchemy knows."""

from securevfl.core.stages import StageManifest

STAGE = StageManifest(
    sources={
        **dict.fromkeys((".duckdb", ".ddb"), "databases:DUCKDB"),
        **dict.fromkeys((".sqlite", ".sqlite3", ".db"), "databases:SQLITE"),
        "url": "databases:SERVER",
    }
)
