"""Kit of one party: a folder for its IT, the exchange of certificates, and checks with its peers.

``securevfl identity provision`` makes the folder, ``securevfl identity join`` takes in the
certificates that the other parties send, and writes their public keys into the party's copy of the
federation file.

``securevfl check FED.toml --name NAME --identity DIR --peers`` runs at all parties at the same
time: the primary listens at its port and the others call it, as in a run. Each sends the other its
version, its clock, the hash of its federation file, and the form of its keys.
"""

import base64
import datetime
import json
import re
import shutil
import string
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import ClassVar, Final

from securevfl.config.federation import FederationConfig, key_spec
from securevfl.config.reading import parse_federation, read_federation
from securevfl.config.sections import parse_address
from securevfl.core import checks, errors, files
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.desk.setup.spelling import KeyForm, compare_forms, forms_of_party, made_up_text
from securevfl.federation.session.handshake import transport_limits
from securevfl.transport import identity
from securevfl.transport.connection import check_pins
from securevfl.transport.identity import Identity, expiring
from securevfl.transport.message import DeclaredMessage, Message, MessageKind
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session
from securevfl.version import __version__

LEAST_FREE_BYTES: Final = 2**30
"""Least free bytes for a run folder with checkpoints and ledgers."""

CLOCK_TOLERANCE_S: Final = 60.0
"""Largest difference of two clocks in seconds; certificates have a first and a last minute."""

_ANSWER_S: Final = 10.0
_LONGEST_WORD: Final = 80
_LONGEST_FORMS: Final = 10_000
_GROUP: Final = 5
_SPOKEN: Final = 30


class CheckKind(MessageKind):
    """Kind of the messages before a run."""

    PEER_FACTS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerFacts(DeclaredMessage):
    """Before a run: a party's version, its clock, its file's digest, and the form of its keys."""

    KIND: ClassVar = CheckKind.PEER_FACTS
    WAY: ClassVar = "primary and caller, to each other"
    COVERS: ClassVar = {"no record": "version digest clock_s lengths", "linkage": "forms"}

    version: str
    digest: str
    clock_s: float
    """Seconds since 1970."""
    forms: str = "[]"
    """Form of each key column as JSON, of :class:`securevfl.desk.setup.spelling.KeyForm`."""


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
    data_root: Path | None = None,
) -> Iterator[PeerFinding]:
    """Check this party and, if it is ready, its peers.

    Args:
        config: The federation file.
        name: The party.
        folder: Its identity.
        runs: Where its run folders will be.
        wait_s: Seconds within which the others must connect.
        listen: Address at which the primary listens; None: that in the file.
        data_root: Where the party's table lies; None: here.
    """
    config.party(name)
    fine = True
    for result in look_here(config, name, folder, runs=runs):
        fine &= not result.exit_code
        yield result
    if fine:
        own, forms = Identity.load(folder, name), list[KeyForm | None]()
        try:
            forms = forms_of_party(config, name, data_root or Path())
        except errors.DataError as error:
            text = f"how parties write their keys is not compared: {error}"
            yield PeerFinding(what="keys", text=text, warns=True)
        yield from look_at_peers(config, own, forms, wait_s=wait_s, listen=listen)


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
    config: FederationConfig,
    identity: Identity,
    forms: Sequence[KeyForm | None],
    *,
    wait_s: float,
    listen: str | None = None,
) -> Iterator[PeerFinding]:
    """Connect to every peer as in a run, and compare version, file, clock and form of keys.

    Args:
        config: The federation file, with the peers' public keys.
        identity: This party's own.
        forms: The forms of its key columns; empty if they are not known.
        wait_s: Seconds within which the others must connect.
        listen: Address at which the primary listens; None: that in the file.

    Reveals:
        To every peer: this party's version, its clock, the federation file's digest, and the forms.
    """
    own = own_facts(config, forms)
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
                yield from _as_primary(star, config, own, wait_s)
        else:
            with SecondaryTransport(
                place, identity, pinned, config.ranks, limits=limits, purpose="securevfl-check"
            ) as star:
                star.connect(wait_s)
                star.send(replace(own, clock_s=time.time()).to_message())
                # The primary may wait as long for each of those that called before.
                answer_s = _ANSWER_S * (1 + len(config.callers))
                answer = star.receive(CheckKind.PEER_FACTS, round_number=None, deadline_s=answer_s)
                yield from compare_peer(config, own, answer)
    except errors.ConfigError as error:
        yield PeerFinding(what="port", text=str(error), exit_code=2)
    except errors.ProtocolError as error:
        yield PeerFinding(what=error.party or primary, text=str(error), exit_code=3)


