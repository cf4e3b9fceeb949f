"""Tables as a run reads them: every party's own, and new rows of the primary."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from securevfl.config.federation import FederationConfig, key_spec
from securevfl.config.rules import require_own_files
from securevfl.config.sections import PartySettings
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.data import keys_and_labels, party_tables
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema
from securevfl.data.sources.read import ignore_note, read_frame
from securevfl.data.sources.settings import Wanted
from securevfl.data.tables import PartyTable
from securevfl.federation.saved_model import SavedModel
from securevfl.linkage.stage.party_keys import keys_of_frame
from securevfl.runtime.prediction_session import NamedRows
from securevfl.runtime.predictions import require_free_name


def read_party(
    config: FederationConfig,
    party: PartySettings,
    data_root: Path,
    observe: Observer = unheard,
    *,
    model: SavedModel | None = None,
) -> PartyTable:
    """Read a party's own table, once: keys and features.

    Args:
        config: The federation.
        party: The party.
        data_root: Where relative paths start.
        observe: Called with warnings of what was recognised in a file that its user might read
            differently.
        model: Reads columns as they were for this model; None as the federation file says.

    Raises:
        ConfigError: If the model has no schema.
        DataError: As :func:`securevfl.data.party_tables.read_table`.
    """
    keys, path, truth = key_spec(config), data_root / party.data, config.linkage.truth
    where = f"table {path} of {party.name!r}"
    roles, settings = column_roles(config, party), column_settings(config, party)
    try:
        frame = read_frame(
            path,
            where=where,
            reading=party.reading,
            wanted=_wanted_columns(config, party, roles, settings)
            if model is None
            else _wanted_again(config, party, schema_of(model), truth=truth),
            notice=lambda text: observe(Warned(text=text)),
        )
    except DataError as error:
        if path.is_absolute() or path.exists():
            raise
        raise DataError(f"{error}; relative paths start at --data-root (data_root)") from None
    if model is None:
        table = party_tables.fit_party_table(frame, roles, settings, name=party.name, where=where)
        table = with_split(config, party, frame, table, where=where)
    else:
        table = party_tables.new_rows(
            frame,
            schema_of(model),
            name=party.name,
            where=where,
            truth=truth,
            text_key=_text_key(config, party),
            scaler=model.feature_scaler,
        )
    if keys.are_numbers:
        return table
    columns = keys_of_frame(
        keys, frame, name=party.name, columns=party.key, truth=truth, where=where
    )
    return replace(table, link_columns=columns)


def with_split(
    config: FederationConfig,
    party: PartySettings,
    frame: pd.DataFrame,
    table: PartyTable,
    *,
    where: str,
) -> PartyTable:
    """Return a party's table with the groups or times by which its rows are split, if any.

    Raises:
        DataError: If the column is not there, or a value is missing or none of its kind.
    """
    column = _split_column(config, party)
    if column is None:
        return table
    split_by = keys_and_labels.split_places(frame, column, kind=_split_kind(config), where=where)
    return replace(table, split_by=split_by)


def column_roles(config: FederationConfig, party: PartySettings) -> party_tables.ColumnRoles:
    """Return what a party's columns are for; keys that are no numbers are for linkage alone.

    Columns that its settings exclude are not read at all.
    """
    numeric, column = key_spec(config).are_numbers, _split_column(config, party)
    return party_tables.ColumnRoles(
        key=party.key if numeric else (),
        task=config.federation.task,
        label=party.label,
        positive=party.positive,
        # Which class is rarer is a fact of the labels, which their epsilon does not cover.
        rarer_is_positive=config.label_epsilon is None,
        truth=config.linkage.truth,
        keys_are_inputs=config.source["model"].get("keys_as_features") is True,
        exclude=(*_text_key(config, party), *(() if column is None else (column,))),
        text_key=_text_key(config, party),
        random_split=column is None,
    )


def _text_key(config: FederationConfig, party: PartySettings) -> tuple[str, ...]:
    """Return a party's key columns where keys are compared as texts, for linkage alone."""
    return () if key_spec(config).are_numbers else tuple(party.key)


def schema_of(model: SavedModel) -> TableSchema:
    """Return how a model's table is read.

    Raises:
        ConfigError: If it was trained on a table that Python made of numbers.
        DataError: If it is damaged.
    """
    if model.schema is None:
        raise ConfigError(
            f"model of {model.party!r}: was trained on a table without columns of its own (a "
            f"PartyTable made in Python); give new rows as such a table too"
        )
    return TableSchema.from_json(model.schema, where=f"model of {model.party!r}: schema")


def _text_keys(config: FederationConfig, party: PartySettings) -> list[str]:
    """Return a party's key columns that are compared as texts."""
    kinds = zip(party.key, key_spec(config).kinds.values(), strict=True)
    return [column for column, kind in kinds if kind == "text"]


def _wanted_columns(
    config: FederationConfig,
    party: PartySettings,
    roles: party_tables.ColumnRoles,
    settings: ColumnSettings,
) -> Wanted:
    column, texts = _split_column(config, party), _text_keys(config, party)
    read = set() if column is None else {column}
    return party_tables.columns_of_roles(
        roles,
        settings,
        exclude=[excluded for excluded in party.exclude if excluded not in read],
        keys=tuple(dict.fromkeys((*party.key, *read))),
        texts=[*texts, *(read if _split_kind(config) == "group" else ())],
    )


