"""Every party's table, as its run reads it."""

from dataclasses import replace
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.parties import PartySettings
from securevfl.config.rules import keys_are_numbers
from securevfl.data.reading import read_table
from securevfl.data.tables import PartyTable
from securevfl.linking.keys import read_keys


def read_party(config: FederationConfig, party: PartySettings, data_root: Path) -> PartyTable:
    """Read a party's own table.

    Raises:
        DataError: As :func:`securevfl.data.reading.read_table`.
    """
    numeric = keys_are_numbers(config)
    table = read_table(
        data_root / party.data,
        name=party.name,
        key=party.key if numeric else (),
        label=party.label,
        exclude=party.exclude if numeric else (*party.exclude, *party.key),
        truth=config.linkage.truth,
        categories=party.categories,
        task=config.federation.task,
        empty_labels=config.training.empty_labels == "unlabelled",
    )
    return table if numeric else replace(table, link_columns=read_keys(config, party, data_root))


def read_tables(config: FederationConfig, data_root: Path) -> dict[str, PartyTable]:
    """Read every party's table, as only a simulation may.

    Raises:
        DataError: As :func:`securevfl.data.reading.read_table`.
    """
    return {party.name: read_party(config, party, data_root) for party in config.table_parties}
