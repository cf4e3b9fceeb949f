"""Linkage without protection: the primary shows its keys, and every secondary links by itself."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.linking.linked import LinkedPrimary, LinkedSecondary
from securevfl.federation.linking.sources import link_source


@dataclass(frozen=True, kw_only=True)
class ShownKeys:
    """What the primary shows for linkage when keys are unprotected."""

    keys: Float64[np.ndarray, "rows dimension"]
    """The primary's keys, in their own units."""

    scaler: KeyScaler
    """Common statistics of keys, taken from the primary's, so that one place stays one place."""


def shown_keys(table: PartyTable) -> ShownKeys:
    """Return what the primary shows to every secondary under ``protection = "none"``.

    Reveals:
        Nothing yet; once sent, the primary's keys.
    """
    return ShownKeys(keys=table.keys, scaler=KeyScaler.fit(table.keys))


def linked_primary(table: PartyTable, shown: ShownKeys) -> LinkedPrimary:
    """Return the primary's end of a linkage without protection."""
    return LinkedPrimary(keys=shown.scaler.apply(table.keys))


def link_shown(config: FederationConfig, table: PartyTable, shown: ShownKeys) -> LinkedSecondary:
    """Link a secondary's records to the keys that the primary has shown.

    Raises:
        DataError: If its table can't be linked: keys of another dimension.
    """
    return LinkedSecondary(
        source=link_source(config, table, shown.keys),
        keys=shown.scaler.apply(table.keys),
        primary_rows=len(shown.keys),
    )
