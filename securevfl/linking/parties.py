"""Linking between processes, over the star: each party's part, as the protection says."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary, LinkedSecondary
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.kept_links import LinkCache
from securevfl.linking.keys import read_secret
from securevfl.linking.lines import CallerLines, Lines, PrimaryLines
from securevfl.linking.protections.protection import DataParty, Helper, HelperRole
from securevfl.linking.protections.table import protection_of
from securevfl.transport.sealed import SealedLine
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

    def with_lines(
        self, lines: Lines, *, rows: int, session: bytes, observe: Observer
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
            secret=read_secret(self.spec, self.data_root) if hides.needs_secret else None,
            cache=self.cache,
            observe=observe,
        )


def link_as_primary(
    place: OwnPlace, transport: PrimaryTransport, observe: Observer
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
    lines = PrimaryLines(
        transport, spec.roles.ranks, kinds=hides.kinds, deadline_s=spec.idle_timeout_s
    )
    return hides.link_as_primary(
        place.with_lines(
            lines, rows=place.keys.num_rows, session=transport.session, observe=observe
        )
    )


def link_as_secondary(
    place: OwnPlace,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedLine],
    *,
    rows: int,
    observe: Observer,
) -> LinkedSecondary:
    """Link this party's records to the primary's rows, as the file's protection says.

    Args:
        place: This party's.
        transport: Its connection.
        sealed: Its ends of the session's sealed lines, by name of the other caller.
        rows: How many rows the primary has.
        observe: Hears of progress.

    Raises:
        ConfigError: If the secret cannot be read, key statistics are impossible, or tau cannot be
            had.
        DataError: If the table can't be linked.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.link_as_secondary` says.
    """
    lines = _caller_lines(place.spec, transport, sealed)
    return protection_of(place.spec).link_as_secondary(
        place.with_lines(lines, rows=rows, session=transport.session, observe=observe)
    )


def help_to_link(
    spec: LinkSpec,
    role: HelperRole,
    transport: SecondaryTransport,
    sealed: Mapping[str, SealedLine],
    *,
    rows: int,
    cache: LinkCache,
) -> Mapping[str, Any]:
    """Take a helper's part, and return what its log says.

    Args:
        spec: What linking needs.
        role: Which part.
        transport: Its connection.
        sealed: Its ends of the session's sealed lines, by name of the other caller.
        rows: How many rows the primary has.
        cache: Where a coordinator keeps links and their noise.

    Raises:
        ConfigError: If two parties' linkage secrets differ.
        DataError: If what the parties sent does not belong together.
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        What the protection's :meth:`Protection.help_to_link` says.
    """
    lines = _caller_lines(spec, transport, sealed)
    helper = Helper(spec=spec, rows=rows, lines=lines, cache=cache)
    return protection_of(spec).help_to_link(role, helper)


def _caller_lines(
    spec: LinkSpec, transport: SecondaryTransport, sealed: Mapping[str, SealedLine]
) -> CallerLines:
    kinds = protection_of(spec).kinds
    return CallerLines(
        transport, spec.roles.ranks, sealed, kinds=kinds, deadline_s=spec.idle_timeout_s
    )