def _wanted_again(
    config: FederationConfig,
    party: PartySettings,
    schema: TableSchema,
    *,
    truth: str | None = None,
    names: Sequence[str] = (),
) -> Wanted:
    """Return the columns to read of rows that the schema of a model encodes.

    Args:
        config: The federation file.
        party: Whose rows they are.
        schema: Of its model.
        truth: The column of true links, where it is read too.
        names: The column that names rows, if there is one.
    """
    wanted = party_tables.columns_of_schema(schema, truth=truth)
    more = [*(() if key_spec(config).are_numbers else party.key), *names]
    return replace(
        wanted,
        columns=list(dict.fromkeys([*(wanted.columns or ()), *more])),
        needed=[*wanted.needed, *more],
        as_text=[*_text_keys(config, party), *names],
        # An id of many digits would lose some as a feature's float32.
        exact=[*(wanted.exact or ()), *more],
    )


def _split_column(config: FederationConfig, party: PartySettings) -> str | None:
    return config.training.split_column if party.role == "primary" else None


def _split_kind(config: FederationConfig) -> Literal["group", "time"]:
    return "group" if config.training.split == "group" else "time"


def column_settings(config: FederationConfig, party: PartySettings) -> ColumnSettings:
    """Return what a party declares of its columns."""
    return ColumnSettings(
        categories=party.categories,
        bounds=party.bounds,
        missing=party.missing,
        missing_columns=party.missing_columns,
        empty_labels=config.training.empty_labels == "unlabelled",
        max_categories=party.max_categories,
        own_statistics=party.role == "primary" or not config.features_are_declared,
    )


def read_tables(
    config: FederationConfig, data_root: Path, observe: Observer = unheard
) -> dict[str, PartyTable]:
    """Read every party's table, as only a simulation may; see :func:`read_party`.

    Raises:
        ConfigError: If two parties have one table.
        DataError: As :func:`securevfl.data.party_tables.read_table`.
    """
    require_own_files(config, data_root)
    return {
        party.name: read_party(config, party, data_root, observe) for party in config.table_parties
    }


def table_warnings(config: FederationConfig, party: PartySettings, table: PartyTable) -> list[str]:
    """Return warnings about a party's own table, one sentence each.

    What a record is, the unit says: a linked row is a row of the primary, anything else is held by
    secondaries.
    """
    holder = "primary" if config.privacy.unit == "linked-row" else "secondary"
    text = config.privacy.delta_warning(table.num_rows) if party.role == holder else None
    warnings = [f"{party.name}: {text}" for text in (*([text] if text else []), *table.notes)]
    ids = [] if table.schema is None else [key.name for key in table.schema.keys if key.is_id]
    if ids and config.family.reads_keys(config.model, frozen=not config.regime.learns):
        warnings.append(
            f"{party.name}: key {ids[0]!r} numbers rows (whole numbers, no two equal), and family "
            f"{config.family.name!r} reads keys as places; for ids take another family, or "
            f'linkage.metric = "exact" with model.keys_as_features = false'
        )
    return warnings


# New rows of the primary, read as the rows were that its model was trained on.


def read_new_rows(
    config: FederationConfig,
    model: SavedModel,
    path: Path,
    *,
    id_column: str | None,
    notice: Callable[[str], None] = ignore_note,
) -> NamedRows:
    """Read a file of new rows.

    Args:
        config: The federation file.
        model: The primary's.
        path: The file; its columns may come in any order and among others.
        id_column: The column that names rows; None numbers them from 1 on.
        notice: Called with what was recognised in the file that its user might read differently.

    Raises:
        ConfigError: If the model has no schema.
        DataError: If the file cannot be read, or its columns are not those of training.
    """
    where, party = f"table {path}", config.primary
    names = [] if id_column is None else [id_column]
    frame = read_frame(
        path,
        where=where,
        reading=party.reading,
        wanted=_wanted_again(config, party, schema_of(model), names=names),
        notice=notice,
    )
    return rows_of_frame(config, model, frame, id_column=id_column, where=where)


def rows_of_frame(
    config: FederationConfig,
    model: SavedModel,
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
    if id_column is not None:
        require_free_name(id_column, model.primary_part.classes)
    if id_column is not None and id_column not in frame.columns:
        raise DataError(f"{where}: has no column {id_column!r}, which is to name the rows")
    linkable = np.ones(len(frame), dtype=np.bool_)
    if keys.are_numbers and set(party.key) <= set(frame.columns):
        linkable = frame[list(party.key)].notna().all(axis=1).to_numpy(copy=True)
        stand_ins = {column: _first_there(frame[column]) for column in party.key}
        frame = frame.fillna(stand_ins)
    elif set(party.key) <= set(frame.columns):
        linkable = frame[list(party.key)].notna().any(axis=1).to_numpy(copy=True)
    table = party_tables.new_rows(
        frame,
        schema_of(model),
        name=party.name,
        where=where,
        text_key=[key for key in _text_key(config, party) if key in frame.columns],
        scaler=model.feature_scaler,
    )
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


def rows_of_table(model: SavedModel, table: PartyTable) -> NamedRows:
    """Take new rows that are a table already.

    Args:
        model: The primary's.
        table: The rows.

    Raises:
        ConfigError: If the model's schema is damaged.
        DataError: If they were encoded in another way than those of training.
    """
    differs = table.classes is not None and table.classes != model.primary_part.classes
    if table.schema is not None and model.schema is not None:
        kept = schema_of(model)
        differs |= (table.schema.columns, table.schema.keys) != (kept.columns, kept.keys)
    if differs:
        raise DataError(
            f"table of {table.name!r}: was encoded by itself, and not as the rows of training "
            f"were; give the frame or the file, or read it by the schema of the table of training"
        )
    return NamedRows.all_of(table)


def _first_there(values: "pd.Series[Any]") -> Any:
    there = values.dropna()
    return 0 if there.empty else there.iloc[0]
