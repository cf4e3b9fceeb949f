"""Entry points of parties to linking: between processes, and with all parties in one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import SimilarityScale
from securevfl.linkage.metrics.metric import ComparedKeys
from securevfl.linkage.protections.protection import (
    BothTables,
    Coordinated,
    DataParty,
    HelperRole,
    LinkageHelper,
    Take,
    linked_primary,
    take_nothing,
)
from securevfl.linkage.spec import (
    SECRET_FILE,
    LinkageSecret,
    LinkedPrimary,
    LinkedSecondary,
    LinkSpec,
)
from securevfl.linkage.stage.link_cache import LinkCache
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.messages import LinkedRows
from securevfl.transport.channels import CallerChannels, Channels, PrimaryChannels, SealedChannel
from securevfl.transport.star import PrimaryTransport, SecondaryTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkageInput:
    """A data party's contribution to linking."""

    spec: LinkSpec
    """Settings of the linkage."""

    keys: KeyTable
    """The party's own keys."""

    data_root: Path
    """Folder of the linkage secret."""

    cache: LinkCache
    """Cache of its links."""

    memory: dict[str, Any] = field(default_factory=dict)
    """State between linkings (:attr:`DataParty.memory`), kept for all requests of a session."""

    def with_channels(
        self, channels: Channels, *, rows: int, session: bytes, observe: Observer
    ) -> DataParty:
        """Return the party as its protection takes it.

        Raises:
            ConfigError: If the linkage secret cannot be read.
        """
        protection = protection_of(self.spec)
        return DataParty(
            spec=self.spec,
            keys=self.keys,
            rows=rows,
            channels=channels,
            session=session,
            secret=LinkageSecret.from_file(self.data_root / SECRET_FILE)
            if protection.needs_secret
            else None,
            cache=self.cache,
            memory=self.memory,
            observe=observe,
        )


def link_as_primary(
    linkage_input: LinkageInput, transport: PrimaryTransport, observe: Observer
) -> LinkedPrimary:
    """Link all secondaries to the primary, as the file's protection says.

    Raises:
        ConfigError: If the linkage secret cannot be read.
        DataError: If the primary's keys can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.link_as_primary` says.
    """
    spec, protection = linkage_input.spec, protection_of(linkage_input.spec)
    channels = PrimaryChannels(
        transport, spec.roles.ranks, kinds=protection.kinds, deadline_s=spec.wait.primary_s
    )
    return protection.link_as_primary(
        linkage_input.with_channels(
            channels, rows=linkage_input.keys.num_rows, session=transport.session, observe=observe
        )
    )


def link_as_secondary(
    linkage_input: LinkageInput,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedChannel],
    *,
    rows: int,
    observe: Observer,
) -> LinkedSecondary:
    """Link this party's records to the primary's rows, as the file's protection says.

    Args:
        linkage_input: This party's.
        transport: Its connection.
        sealed: Ends of the session's sealed channels, by name of the other caller.
        rows: Number of the primary's rows.
        observe: Receives progress events.

    Raises:
        ConfigError: If the secret cannot be read, key statistics are impossible, or tau cannot be
            had.
        DataError: If the table can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.link_as_secondary` says.
    """
    channels = _caller_channels(
        linkage_input.spec, transport, sealed, between_s=linkage_input.spec.wait.secondary_s
    )
    return protection_of(linkage_input.spec).link_as_secondary(
        linkage_input.with_channels(channels, rows=rows, session=transport.session, observe=observe)
    )


def help_to_link(
    spec: LinkSpec,
    role: HelperRole,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedChannel],
    *,
    rows: int,
    cache: LinkCache,
    take: Take = take_nothing,
) -> Mapping[str, Any]:
    """Take a helper's part, and return figures for its log.

    Args:
        spec: Settings of the linkage.
        role: Which part.
        transport: Its connection.
        sealed: Ends of the session's sealed channels, by name of the other caller.
        rows: Number of the primary's rows.
        cache: Where a coordinator keeps links and their noise.
        take: Records what a coordinator receives.

    Raises:
        ConfigError: If two parties' linkage secrets differ.
        DataError: If what the parties sent does not belong together.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.help_to_link` says.
    """
    channels = _caller_channels(spec, transport, sealed, between_s=spec.wait.helper_s)
    helper = LinkageHelper(spec=spec, rows=rows, channels=channels, cache=cache, take=take)
    return protection_of(spec).help_to_link(role, helper)