def own_facts(config: FederationConfig, forms: Sequence[KeyForm | None]) -> PeerFacts:
    """Return what this party sends: its version, clock, file's digest and key forms."""
    return PeerFacts(
        version=__version__,
        digest=config.digest,
        clock_s=time.time(),
        forms=json.dumps([None if form is None else asdict(form) for form in forms]),
    )


def _as_primary(
    star: PrimaryTransport, config: FederationConfig, own: PeerFacts, wait_s: float
) -> Iterator[PeerFinding]:
    met: dict[str, Message] = {}

    def meet(name: str) -> None:
        star.send(name, replace(own, clock_s=time.time()).to_message())
        met[name] = star.receive(
            name, CheckKind.PEER_FACTS, round_number=None, deadline_s=_ANSWER_S
        )

    star.listen()
    # A little longer than those who come are given, so that what came is told in any case.
    star.wait_for_parties(wait_s + _ANSWER_S, meet, lambda waited_s: waited_s >= wait_s)
    for name in star.secondaries:
        if name in met:
            yield from compare_peer(config, own, met[name])
        else:
            refused = "; ".join(star.refusals)
            more = f"; turned away meanwhile: {refused}" if refused else ""
            text = f"{name}: did not call within {wait_s:g} s{more}"
            yield PeerFinding(what=name, text=text, exit_code=3)


def compare_peer(
    config: FederationConfig, own: PeerFacts, message: Message
) -> Iterator[PeerFinding]:
    """Compare a peer's version, file, clock and form of keys with this party's.

    Args:
        config: This party's federation file.
        own: What this party sends.
        message: The peer's :class:`PeerFacts`.

    Raises:
        ProtocolError: If the peer's forms are none.
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
        mine, primary = _read_forms(own.forms), config.primary.name
        forms = {"this party": mine, name: _read_forms(theirs.forms, of=name)}
        if name == primary:
            forms = dict(reversed(forms.items()))
        said, few = compare_forms(key_spec(config), forms)
        if said is not None:
            yield PeerFinding(what=name, text=f"{name}: {said}", warns=few)


def _read_forms(text: str, *, of: str = "") -> list[KeyForm | None]:
    """Return the forms that a party sent; all texts are made up again, and so printable."""
    try:
        listed = json.loads(text) if len(text) <= _LONGEST_FORMS else None
        if not isinstance(listed, list):
            raise ValueError
        forms = [None if one is None else read_settings(KeyForm, one, where=of) for one in listed]
    except (ValueError, RecursionError, TypeError, ConfigError):
        raise errors.ProtocolError(f"{of}: sent forms of keys that are none") from None
    return [
        form and replace(form, texts=tuple(made_up_text(text) for text in form.texts))
        for form in forms
    ]


FEDERATION: Final = "federation.toml"
"""Name of the shared federation file in a kit."""

IDENTITY: Final = "identity"
"""Name of the folder with the party's key and certificates."""

_TEMPLATES: Final = {
    "README.md": "kit-readme.md",
    "compose.yaml": "kit-compose.yaml",
    "securevfl-{name}.service": "kit.service",
}


def provision(federation: Path, name: str, out: Path, *, days: int, renew: bool = False) -> str:
    """Write a party's kit: key, certificate, the shared file, and files to start it with.

    Args:
        federation: The federation file.
        name: The party.
        out: The folder.
        days: How long the certificate is valid.
        renew: Whether a new key replaces the old one, which is kept in another folder.

    Returns:
        The new public key, as federation files have it.

    Raises:
        ConfigError: If the folder has a key and it should not be renewed, or cannot be written.
    """
    config = read_federation(federation)
    party = config.party(name)
    checks.at_least(1, days=days)
    files.require_writable_folder(out, what="folder")
    folder = out / IDENTITY
    if renew:
        today = datetime.datetime.now(datetime.UTC)
        try:
            folder.rename(out / f"{IDENTITY}-until-{today:%Y-%m-%d-%H%M%S}")
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be renewed ({error.strerror})") from None
    host, port = parse_address(config.address)
    listens = party.name == config.primary.name
    own = identity.own_identity(name, folder, valid_days=days, hosts=[host] if listens else [])
    if not (out / FEDERATION).exists():
        text = files.read_text(federation, most=files.MOST_OF_SETTINGS)
        files.write_text(out / FEDERATION, text, for_others=True)
    network = (
        f"Let TCP connections from the other parties in, at port {port} of {host}."
        if listens
        else f"Let TCP connections out, to port {port} of {host}; none come in."
    )
    words = {
        "name": name,
        "federation": config.federation.name,
        "network": network,
        "until": f"{own.certificate.not_valid_after_utc:%d %B %Y}",
        "version": __version__,
        # In a unit file, "%" and "\\" have a meaning.
        "python": sys.executable.replace("\\", "\\\\").replace("%", "%%"),
        "ports": f'ports: ["{port}:{port}"]' if listens else "# no port: this party only calls",
        "listen": f" --listen 0.0.0.0:{port}" if listens else "",
    }
    for file, template in _TEMPLATES.items():
        source = (resources.files("securevfl.desk.setup") / template).read_text(encoding="utf-8")
        text = string.Template(source).substitute(words)
        files.write_text(out / file.format(name=name), text, for_others=True)
    return own.public_text


