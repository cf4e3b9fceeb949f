"""Linking between processes, over the star."""

from collections.abc import Sequence

import numpy as np

from securevfl.core.errors import ConfigError
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.handshake import RunFacts
from securevfl.federation.linking.linked import LinkedPrimary, LinkedSecondary
from securevfl.federation.linking.shown import ShownKeys, link_shown, linked_primary, shown_keys
from securevfl.federation.transport import PrimaryTransport, SecondaryTransport
from securevfl.federation.wire import Message, MessageKind


def link_as_primary(
    config: FederationConfig, table: PartyTable, transport: PrimaryTransport, names: Sequence[str]
) -> LinkedPrimary:
    """Show the primary's keys to every secondary, and wait until all have linked.

    Reveals:
        To every secondary: the primary's keys, their mean and deviation.
    """
    shown = shown_keys(table)
    tensors = {"keys": shown.keys, "centre": shown.scaler.centre, "width": shown.scaler.width}
    transport.broadcast(names, Message(kind=MessageKind.LINK_KEYS, tensors=tensors))
    for _ in transport.receive_each(
        names, MessageKind.LINKED, round_number=0, deadline_s=config.runtime.idle_timeout_s
    ):
        pass
    return linked_primary(table, shown)


def link_as_secondary(
    config: FederationConfig, table: PartyTable, facts: RunFacts, transport: SecondaryTransport
) -> LinkedSecondary:
    """Receive the primary's keys and link.

    Raises:
        DataError: If the table can't be linked.
        ConfigError: If the primary's key statistics are impossible.

    Reveals:
        To the primary: that linkage is done.
    """
    message = transport.receive(
        MessageKind.LINK_KEYS, round_number=0, deadline_s=config.runtime.idle_timeout_s
    )
    dimension = table.key_dim
    keys = message.tensor("keys", dtype=np.float64, shape=(facts.rows, dimension))
    centre = message.tensor("centre", dtype=np.float64, shape=(dimension,))
    width = message.tensor("width", dtype=np.float64, shape=(dimension,))
    if not (width > 0).all():
        raise ConfigError("the primary's key statistics are impossible: a width is not above 0")
    shown = ShownKeys(keys=keys, scaler=KeyScaler(centre=centre, width=width))
    linked = link_shown(config, table, shown)
    transport.send(Message(kind=MessageKind.LINKED))
    return linked
