"""Keys that a party brings to linking, under the primary's names, and their scaling for models."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.data.scaling import KeyScaler
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.data.tables import KeyTable, PartyTable, require_finite
from securevfl.linkage.metrics.metric import KeySpec, numbers_of
from securevfl.linkage.spec import LinkSpec

if TYPE_CHECKING:
    import pandas as pd


def keys_of(spec: KeySpec, table: PartyTable) -> KeyTable:
    """Return the keys of a table that was read for a run.

    Raises:
        DataError: If the table has none of the kind that the metric needs.
    """
    if table.link_columns is not None:
        columns = table.link_columns.columns
        texts = [name for name, column in columns.items() if column.dtype == object]
        if spec.are_numbers and texts:
            raise DataError(
                f"table of {table.name!r}: key column {texts[0]!r} holds texts, and linkage.metric "
                f'= {spec.metric.name!r} compares numbers; take "exact" for ids, or "levenshtein"'
            )
        return replace(table.link_columns, columns=spec.normal(columns))
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


def key_scaler(spec: LinkSpec, primary: KeyTable) -> KeyScaler | None:
    """Return the statistics by which all parties scale keys for their models; None for texts.

    They are the agreed ones, and else the mean and deviation of the primary's keys.
    """
    if not spec.keys.are_numbers:
        return None
    return agreed_scaler(spec) or KeyScaler.fit(numbers_of(primary))


def agreed_scaler(spec: LinkSpec) -> KeyScaler | None:
    """Return the statistics that follow from no table; None for texts, and where there are none.

    They are those of a kept model, and else the middle and half the width of the agreed ranges.
    """
    keys = spec.keys
    if not keys.are_numbers:
        return None
    if spec.key_scale is not None:
        return spec.key_scale
    if keys.ranges is not None:
        return KeyScaler(
            centre=tuple((low + high) / 2 for low, high in keys.ranges),
            width=tuple((high - low) / 2 for low, high in keys.ranges),
        )
    return None


def model_keys(scaler: KeyScaler | None, keys: KeyTable) -> Float32[np.ndarray, "rows dimension"]:
    """Return keys as a model takes them: scaled alike at all parties; no columns for texts."""
    if scaler is None:
        return np.empty((keys.num_rows, 0), dtype=np.float32)
    return scaler.apply(numbers_of(keys))


def read_keys(
    spec: KeySpec,
    path: Path,
    *,
    name: str,
    columns: Sequence[str],
    truth: str | None,
    reading: Reading = AS_IT_IS,
) -> KeyTable:
    """Read the keys of a party's own table, and nothing else of it but the truth.

    Args:
        spec: Which keys are compared.
        path: The party's table.
        name: The party's name.
        columns: Its own names of the key columns.
        truth: Its column with the number of the true entity, if any.
        reading: Settings of its file.

    Raises:
        DataError: As :func:`~securevfl.data.keys_and_labels.read_key_table`, or if a numeric key
            without rules for missing values has gaps.
    """
    # pandas loads with it, and a party that only helps has no table.
    from securevfl.data.keys_and_labels import read_key_table

    kinds = spec.kinds
    table = read_key_table(
        path,
        name=name,
        key=dict(zip(columns, kinds.values(), strict=True)),
        truth=truth,
        reading=reading,
    )
    if spec.are_numbers:
        where = f"table {path} of {name!r}"
        require_finite(np.column_stack(list(table.columns.values())), columns, where=where)
    return _as_the_primary_names_them(spec, table)


def keys_of_frame(
    spec: KeySpec,
    frame: "pd.DataFrame",
    *,
    name: str,
    columns: Sequence[str],
    truth: str | None,
    where: str,
) -> KeyTable:
    """Return the keys of a table that was read whole, as :func:`read_keys` does.

    A database is asked once for keys and features: asked twice, its rows might have changed.

    Raises:
        DataError: As :func:`read_keys`.
    """
    from securevfl.data.keys_and_labels import key_table_of_frame

    kinds = dict(zip(columns, spec.kinds.values(), strict=True))
    table = key_table_of_frame(frame, name=name, key=kinds, truth=truth, where=where)
    return _as_the_primary_names_them(spec, table)


def _as_the_primary_names_them(spec: KeySpec, table: KeyTable) -> KeyTable:
    """Return keys under common names, spelled as the federation file says."""
    columns = dict(zip(spec.kinds, table.columns.values(), strict=True))
    return replace(table, columns=spec.normal(columns))
