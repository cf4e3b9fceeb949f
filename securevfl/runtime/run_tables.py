"""Every party's table, as its run reads it."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec
from securevfl.config.parties import PartySettings
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.data.column_settings import ColumnSettings
from securevfl.data.party_tables import (
    ColumnRoles,
    columns_of_roles,
    columns_of_schema,
    fit_party_table,
    new_rows,
    split_places,
)
from securevfl.data.schema import TableSchema
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import Wanted
from securevfl.data.tables import PartyTable
from securevfl.federation.saved_model import KeptModel
from securevfl.linkage.stage.party_keys import keys_of_frame


def read_party(
    config: FederationConfig,
    party: PartySettings,
    data_root: Path,
    observe: Observer = unheard,
    *,
    model: KeptModel | None = None,
) -> PartyTable:
    """Read a party's own table, once: keys and features.

    Args:
        config: The federation.
        party: The party.
        data_root: Where relative paths start.
        observe: Is warned of what was recognised in a file that its user might see otherwise.
        model: Reads columns as they were for this model; None as the federation file says.

    Raises:
        ConfigError: If the model has no schema.
        DataError: As :func:`securevfl.data.party_tables.read_table`.
    """
    keys, path, truth = key_spec(config), data_root / party.data, config.linkage.truth
    where = f"table {path} of {party.name!r}"
    roles, settings = column_roles(config, party), column_settings(config, party)
    schema = None if model is None else schema_of(model)
    frame = read_frame(
        path,
        where=where,
        reading=party.reading,
        wanted=_wanted(config, party, roles, settings)
        if schema is None
        else _wanted_again(config, party, schema),
        notice=lambda text: observe(Warned(text=text)),
    )
    if schema is None:
        table = fit_party_table(frame, roles, settings, name=party.name, where=where)
        column = _split_column(config, party)
        if column is not None:
            split_by = split_places(frame, column, kind=_split_kind(config), where=where)
            table = replace(table, split_by=split_by)
    else:
        table = new_rows(frame, schema, name=party.name, where=where, truth=truth)
    if keys.are_numbers:
        return table
    columns = keys_of_frame(
        keys, frame, name=party.name, columns=party.key, truth=truth, where=where
    )
    return replace(table, link_columns=columns)


def column_roles(config: FederationConfig, party: PartySettings) -> ColumnRoles:
    """Return what a party's columns are for; keys that are no numbers are for linkage alone.

    Columns that its settings exclude are not read at all.
    """
    numeric, column = key_spec(config).are_numbers, _split_column(config, party)
    return ColumnRoles(
        key=party.key if numeric else (),
        task=config.federation.task,
        label=party.label,
        positive=party.positive,
        truth=config.linkage.truth,
        keys_are_inputs=config.source["model"].get("keys_as_features") is True,
        empty_labels=config.training.empty_labels == "unlabelled",
        exclude=(*(() if numeric else party.key), *(() if column is None else (column,))),
    )


def schema_of(model: KeptModel) -> TableSchema:
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


def text_keys(config: FederationConfig, party: PartySettings) -> list[str]:
    """Return a party's key columns that are compared as texts."""
    kinds = zip(party.key, key_spec(config).kinds.values(), strict=True)
    return [column for column, kind in kinds if kind == "text"]


def _wanted(
    config: FederationConfig, party: PartySettings, roles: ColumnRoles, settings: ColumnSettings
) -> Wanted:
    column, texts = _split_column(config, party), text_keys(config, party)
    if column is None:
        return columns_of_roles(roles, settings, exclude=party.exclude, keys=party.key, texts=texts)
    return columns_of_roles(
        roles,
        settings,
        exclude=party.exclude,
        keys=tuple(dict.fromkeys((*party.key, column))),
        texts=[*texts, *([column] if _split_kind(config) == "group" else [])],
    )


def _wanted_again(config: FederationConfig, party: PartySettings, schema: TableSchema) -> Wanted:
    wanted = columns_of_schema(schema, truth=config.linkage.truth)
    if key_spec(config).are_numbers:
        return wanted
    return replace(
        wanted,
        columns=[*(wanted.columns or ()), *party.key],
        needed=[*wanted.needed, *party.key],
        as_text=text_keys(config, party),
        # An id of many digits would lose some as a feature's float32.
        exact=[*(wanted.exact or ()), *party.key],
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
        max_categories=party.max_categories,
        own_statistics=party.role == "primary" or not config.features_are_declared,
    )


def read_tables(
    config: FederationConfig, data_root: Path, observe: Observer = unheard
) -> dict[str, PartyTable]:
    """Read every party's table, as only a simulation may; see :func:`read_party`.

    Raises:
        DataError: As :func:`securevfl.data.party_tables.read_table`.
    """
    return {
        party.name: read_party(config, party, data_root, observe) for party in config.table_parties
    }
