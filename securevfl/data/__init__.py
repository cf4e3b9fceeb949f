"""A party's table: read, checked, scaled, split between parties and into rows."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.data.builtin import load_builtin, load_folder
    from securevfl.data.partition import split_pair, split_table, split_views
    from securevfl.data.reading import read_table
    from securevfl.data.tables import PartyTable

__all__ = [
    "PartyTable",
    "load_builtin",
    "load_folder",
    "read_table",
    "split_pair",
    "split_table",
    "split_views",
]

# Loaded on first use: pandas and scikit-learn take a second that not every command needs.
_HOME = {
    "PartyTable": "securevfl.data.tables",
    "load_builtin": "securevfl.data.builtin",
    "load_folder": "securevfl.data.builtin",
    "read_table": "securevfl.data.reading",
    "split_pair": "securevfl.data.partition",
    "split_table": "securevfl.data.partition",
    "split_views": "securevfl.data.partition",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'securevfl.data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