def unreachable_primary(federation: Path) -> str | None:
    """Return a warning if the other machines cannot reach the primary's address; else None."""
    host = parse_address(read_federation(federation).address)[0]
    if host not in ("localhost", "::1", "::", "0.0.0.0") and not host.startswith("127."):  # noqa: S104
        return None
    return (
        f"{federation}: the primary's address is {host}, which every machine takes for itself or "
        f"for none; write the primary's own name there, in every party's file"
    )


@dataclass(frozen=True, kw_only=True)
class JoinedKit:
    """Federation file of a kit after certificates were added."""

    identities: Mapping[str, str]
    """Public keys by party."""
    missing: tuple[str, ...]
    """Parties whose certificate is still missing."""
    code: str
    """Code of the file, which parties compare by reading it out."""


def join(
    federation: Path,
    name: str,
    folder: Path,
    certificates: Iterable[Path],
    *,
    replace: bool = False,
) -> JoinedKit:
    """Trust other parties' certificates, and pin them in the federation file.

    Args:
        federation: This party's copy of the file, which is rewritten.
        name: The party.
        folder: Its identity.
        certificates: The ``identity.pem`` of each other party, under any name.
        replace: Whether a party's new certificate takes the place of its old one.

    Raises:
        ConfigError: If a file is no certificate of a party, another one is trusted or pinned
            already, or the federation file is not written in a way that lines can be added to.
    """
    config = read_federation(federation)
    own = identity.Identity.load(folder, name)
    public_texts, sent = {name: own.public_text}, {}
    for path in certificates:
        certificate = identity.read_certificate(path)
        sender = config.party(identity.common_name(certificate)).name
        if sender != name:
            public_texts[sender], sent[sender] = identity.public_text(certificate), path
    pinned = pinned_by(config)
    for sender, text in public_texts.items():
        if pinned.get(sender, text) != text and not replace:
            raise ConfigError(
                f"{federation}: pins another identity of {sender!r}; add --replace if that party "
                f"says that it has a new one"
            )
    written = with_identities(
        files.read_text(federation, most=files.MOST_OF_SETTINGS), public_texts, file=str(federation)
    )
    try:
        after = parse_federation(tomllib.loads(written), file=str(federation))
    except tomllib.TOMLDecodeError:
        raise _by_hand(str(federation), public_texts) from None
    # Nothing is trusted before all that can be refused has been looked at.
    for sender, path in sent.items():
        identity.trust(folder, sender, path, replace=replace)
    files.write_output(federation, written)
    identities = pinned_by(after)
    missing = tuple(party.name for party in after.parties if party.name not in identities)
    return JoinedKit(identities=identities, missing=missing, code=spoken(after.digest))


def with_identities(text: str, identities: Mapping[str, str], *, file: str) -> str:
    """Return a federation file's text with public keys in its parties' tables.

    Comments and everything else stay as they are.

    Args:
        text: The file's text.
        identities: Public keys by party.
        file: Name of the file in messages.

    Raises:
        ConfigError: If a party has no table of its own in it, such as ``party = [{...}]``.
    """
    heads, rest = re.split(r"(?m)^(?=[ \t]*\[)", text), dict(identities)
    for number, block in enumerate(heads):
        if not re.match(r"[ \t]*\[\[[ \t]*party[ \t]*\]\]", block):
            continue
        # A list that begins a line also ends a block; its party's name stands before it.
        named = re.search(r"(?m)^[ \t]*name[ \t]*=.*$", block)
        if named and (name := tomllib.loads(named[0])["name"]) in rest:
            line = f'identity = "{rest.pop(name)}"'
            kept, replaced = re.subn(r"(?m)^[ \t]*identity[ \t]*=.*$", line, block, count=1)
            end = named.end()
            heads[number] = kept if replaced else f"{block[:end]}\n{line}{block[end:]}"
    if rest:
        raise _by_hand(file, rest)
    return "".join(heads)


def _by_hand(file: str, identities: Mapping[str, str]) -> ConfigError:
    lines = ", ".join(f'{name}: identity = "{key}"' for name, key in identities.items())
    return ConfigError(f"{file}: write these lines into it by hand: {lines}")
