"""Real tables in the folder that ``SECUREVFL_DATA`` names."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.data.party_tables import ColumnRoles, read_table
from securevfl.data.tables import PartyTable

DATA_VARIABLE: Final = "SECUREVFL_DATA"
"""The environment variable that names a folder of tables."""

# What the folders' own descriptions say that their label is.
_FOLDER_TASKS: Final[Mapping[str, Task]] = {
    "hdb": "regression",
    "house_kc": "regression",
    "fate_breast": "binary",
    "fate_vehicle": "multiclass",
}


def data_folder() -> Path | None:
    """Return the folder that ``SECUREVFL_DATA`` names, or None if it names none.

    Raises:
        ConfigError: If it names something that is not a folder.
    """
    value = os.environ.get(DATA_VARIABLE, "")
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise ConfigError(f"{DATA_VARIABLE}: {value} is not a folder")
    return folder


def load_folder(name: str) -> list[PartyTable]:
    """Read the two-party table ``SECUREVFL_DATA/name``: the primary's, then the secondary's.

    ``primary.csv.gz`` and ``secondary.csv.gz`` have key columns called ``key_*``, the primary's a
    label column ``y``; all others are features.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or there is no such table in it.
        DataError: If a file can't be read.
    """
    folder = require_folder(name)
    if name not in _FOLDER_TASKS:
        raise ConfigError(
            f"data: no two-party table {name!r}; there are {', '.join(_FOLDER_TASKS)}"
        )
    keys = {"hdb": ("key_lon", "key_lat"), "house_kc": ("key_lon", "key_lat")}.get(
        name, ("key_id",)
    )
    return [
        read_table(
            folder / f"{role}.csv.gz",
            ColumnRoles(
                key=keys, label="y" if role == "primary" else None, task=_FOLDER_TASKS[name]
            ),
            name=role,
        )
        for role in ("primary", "secondary")
    ]


def require_folder(name: str) -> Path:
    """Return the folder of a table in ``SECUREVFL_DATA``.

    Raises:
        ConfigError: If the variable is not set, or there is no such folder.
    """
    root = data_folder()
    if root is None:
        raise ConfigError(f"data: set {DATA_VARIABLE} to the folder that holds {name!r}")
    if not (root / name).is_dir():
        raise ConfigError(f"data: {root} has no folder {name!r}")
    return root / name
