"""Linking with all parties in one process."""

from collections.abc import Mapping
from dataclasses import dataclass

from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.linking.linked import LinkedPrimary, LinkedSecondary
from securevfl.federation.linking.shown import link_shown, linked_primary, shown_keys


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedParties:
    """What linking leaves at every party."""

    primary: LinkedPrimary
    """The primary's part."""

    secondaries: Mapping[str, LinkedSecondary]
    """Each secondary's part, by name."""


def link_in_process(config: FederationConfig, tables: Mapping[str, PartyTable]) -> LinkedParties:
    """Link all secondaries to the primary.

    Raises:
        DataError: If a table can't be linked.

    Reveals:
        Nothing leaves the process, which holds everybody's table.
    """
    primary = tables[config.primary.name]
    shown = shown_keys(primary)
    return LinkedParties(
        primary=linked_primary(primary, shown),
        secondaries={
            party.name: link_shown(config, tables[party.name], shown)
            for party in config.secondaries
        },
    )
