"""Linking between processes, over the star."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.handshake import RunFacts
from securevfl.federation.linking.cache import LinkCache
from securevfl.federation.linking.columns import pack_columns, unpack_columns
from securevfl.federation.linking.in_process import stacked
from securevfl.federation.linking.keys import keys_of
from securevfl.federation.linking.link_secondary import wants_similarities
from securevfl.federation.linking.linked import LinkedPrimary, LinkedSecondary
from securevfl.federation.linking.rules import keys_are_numbers
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
    if config.linkage.protection != "none":
        raise ConfigError(
            f"linkage.protection: {config.linkage.protection!r} is not available between "
            f"processes yet; use securevfl simulate or securevfl link"
        )
    shown = shown_keys(config, keys_of(config, table))
    tensors = pack_columns(config, shown.keys)
    if shown.scaler is not None:
        tensors |= {"centre": shown.scaler.centre, "width": shown.scaler.width}
    transport.broadcast(names, Message(kind=MessageKind.LINK_KEYS, tensors=tensors))
    parts: dict[str, Float32[np.ndarray, "rows links"] | None] = {}
    for message in transport.receive_each(
        names, MessageKind.LINKED, round_number=0, deadline_s=config.runtime.idle_timeout_s
    ):
        parts[message.sender] = read_similarities(config, message, rows=table.num_rows)
    return LinkedPrimary(
        keys=linked_primary(shown).keys, similarities=stacked([parts[name] for name in names])
    )


def link_as_secondary(
    config: FederationConfig,
    table: PartyTable,
    facts: RunFacts,
    transport: SecondaryTransport,
    cache: LinkCache,
) -> LinkedSecondary:
    """Receive the primary's keys and link.

    Raises:
        DataError: If the table can't be linked.
        ConfigError: If the primary's key statistics are impossible, or tau cannot be had.

    Reveals:
        To the primary: that linkage is done and, if the family reads them, noised similarities.
    """
    message = transport.receive(
        MessageKind.LINK_KEYS, round_number=0, deadline_s=config.runtime.idle_timeout_s
    )
    shown = ShownKeys(
        keys=unpack_columns(config, message, rows=facts.rows),
        scaler=_read_scaler(message, table.key_dim) if keys_are_numbers(config) else None,
    )
    linked = link_shown(config, keys_of(config, table), shown, cache)
    values = linked.similarities
    transport.send(
        Message(kind=MessageKind.LINKED, tensors={} if values is None else {"similarities": values})
    )
    return linked


def read_similarities(
    config: FederationConfig, message: Message, *, rows: int
) -> Float32[np.ndarray, "rows links"] | None:
    """Return the similarities that a message brings, if the family reads any.

    Raises:
        ProtocolError: If they are not what was agreed on.
    """
    if not wants_similarities(config):
        return None
    values = message.tensor(
        "similarities",
        dtype=np.float32,
        shape=(rows, config.model.neighbours),
        finite=False,
    )
    if np.isinf(values).any():
        raise ProtocolError(f"{message.sender}: sent a similarity that is infinite")
    return values


def _read_scaler(message: Message, dimension: int) -> KeyScaler:
    centre = message.tensor("centre", dtype=np.float64, shape=(dimension,))
    width = message.tensor("width", dtype=np.float64, shape=(dimension,))
    if not (width > 0).all():
        raise ConfigError("the primary's key statistics are impossible: a width is not above 0")
    return KeyScaler(centre=centre, width=width)
