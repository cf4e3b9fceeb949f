"""Every party's table, as its run reads it."""

from dataclasses import replace
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec
from securevfl.config.parties import PartySettings
from securevfl.data.reading import read_table
from securevfl.data.tables import PartyTable
from securevfl.linking.keys import read_keys


def read_party(config: FederationConfig, party: PartySettings, data_root: Path) -> PartyTable:
    """Read a party's own table.

    Raises:
        DataError: As :func:`securevfl.data.reading.read_table`.
    """
    keys, path = key_spec(config), data_root / party.data
    numeric = keys.are_numbers
    table = read_table(
        path,
        name=party.name,
        key=party.key if numeric else (),
        label=party.label,
        exclude=party.exclude if numeric else (*party.exclude, *party.key),
        truth=config.linkage.truth,
        categories=party.categories,
        task=config.federation.task,
        empty_labels=config.training.empty_labels == "unlabelled",
    )
    if numeric:
        return table
    columns = read_keys(keys, path, name=party.name, columns=party.key, truth=config.linkage.truth)
    return replace(table, link_columns=columns)


def read_tables(config: FederationConfig, data_root: Path) -> dict[str, PartyTable]:
    """Read every party's table, as only a simulation may.

    Raises:
        DataError: As :func:`securevfl.data.reading.read_table`.
    """
    return {party.name: read_party(config, party, data_root) for party in config.table_parties}
