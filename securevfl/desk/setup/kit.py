"""Kit of one party: a folder for its IT, and the exchange of certificates.

``securevfl identity provision`` makes the folder, ``securevfl identity join`` takes in the
certificates that the other parties send, and writes their public keys into the party's copy of the
federation file.
"""

import datetime
import re
import string
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from securevfl.config.reading import parse_federation, read_federation
from securevfl.config.sections import parse_address
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError
from securevfl.desk.setup.before_run import pinned_by, spoken
from securevfl.transport import identity
from securevfl.version import __version__

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
    files.write_text(federation, written, for_others=True)
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
