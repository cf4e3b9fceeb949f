"""A party's keys as linkage takes them: columns named as the primary names them."""

from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.config.rules import key_kinds, keys_are_numbers
from securevfl.core.errors import DataError
from securevfl.data.key_tables import read_key_table
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable, PartyTable, require_finite


def read_keys(config: FederationConfig, party: PartySettings, data_root: Path) -> KeyTable:
    """Read the keys of a party's own table, and nothing else of it but the truth.

    Raises:
        DataError: As :func:`securevfl.data.key_tables.read_key_table`, or if a numeric key without
            rules for missing values has gaps.
    """
    kinds = key_kinds(config)
    path = data_root / party.data
    table = read_key_table(
        path,
        name=party.name,
        key=dict(zip(party.key, kinds.values(), strict=True)),
        truth=config.linkage.truth,
    )
    if keys_are_numbers(config):
        where = f"table {path} of {party.name!r}"
        require_finite(np.column_stack(list(table.columns.values())), party.key, where=where)
    return KeyTable(
        name=party.name,
        columns=dict(zip(kinds, table.columns.values(), strict=True)),
        entities=table.entities,
    )


def keys_of(config: FederationConfig, table: PartyTable) -> KeyTable:
    """Return the keys of a table that was read for a run.

    Raises:
        DataError: If the table has none of the kind that the metric needs.
    """
    if table.link_columns is not None:
        return table.link_columns
    names = list(key_kinds(config))
    if not keys_are_numbers(config) or table.key_dim != len(names):
        raise DataError(
            f"table of {table.name!r}: has {table.key_dim} numeric key columns; "
            f"linkage.metric = {config.linkage.metric!r} needs the columns {', '.join(names)}"
        )
    return KeyTable(
        name=table.name,
        columns={name: table.keys[:, axis].copy() for axis, name in enumerate(names)},
        entities=table.entities,
    )


def numbers_of(keys: KeyTable) -> Float64[np.ndarray, "rows dimension"]:
    """Return numeric key columns side by side."""
    return np.column_stack(list(keys.columns.values()))


def key_scaler(config: FederationConfig, primary: KeyTable | None) -> KeyScaler | None:
    """Return the statistics by which all parties scale keys for their models; None for texts.

    They are the middle and half the width of the agreed ranges where there are any, and else the
    mean and deviation of the primary's keys.

    Args:
        config: The federation file.
        primary: The primary's keys; None where they are not known, as under a protection.
    """
    if not keys_are_numbers(config):
        return None
    if config.linkage.ranges is not None:
        low, high = np.array(config.linkage.ranges).T
        return KeyScaler(centre=(low + high) / 2, width=(high - low) / 2)
    assert primary is not None, "protected linkage of numbers has agreed ranges"
    return KeyScaler.fit(numbers_of(primary))


def model_keys(scaler: KeyScaler | None, keys: KeyTable) -> Float32[np.ndarray, "rows dimension"]:
    """Return keys as a model takes them: scaled alike at all parties; no columns for texts."""
    if scaler is None:
        return np.empty((keys.num_rows, 0), dtype=np.float32)
    return scaler.apply(numbers_of(keys))
