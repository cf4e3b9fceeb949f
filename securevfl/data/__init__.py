"""A party's table: read, checked, scaled, and split into rows."""

from typing import TYPE_CHECKING

from securevfl.core.stages import on_first_use

if TYPE_CHECKING:
    from securevfl.data.frames import from_frame
    from securevfl.data.party_tables import (
        ColumnRoles,
        fit_party_table,
        fit_table,
        new_rows,
        read_table,
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
    "fit_table",
    "from_frame",
    "new_rows",
    "read_table",
]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
