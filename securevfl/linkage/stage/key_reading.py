"""The keys that a party brings, of its own file or of a frame that was read, under common names."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from securevfl.data.key_columns import key_table_of_frame, read_key_table
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.data.tables import KeyTable, require_finite
from securevfl.linkage.metrics.metric import KeySpec


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
        truth: Its column that tells true matches, if any.
        reading: How its file is written, as far as its user says.

    Raises:
        DataError: As :func:`securevfl.data.key_columns.read_key_table`, or if a numeric key without
            rules for missing values has gaps.
    """
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
    frame: pd.DataFrame,
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
    kinds = dict(zip(columns, spec.kinds.values(), strict=True))
    table = key_table_of_frame(frame, name=name, key=kinds, truth=truth, where=where)
    return _as_the_primary_names_them(spec, table)


def _as_the_primary_names_them(spec: KeySpec, table: KeyTable) -> KeyTable:
    """Return keys under common names, spelled as the federation file says."""
    columns = dict(zip(spec.kinds, table.columns.values(), strict=True))
    return KeyTable(
        name=table.name,
        columns=spec.normal(columns),
        entities=table.entities,
    )
