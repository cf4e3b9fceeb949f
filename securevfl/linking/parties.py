"""Linking between processes, over the star."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.in_process import stacked
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.key_messages import pack_columns, unpack_columns
from securevfl.linking.key_metric import linkage_secret
from securevfl.linking.lines import CallerDesk, PrimaryDesk
from securevfl.linking.list_messages import read_similarities
from securevfl.linking.messages import LinkingKind
from securevfl.linking.protected_primary import ProtectedPrimary
from securevfl.linking.protected_secondary import ProtectedSecondary
from securevfl.linking.shown import ShownKeys, link_shown, linked_primary, shown_keys
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport, SecondaryTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnPlace:
    """What a data party brings to linking."""

    spec: LinkSpec
    """What linking needs."""

    keys: KeyTable
    """Its own keys."""

    data_root: Path
    """Where it finds the linkage secret."""

    cache: LinkCache
    """Where it keeps links."""

    def secret(self) -> LinkageSecret | None:
        """Read the linkage secret, if the protection has one.

        Raises:
            ConfigError: If it cannot be read.
        """
        if self.spec.hiding.protection != "bloom":
            return None
        return linkage_secret(self.spec, self.data_root)


def link_as_primary(
    place: OwnPlace, transport: PrimaryTransport, observe: Observer
) -> LinkedPrimary:
    """Link all secondaries to the primary, as the file's protection says.

    Raises:
        ConfigError: If the linkage secret cannot be read.
        DataError: If the primary's keys can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To every secondary, without protection: the primary's keys, their mean and deviation. Under
        one: what :class:`ProtectedPrimary` says.
    """
    spec = place.spec
    deadline_s = spec.idle_timeout_s
    if spec.hiding.protection != "none":
        desk = PrimaryDesk(transport, spec.roles.ranks, deadline_s=deadline_s)
        protected = ProtectedPrimary(spec, place.keys, desk, place.cache, observe)
        return protected.link(place.secret(), transport.session)
    names = spec.roles.secondaries
    shown = shown_keys(spec, place.keys)
    tensors = pack_columns(spec, shown.keys)
    if shown.scaler is not None:
        tensors |= {"centre": shown.scaler.centre, "width": shown.scaler.width}
    transport.broadcast(names, Message(kind=LinkingKind.LINK_KEYS, tensors=tensors))
    parts: dict[str, Float32[np.ndarray, "rows links"] | None] = {}
    for message in transport.receive_each(
        names, LinkingKind.LINKED, round_number=0, deadline_s=deadline_s
    ):
        parts[message.sender] = read_similarities(spec, message, rows=place.keys.num_rows)
    return LinkedPrimary(
        keys=linked_primary(shown).keys, similarities=stacked([parts[name] for name in names])
    )


def link_as_secondary(
    place: OwnPlace,
    transport: SecondaryTransport,
    pair_keys: Mapping[int, bytes],
    *,
    rows: int,
    observe: Observer,
) -> LinkedSecondary:
    """Link this party's records to the primary's rows, as the file's protection says.

    Args:
        place: This party's.
        transport: Its connection.
        pair_keys: Its keys with every other caller, by rank.
        rows: How many rows the primary has.
        observe: Hears of progress.

    Raises:
        ConfigError: If the secret cannot be read, key statistics are impossible, or tau cannot be
            had.
        DataError: If the table can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To the primary, without protection: that linkage is done and, if the family reads them,
        noised similarities. Under one: what :class:`ProtectedSecondary` says.
    """
    spec = place.spec
    deadline_s = spec.idle_timeout_s
    if spec.hiding.protection != "none":
        desk = CallerDesk(transport, spec.roles.ranks, pair_keys, deadline_s=deadline_s)
        protected = ProtectedSecondary(
            spec, place.keys, rows=rows, desk=desk, cache=place.cache, observe=observe
        )
        return protected.link(place.secret(), transport.session)
    message = transport.receive(LinkingKind.LINK_KEYS, round_number=0, deadline_s=deadline_s)
    dimension = len(spec.keys.columns)
    shown = ShownKeys(
        keys=unpack_columns(spec, message, rows=rows),
        scaler=_read_scaler(message, dimension) if spec.keys.are_numbers else None,
    )
    linked = link_shown(spec, place.keys, shown, place.cache)
    values = linked.similarities
    transport.send(
        Message(kind=LinkingKind.LINKED, tensors={} if values is None else {"similarities": values})
    )
    return linked


def _read_scaler(message: Message, dimension: int) -> KeyScaler:
    centre = message.tensor("centre", dtype=np.float64, shape=(dimension,))
    width = message.tensor("width", dtype=np.float64, shape=(dimension,))
    if not (width > 0).all():
        raise ConfigError("the primary's key statistics are impossible: a width is not above 0")
    return KeyScaler(centre=centre, width=width)
