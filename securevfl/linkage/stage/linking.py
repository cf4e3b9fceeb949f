"""The linking stage: every metric and protection by name, and the entry points of parties."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float32

from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import SimilarityScale
from securevfl.linkage.metrics.metric import ComparedKeys, Metric
from securevfl.linkage.metrics.points import Euclidean, GreatCircle
from securevfl.linkage.metrics.texts import Exact, Levenshtein
from securevfl.linkage.protections.plaintext import Plaintext
from securevfl.linkage.protections.protection import (
    Coordinated,
    DataParty,
    HelperRole,
    LinkageHelper,
    Protection,
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
from securevfl.linkage.stage.messages import LinkedRows
from securevfl.stages.bloom.bloom import Bloom
from securevfl.stages.bloom.hashes import BloomProtection, Hashes
from securevfl.stages.encrypted_linkage.paillier import Paillier
from securevfl.stages.encrypted_linkage.shares import Shares
from securevfl.stages.mixed_keys.mixed import Mixed
from securevfl.stages.psi.psi import Psi
from securevfl.transport.channels import CallerChannels, Channels, PrimaryChannels, SealedChannel
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Euclidean(),
        GreatCircle(),
        Levenshtein(),
        Mixed(),
        Bloom(),
        Exact(),
    )
}
"""Metrics by their value of ``linkage.metric``."""


PROTECTIONS: Final[dict[str, Protection]] = {
    protection.name: protection
    for protection in (
        Plaintext(),
        Psi(),
        BloomProtection(),
        Hashes(),
        Shares(),
        Paillier(),
    )
}
"""Protections by their value of ``linkage.protection``."""


def protection_of(spec: LinkSpec) -> Protection:
    """Return the protection of a linkage."""
    return PROTECTIONS[spec.hiding.protection]


def reveals_of(spec: LinkSpec, role: str) -> list[str]:
    """Return what a party of that role learns from linking, one sentence each."""
    protection, limited = protection_of(spec), spec.choice.max_distance < math.inf
    nearest = not (limited or spec.keys.metric.equal_only)
    learned = protection.learns(spec, role)
    if spec.similarities is not None and role == "primary":
        learned.append(
            "for each of its rows and each secondary, K noised similarities in falling order, "
            "without record numbers"
        )
        if limited:
            learned.append("how many of these K records lie within the largest distance of a link")
    if spec.tells_rows and role == "primary":
        learned.append("for each of its rows and each secondary, whether it has a link")
        if nearest:
            learned.append("whether some row's nearest record there has another key")
    if role == "secondary" and protection.helpers:
        if limited and not spec.keys.metric.equal_only:
            learned.append("how many of these lie within the largest distance of a link")
        elif nearest and spec.tells_rows:
            learned.append("whether some row's nearest record has another key")
    return learned


# Linking between processes, over the star.


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkageInput:
    """What a data party contributes to linking."""

    spec: LinkSpec
    """Settings of the linkage."""

    keys: KeyTable
    """Its own keys."""

    data_root: Path
    """Where it finds the linkage secret."""

    cache: LinkCache
    """Where it keeps links."""

    memory: dict[str, Any] = field(default_factory=dict)
    """See :attr:`DataParty.memory`; one that predicts keeps it for all requests of a session."""

    def with_lines(
        self, lines: Channels, *, rows: int, session: bytes, observe: Observer
    ) -> DataParty:
        """Return the party as its protection takes it.

        Raises:
            ConfigError: If the linkage secret cannot be read.
        """
        hides = protection_of(self.spec)
        return DataParty(
            spec=self.spec,
            keys=self.keys,
            rows=rows,
            lines=lines,
            session=session,
            secret=LinkageSecret.from_file(self.data_root / SECRET_FILE)
            if hides.needs_secret
            else None,
            cache=self.cache,
            memory=self.memory,
            observe=observe,
        )


def link_as_primary(
    place: LinkageInput, transport: PrimaryTransport, observe: Observer
) -> LinkedPrimary:
    """Link all secondaries to the primary, as the file's protection says.

    Raises:
        ConfigError: If the linkage secret cannot be read.
        DataError: If the primary's keys can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.link_as_primary` says.
    """
    spec, hides = place.spec, protection_of(place.spec)
    lines = PrimaryChannels(
        transport, spec.roles.ranks, kinds=hides.kinds, deadline_s=spec.wait.primary_s
    )
    return hides.link_as_primary(
        place.with_lines(
            lines, rows=place.keys.num_rows, session=transport.session, observe=observe
        )
    )


def link_as_secondary(
    place: LinkageInput,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedChannel],
    *,
    rows: int,
    observe: Observer,
) -> LinkedSecondary:
    """Link this party's records to the primary's rows, as the file's protection says.

    Args:
        place: This party's.
        transport: Its connection.
        sealed: Its ends of the session's sealed lines, by name of the other caller.
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
    lines = _caller_lines(place.spec, transport, sealed, between_s=place.spec.wait.secondary_s)
    return protection_of(place.spec).link_as_secondary(
        place.with_lines(lines, rows=rows, session=transport.session, observe=observe)
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
        sealed: Its ends of the session's sealed lines, by name of the other caller.
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
    lines = _caller_lines(spec, transport, sealed, between_s=spec.wait.helper_s)
    helper = LinkageHelper(spec=spec, rows=rows, lines=lines, cache=cache, take=take)
    return protection_of(spec).help_to_link(role, helper)


def _caller_lines(
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


# Linking with all parties in one process: the same links, without cryptography.


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
        linked = self._protection.link_in_process(
            spec, self._keys, own, secret=self._secret, cache=self.cache(own)
        )
        self._similarities.append(linked.similarities)
        if self.spec.tells_rows:
            self._rows.append(LinkedRows(rows=linked.linked_rows(), apart=linked.apart))
        return linked

    def record_coordinator(self, own: KeyTable, take: Take) -> None:
        """Record what the coordinator would receive while a secondary is linked."""
        assert isinstance(self._protection, Coordinated), "there is a coordinator"
        self._protection.record_received(self.spec, self._keys, own, self._secret, take)

    def cache(self, own: KeyTable) -> LinkCache:
        """Return where a secondary's links are kept."""
        folder = None if self._folder is None else self._folder / own.name
        return LinkCache.of_party(self.spec, own.name, folder, data_root=self._data_root)

    def key(self, own: KeyTable) -> str:
        """Return the key of a secondary's links in its cache."""
        return self._protection.key(self.spec, self._keys, own, self._secret)

    def metric(self, own: KeyTable) -> ComparedKeys:
        """Return what is compared under the file's protection."""
        return self._protection.compare(self.spec, self._keys, own, self._secret)