def _caller_channels(
    spec: LinkSpec,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedChannel],
    *,
    between_s: float,
) -> CallerChannels:
    return CallerChannels(
        transport,
        spec.roles.ranks,
        sealed,
        kinds=protection_of(spec).kinds,
        deadline_s=spec.wait.for_primary_s,
        between_s=between_s,
    )


class Linker:
    """Links one secondary after another to one primary, all in this process.

    Args:
        spec: Settings of the linkage.
        primary: The primary's keys.
        data_root: Where a file with the linkage secret and a folder of kept links may be.
        secret: The linkage secret; None: that of the file, or a fresh one, which does as well,
            since all parties are here.
        folder: The run's folder of parties, where links are kept; None keeps none.

    Raises:
        ConfigError: If the secret cannot be read.
        DataError: If the primary's keys can't be linked.
    """

    def __init__(
        self,
        spec: LinkSpec,
        primary: KeyTable,
        *,
        data_root: Path | None = None,
        secret: LinkageSecret | None = None,
        folder: Path | None = None,
    ) -> None:
        self._protection = protection_of(spec)
        file = None if data_root is None else data_root / SECRET_FILE
        if secret is None and file is not None and self._protection.needs_secret and file.exists():
            secret = LinkageSecret.from_file(file)
        self.spec = spec
        """Settings of the linkage."""
        self._keys = primary
        self._folder, self._data_root = folder, data_root
        self._secret = secret or LinkageSecret.fresh()
        self._similarities: list[Float32[np.ndarray, "rows links"] | None] = []
        self._rows: list[LinkedRows] = []

    @property
    def primary(self) -> LinkedPrimary:
        """The primary's part, once all secondaries are linked."""
        return linked_primary(self.spec, self._keys, self._similarities, self._rows)

    def __call__(
        self, own: KeyTable, *, similarity_scale: SimilarityScale | None = None
    ) -> LinkedSecondary:
        """Link the next secondary.

        Args:
            own: Its keys.
            similarity_scale: That of its kept model; None takes it from the training rows' links.

        Raises:
            DataError: If its table can't be linked.
            ConfigError: If similarities are wanted, and the bound tau cannot be had.

        Reveals:
            Nothing leaves the process, which holds everybody's table.
        """
        spec = replace(self.spec, similarity_scale=similarity_scale)
        linked = self._protection.link_in_process(replace(self._tables(own), spec=spec))
        self._similarities.append(linked.similarities)
        if self.spec.tells_rows:
            self._rows.append(LinkedRows(rows=linked.linked_rows(), apart=linked.apart))
        return linked

    def record_coordinator(self, own: KeyTable, take: Take) -> None:
        """Record what the coordinator would receive while a secondary is linked."""
        assert isinstance(self._protection, Coordinated), "there is a coordinator"
        self._protection.record_received(self._tables(own), take)

    def cache(self, own: KeyTable) -> LinkCache:
        """Return where a secondary's links are kept."""
        folder = None if self._folder is None else self._folder / own.name
        return LinkCache.of_party(self.spec, own.name, folder, data_root=self._data_root)

    def key(self, own: KeyTable) -> str:
        """Return the key of a secondary's links in its cache."""
        return self._protection.key(self._tables(own))

    def metric(self, own: KeyTable) -> ComparedKeys:
        """Return what is compared under the file's protection."""
        return self._protection.compare(self.spec, self._keys, own, self._secret)

    def _tables(self, own: KeyTable) -> BothTables:
        return BothTables(
            spec=self.spec,
            primary=self._keys,
            own=own,
            secret=self._secret,
            cache=self.cache(own),
        )
