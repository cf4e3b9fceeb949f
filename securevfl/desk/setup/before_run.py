"""Checks of a party before a run: its own files and machine, and its peers.

``securevfl check FED.toml --name NAME --identity DIR --peers`` at all parties at the same time. The
primary listens at its port and the others call it, as in a run. Each sends the other its version,
its clock and the hash of its federation file, and nothing of a table.
"""

import base64
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import parse_address
from securevfl.core import errors
from securevfl.federation.session.handshake import transport_limits
from securevfl.transport.identity import Identity, expiring
from securevfl.transport.message import DeclaredMessage, Message, MessageKind
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session
from securevfl.transport.tls import check_pins
from securevfl.version import __version__

LEAST_FREE_BYTES: Final = 2**30
"""Least free bytes for a run folder with checkpoints and ledgers."""

CLOCK_TOLERANCE_S: Final = 60.0
"""Largest difference of two clocks in seconds; certificates have a first and a last minute."""

_ANSWER_S: Final = 10.0
_LONGEST_WORD: Final = 80
_GROUP: Final = 5
_SPOKEN: Final = 30


class CheckKind(MessageKind):
    """Kind of the messages before a run."""

    PEER_FACTS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFacts(DeclaredMessage):
    """Before a run: this party's version of securevfl, its clock, and its file's digest."""

    KIND: ClassVar = CheckKind.PEER_FACTS
    WAY: ClassVar = "primary and caller, to each other"
    COVERS: ClassVar = {"no record": "version digest clock_s lengths"}

    version: str
    digest: str
    clock_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFinding:
    """Result of one check."""

    what: str
    text: str
    exit_code: int = 0
    """0: it is as it must be; 2: this party can mend it; 3: it lies between two parties."""
    warns: bool = False
    """True if all is well now, but will not be for long."""


def spoken(digest: str) -> str:
    """Return a digest as people read it out: 150 bits in six groups of five characters."""
    text = base64.b32encode(bytes.fromhex(digest)).decode()[:_SPOKEN]
    return "-".join(text[place : place + _GROUP] for place in range(0, _SPOKEN, _GROUP))


def pinned_by(config: FederationConfig) -> dict[str, str]:
    """Return the public keys that a federation file has, by party."""
    return {party.name: party.identity for party in config.parties if party.identity is not None}


def run_peer_checks(
    config: FederationConfig,
    name: str,
    folder: Path,
    *,
    runs: Path,
    wait_s: float,
    listen: str | None = None,
) -> Iterator[PeerFinding]:
    """Check this party and, if it is ready, its peers.

    Args:
        config: The federation file.
        name: The party.
        folder: Its identity.
        runs: Where its run folders will be.
        wait_s: Seconds within which the others must connect.
        listen: Address at which the primary listens; None: that in the file.
    """
    config.party(name)
    fine = True
    for result in look_here(config, name, folder, runs=runs):
        fine &= not result.exit_code
        yield result
    if fine:
        own = Identity.load(folder, name)
        yield from look_at_peers(config, own, wait_s=wait_s, listen=listen)


def look_here(
    config: FederationConfig, name: str, folder: Path, *, runs: Path
) -> Iterator[PeerFinding]:
    """Check the identity, the disk and the file of this party.

    Args:
        config: The federation file.
        name: The party.
        folder: Its identity.
        runs: Where its run folders will be.
    """
    primary = config.primary.name
    others = [party.name for party in config.parties if party.name != name]
    peers = others if name == primary else [primary]
    try:
        identity = Identity.load(folder, name)
        check_pins(identity, pinned_by(config), peers)
    except errors.SecureVflError as error:
        yield PeerFinding(what="identity", text=str(error), exit_code=2)
    else:
        late = expiring(identity, peers)
        for text in late:
            yield PeerFinding(what="identity", text=text, warns=True)
        if not late:
            yield PeerFinding(what="identity", text="the certificates are those that the file pins")
    there = next(
        parent for parent in (runs.absolute(), *runs.absolute().parents) if parent.exists()
    )
    free = shutil.disk_usage(there).free
    text = f"{free / 2**30:.1f} GiB free in {there}"
    if free < LEAST_FREE_BYTES:
        text += f"; make {LEAST_FREE_BYTES / 2**30:g} GiB free"
    yield PeerFinding(what="disk", text=text, exit_code=2 if free < LEAST_FREE_BYTES else 0)
    yield PeerFinding(what="file", text=f"read it out to the others: {spoken(config.digest)}")


