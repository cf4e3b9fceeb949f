"""New rows of the primary, read as the rows were that its model was trained on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec
from securevfl.core.errors import DataError
from securevfl.data.party_tables import new_rows
from securevfl.data.reading import columns_of_schema
from securevfl.data.sources.read import read_frame, unnoticed
from securevfl.data.tables import PartyTable
from securevfl.federation.kept_model import KeptModel
from securevfl.linking.key_reading import keys_of_frame
from securevfl.runtime.tables import schema_of, text_keys


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedRows:
    """New rows, and what they are called."""

    table: PartyTable
    names: Sequence[Any] | None
    """None numbers them from 1 on."""
    row_name: str
    linkable: Bool[np.ndarray, " rows"]
    """Which rows have a key; the others, where keys are numbers, have a stand-in that nothing is
    linked by."""


def read_new_rows(
    config: FederationConfig,
    model: KeptModel,
    path: Path,
    *,
    id_column: str | None,
    notice: Callable[[str], None] = unnoticed,
) -> NamedRows:
    """Read a file of new rows.

    Args:
        config: The federation file.
        model: The primary's.
        path: The file; its columns may come in any order and among others.
        id_column: The column that names rows; None numbers them from 1 on.
        notice: Hears what was recognised in the file that its user might see otherwise.

    Raises:
        ConfigError: If the model has no schema.
        DataError: If the file cannot be read, or its columns are not those of training.
    """
    where, party = f"table {path}", config.primary
    wanted = columns_of_schema(schema_of(model))
    own = [] if key_spec(config).are_numbers else list(party.key)
    named = [] if id_column is None else [id_column]
    frame = read_frame(
        path,
        where=where,
        reading=party.reading,
        wanted=replace(
            wanted,
            columns=list(dict.fromkeys([*(wanted.columns or ()), *own, *named])),
            needed=[*wanted.needed, *own, *named],
            as_text=[*text_keys(config, party), *named],
            # An id of many digits would lose some as a feature's float32.
            exact=[*(wanted.exact or ()), *own, *named],
        ),
        notice=notice,
    )
    return rows_of_frame(config, model, frame, id_column=id_column, where=where)


def rows_of_frame(
    config: FederationConfig,
    model: KeptModel,
    frame: pd.DataFrame,
    *,
    id_column: str | None,
    where: str,
) -> NamedRows:
    """Return the new rows of a frame; see :func:`read_new_rows`.

    Raises:
        ConfigError: If the model has no schema.
        DataError: If its columns are not those of training.
    """
    keys, party = key_spec(config), config.primary
    if id_column is not None and id_column not in frame.columns:
        raise DataError(f"{where}: has no column {id_column!r}, which is to name the rows")
    linkable = np.ones(len(frame), dtype=np.bool_)
    if keys.are_numbers and set(party.key) <= set(frame.columns):
        linkable = frame[list(party.key)].notna().all(axis=1).to_numpy(copy=True)
        stand_ins = {column: _first_there(frame[column]) for column in party.key}
        frame = frame.fillna(stand_ins)
    elif set(party.key) <= set(frame.columns):
        linkable = frame[list(party.key)].notna().any(axis=1).to_numpy(copy=True)
    table = new_rows(frame, schema_of(model), name=party.name, where=where)
    if not keys.are_numbers:
        columns = keys_of_frame(
            keys, frame, name=party.name, columns=party.key, truth=None, where=where
        )
        table = replace(table, link_columns=columns)
    return NamedRows(
        table=table,
        names=None if id_column is None else frame[id_column].tolist(),
        row_name="row" if id_column is None else id_column,
        linkable=linkable,
    )


def rows_of_table(model: KeptModel, table: PartyTable) -> NamedRows:
    """Take new rows that are a table already.

    Args:
        model: The primary's.
        table: The rows.

    Raises:
        ConfigError: If the model's schema is damaged.
        DataError: If they were encoded in another way than those of training.
    """
    assert model.primary is not None, "the primary predicts"
    differs = table.classes is not None and table.classes != model.primary.classes
    if table.schema is not None and model.schema is not None:
        kept = schema_of(model)
        differs |= (table.schema.columns, table.schema.keys) != (kept.columns, kept.keys)
    if differs:
        raise DataError(
            f"table of {table.name!r}: was encoded by itself, and not as the rows of training "
            f"were; give the frame or the file, or read it by the schema of the table of training"
        )
    linkable = np.ones(table.num_rows, dtype=np.bool_)
    return NamedRows(table=table, names=None, row_name="row", linkable=linkable)


def _first_there(values: "pd.Series[Any]") -> Any:
    there = values.dropna()
    return 0 if there.empty else there.iloc[0]
