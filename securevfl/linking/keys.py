"""What a party brings: its keys, columns named as the primary names them, and the secret."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.data.key_tables import read_key_table
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable, PartyTable, require_finite
from securevfl.linkage.metrics.metric import KeySpec, numbers_of
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec


def read_keys(
    spec: KeySpec, path: Path, *, name: str, columns: Sequence[str], truth: str | None
) -> KeyTable:
    """Read the keys of a party's own table, and nothing else of it but the truth.

    Args:
        spec: Which keys are compared.
        path: The party's table.
        name: The party's name.
        columns: Its own names of the key columns.
        truth: Its column that tells true matches, if any.

    Raises:
        DataError: As :func:`securevfl.data.key_tables.read_key_table`, or if a numeric key without
            rules for missing values has gaps.
    """
    kinds = spec.kinds
    table = read_key_table(
        path,
        name=name,
        key=dict(zip(columns, kinds.values(), strict=True)),
        truth=truth,
    )
    if spec.are_numbers:
        where = f"table {path} of {name!r}"
        require_finite(np.column_stack(list(table.columns.values())), columns, where=where)
    return KeyTable(
        name=name,
        columns=dict(zip(kinds, table.columns.values(), strict=True)),
        entities=table.entities,
    )


def keys_of(spec: KeySpec, table: PartyTable) -> KeyTable:
    """Return the keys of a table that was read for a run.

    Raises:
        DataError: If the table has none of the kind that the metric needs.
    """
    if table.link_columns is not None:
        return table.link_columns
    names = list(spec.kinds)
    if not spec.are_numbers or table.key_dim != len(names):
        raise DataError(
            f"table of {table.name!r}: has {table.key_dim} numeric key columns; "
            f"linkage.metric = {spec.metric.name!r} needs the columns {', '.join(names)}"
        )
    return KeyTable(
        name=table.name,
        columns={name: table.keys[:, axis].copy() for axis, name in enumerate(names)},
        entities=table.entities,
    )


def read_secret(spec: LinkSpec, data_root: Path) -> LinkageSecret:
    """Read the linkage secret on a data party's own machine.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    assert spec.hiding.secret is not None, "required before any party starts"
    return LinkageSecret.from_file(data_root / Path(spec.hiding.secret).expanduser())


def key_scaler(spec: KeySpec, primary: KeyTable | None) -> KeyScaler | None:
    """Return the statistics by which all parties scale keys for their models; None for texts.

    They are the middle and half the width of the agreed ranges where there are any, and else the
    mean and deviation of the primary's keys.

    Args:
        spec: Which keys are compared.
        primary: The primary's keys; None where they are not known, as under a protection.
    """
    if not spec.are_numbers:
        return None
    if spec.ranges is not None:
        low, high = np.array(spec.ranges).T
        return KeyScaler(centre=(low + high) / 2, width=(high - low) / 2)
    assert primary is not None, "protected linkage of numbers has agreed ranges"
    return KeyScaler.fit(numbers_of(primary))


def model_keys(scaler: KeyScaler | None, keys: KeyTable) -> Float32[np.ndarray, "rows dimension"]:
    """Return keys as a model takes them: scaled alike at all parties; no columns for texts."""
    if scaler is None:
        return np.empty((keys.num_rows, 0), dtype=np.float32)
    return scaler.apply(numbers_of(keys))
