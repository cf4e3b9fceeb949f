"""A party's table: read, checked, scaled, and split into rows."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.data.party_tables import (
        ColumnRoles,
        fit_party_table,
        from_frame,
        new_rows,
        read_new_rows,
        read_table,
        table_problems,
    )
    from securevfl.data.scaling import ColumnSettings
    from securevfl.data.schema import TableSchema
    from securevfl.data.tables import PartyTable

__all__ = [
    "ColumnRoles",
    "ColumnSettings",
    "PartyTable",
    "TableSchema",
    "fit_party_table",
    "from_frame",
    "new_rows",
    "read_new_rows",
    "read_table",
    "table_problems",
]

# Loaded on first use: pandas takes a second that not every command needs.
_HOME = {
    "ColumnRoles": "securevfl.data.party_tables",
    "ColumnSettings": "securevfl.data.scaling",
    "TableSchema": "securevfl.data.schema",
    "fit_party_table": "securevfl.data.party_tables",
    "new_rows": "securevfl.data.party_tables",
    "table_problems": "securevfl.data.party_tables",
    "PartyTable": "securevfl.data.tables",
    "from_frame": "securevfl.data.party_tables",
    "read_new_rows": "securevfl.data.party_tables",
    "read_table": "securevfl.data.party_tables",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'securevfl.data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
