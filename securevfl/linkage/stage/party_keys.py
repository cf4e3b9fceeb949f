"""What a party brings: its keys, columns named as the primary names them, and the secret."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.linkage.metrics.metric import KeySpec, numbers_of
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import KeyScale, LinkSpec


def keys_of(spec: KeySpec, table: PartyTable) -> KeyTable:
    """Return the keys of a table that was read for a run.

    Raises:
        DataError: If the table has none of the kind that the metric needs.
    """
    if table.link_columns is not None:
        columns = spec.normal(table.link_columns.columns)
        return replace(table.link_columns, columns=columns)
    names = list(spec.kinds)
    if not spec.are_numbers or table.key_dim != len(names):
        raise DataError(
            f"table of {table.name!r}: has {table.key_dim} numeric key columns; "
            f"linkage.metric = {spec.metric.name!r} needs the columns {', '.join(names)}"
        )
    columns = {name: table.keys[:, axis].copy() for axis, name in enumerate(names)}
    return KeyTable(
        name=table.name,
        columns=spec.normal(columns),
        entities=table.entities,
    )


def read_secret(spec: LinkSpec, data_root: Path) -> LinkageSecret:
    """Read the linkage secret on a data party's own machine.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    assert spec.hiding.secret is not None, "required before any party starts"
    return LinkageSecret.from_file(data_root / Path(spec.hiding.secret).expanduser())


def key_scaler(spec: LinkSpec, primary: KeyTable | None) -> KeyScaler | None:
    """Return the statistics by which all parties scale keys for their models; None for texts.

    They are those of a kept model; else the middle and half the width of the agreed ranges where
    there are any, and else the mean and deviation of the primary's keys.

    Args:
        spec: What linking needs.
        primary: The primary's keys; None where they are not known, as under a protection.
    """
    keys = spec.keys
    if not keys.are_numbers:
        return None
    if spec.key_scale is not None:
        return KeyScaler(
            centre=np.array(spec.key_scale.centre), width=np.array(spec.key_scale.width)
        )
    if keys.ranges is not None:
        low, high = np.array(keys.ranges).T
        return KeyScaler(centre=(low + high) / 2, width=(high - low) / 2)
    assert primary is not None, "protected linkage of numbers has agreed ranges"
    return KeyScaler.fit(numbers_of(primary))


def scale_of(scaler: KeyScaler | None) -> KeyScale | None:
    """Return how keys are scaled, as a kept model holds it."""
    if scaler is None:
        return None
    return KeyScale(centre=tuple(scaler.centre.tolist()), width=tuple(scaler.width.tolist()))


def model_keys(scaler: KeyScaler | None, keys: KeyTable) -> Float32[np.ndarray, "rows dimension"]:
    """Return keys as a model takes them: scaled alike at all parties; no columns for texts."""
    if scaler is None:
        return np.empty((keys.num_rows, 0), dtype=np.float32)
    return scaler.apply(numbers_of(keys))