def look_at_peers(
    config: FederationConfig, identity: Identity, *, wait_s: float, listen: str | None = None
) -> Iterator[PeerFinding]:
    """Connect to every peer as in a run, and compare version, file and clock.

    Args:
        config: The federation file, with the peers' public keys.
        identity: This party's own.
        wait_s: Seconds within which the others must connect.
        listen: Address at which the primary listens; None: that in the file.

    Reveals:
        To every peer: this party's version, its clock, and the federation file's digest.
    """
    primary, work = config.primary.name, config.waits.work
    work_s = work.primary_s if identity.name == primary else work.for_primary_s
    limits = transport_limits(config, work_s=work_s)
    place = parse_address(listen or config.address)
    pinned = pinned_by(config)
    awaited = (
        ", ".join(party.name for party in config.callers) if identity.name == primary else primary
    )
    text = f"waiting for {awaited}, up to {wait_s:g} s (port {place[1]} of {place[0]})"
    yield PeerFinding(what="wait", text=text)
    try:
        if identity.name == primary:
            with PrimaryTransport(
                place,
                identity,
                pinned,
                new_session(),
                config.ranks,
                limits=limits,
                purpose="securevfl-check",
            ) as star:
                yield from _as_primary(star, config, wait_s)
        else:
            with SecondaryTransport(
                place, identity, pinned, config.ranks, limits=limits, purpose="securevfl-check"
            ) as star:
                star.connect(wait_s)
                star.send(_own_facts(config).to_message())
                # The primary may wait as long for each of those that called before.
                answer_s = _ANSWER_S * (1 + len(config.callers))
                answer = star.receive(CheckKind.PEER_FACTS, round_number=None, deadline_s=answer_s)
                yield from compare_peer(config, answer)
    except errors.ConfigError as error:
        yield PeerFinding(what="port", text=str(error), exit_code=2)
    except errors.ProtocolError as error:
        yield PeerFinding(what=error.party or primary, text=str(error), exit_code=3)


def _as_primary(
    star: PrimaryTransport, config: FederationConfig, wait_s: float
) -> Iterator[PeerFinding]:
    met: dict[str, Message] = {}

    def meet(name: str) -> None:
        star.send(name, _own_facts(config).to_message())
        met[name] = star.receive(
            name, CheckKind.PEER_FACTS, round_number=None, deadline_s=_ANSWER_S
        )

    star.listen()
    # A little longer than those who come are given, so that what came is told in any case.
    star.wait_for_parties(
        wait_s + _ANSWER_S, meet, enough=lambda _joined, waited_s: waited_s >= wait_s
    )
    for name in star.secondaries:
        if name in met:
            yield from compare_peer(config, met[name])
        else:
            refused = "; ".join(star.refusals)
            more = f"; turned away meanwhile: {refused}" if refused else ""
            text = f"{name}: did not call within {wait_s:g} s{more}"
            yield PeerFinding(what=name, text=text, exit_code=3)


def _own_facts(config: FederationConfig) -> PeerFacts:
    return PeerFacts(version=__version__, digest=config.digest, clock_s=time.time())


def compare_peer(config: FederationConfig, message: Message) -> Iterator[PeerFinding]:
    """Compare a peer's version, file and clock with this party's.

    Args:
        config: This party's federation file.
        message: The peer's :class:`PeerFacts`.
    """
    theirs, name = PeerFacts.from_message(message), message.sender
    ahead_s = theirs.clock_s - time.time()
    wrong = []
    if theirs.digest != config.digest:
        wrong.append("has another federation file; give every party the same one")
    if theirs.version != __version__:
        version = errors.printable_text(theirs.version, _LONGEST_WORD)
        wrong.append(f"has securevfl {version}, and this party {__version__}; install the same")
    if not abs(ahead_s) <= CLOCK_TOLERANCE_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        wrong.append(f"has a clock {abs(ahead_s):,.0f} s {way} this one; set both by NTP")
    for text in wrong:
        yield PeerFinding(what=name, text=f"{name}: {text}", exit_code=3)
    if not wrong:
        text = f"{name}: reached; same file, same version, clocks {abs(ahead_s):.0f} s apart"
        yield PeerFinding(what=name, text=text)
