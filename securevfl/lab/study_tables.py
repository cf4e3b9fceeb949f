"""Tables that a study's runs are trained on, each read once."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.lab.methods import ALONE, method_family
from securevfl.runtime.run_tables import read_party, read_tables

_UNRELATED: Final = (
    "model",
    "encoder",
    "base",
    "pretraining",
    "prediction",
    "runtime",
    "methods",
)
"""Sections of a federation file that do not change how parties' tables are read."""


def tables_for(
    config: FederationConfig, methods: Sequence[str], data_root: Path
) -> dict[str, PartyTable]:
    """Read the tables that methods need: only the primary's if no method reads others.

    Raises:
        DataError: As :func:`securevfl.runtime.run_tables.read_party`.
    """
    if all(method_family(config.source, name) in ALONE for name in methods):
        return {config.primary.name: read_party(config, config.primary, data_root)}
    return read_tables(config, data_root)


class TableStore:
    """Tables of federation files that differ in settings; equal tables are read and kept once.

    Args:
        data_root: Folder at which relative data paths start.
    """

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._digests: dict[str, str] = {}
        self.by_digest: dict[str, Mapping[str, PartyTable]] = {}
        """Every party's table, by the digest of all of them."""

    def digest_for(self, config: FederationConfig) -> str:
        """Return the digest of a federation's tables, which are read if they are not kept yet.

        Raises:
            DataError: As :func:`securevfl.runtime.run_tables.read_party`.
        """
        settings = _reading_settings(config)
        if settings not in self._digests:
            self._digests[settings] = self.keep(read_tables(config, self._data_root))
        return self._digests[settings]

    def keep(self, tables: Mapping[str, PartyTable]) -> str:
        """Keep tables, and return their digest."""
        digest = digest_of_tables(tables.values())
        self.by_digest.setdefault(digest, tables)
        return digest


def _reading_settings(config: FederationConfig) -> str:
    """Return all settings that may change how tables are read; too many rather than too few."""
    kept = {name: value for name, value in config.source.items() if name not in _UNRELATED}
    kept["federation"] = {
        name: value for name, value in config.source["federation"].items() if name != "seed"
    }
    return json.dumps(kept, sort_keys=True, default=repr)


def digest_of_tables(tables: Iterable[PartyTable]) -> str:
    """Return a digest of tables' contents: a database may hold other rows tomorrow."""
    total = hashlib.sha256()
    for table in tables:
        names = (table.name, table.key_names, table.feature_names, table.classes)
        total.update(repr(names).encode())
        keys = {} if table.link_columns is None else table.link_columns.columns
        arrays = (
            table.keys,
            table.features,
            table.labels,
            table.labelled,
            table.entities,
            table.split_by,
        )
        for values in (*arrays, *keys.values()):
            if values is None or values.dtype == object:
                total.update(repr(None if values is None else values.tolist()).encode())
            else:
                total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()
