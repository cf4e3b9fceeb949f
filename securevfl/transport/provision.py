"""Making and exchanging identities: all parties at once, or one organisation at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.files import write_bytes
from securevfl.transport.identity import (
    CERTIFICATE_FILE,
    TRUST_FOLDER,
    Identity,
    certificate_pem,
    public_text,
    read_certificate,
)

# A run on one machine makes its own identities and throws them away.
SHORT_LIVED_DAYS: Final = 2.0
DEFAULT_VALID_DAYS: Final = 365.0


def provision(
    names: Sequence[str],
    out: Path,
    *,
    valid_days: float = DEFAULT_VALID_DAYS,
    hosts: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Make every party's identity at one place: for one machine, or for a trusted coordinator.

    Writes ``out/NAME/identity.key``, ``identity.pem`` and ``trust/*.pem`` (everybody's
    certificates) for each name. Whoever runs this sees all private keys; organisations that do
    not trust one another each run :func:`provision_one` and swap certificates.

    Args:
        names: All parties.
        out: Folder that gets one folder a party.
        valid_days: Days until the certificates expire.
        hosts: Host names and addresses by party, for the primary's certificate.

    Returns:
        By name, the text that the federation file pins as ``identity``.

    Raises:
        ConfigError: If a key exists already.
    """
    hosts = hosts or {}
    identities = [
        Identity.create(name, valid_days=valid_days, hosts=hosts.get(name, ())) for name in names
    ]
    certificates = {identity.name: identity.certificate for identity in identities}
    for identity in identities:
        identity.trusting(certificates).save(out / identity.name)
    return {identity.name: identity.public_text for identity in identities}


def fleeting(names: Sequence[str]) -> dict[str, Identity]:
    """Make identities that trust one another and are never written down, for one run here."""
    made = {name: Identity.create(name, valid_days=SHORT_LIVED_DAYS) for name in names}
    certificates = {name: identity.certificate for name, identity in made.items()}
    return {name: identity.trusting(certificates) for name, identity in made.items()}


def provision_one(
    name: str,
    out: Path,
    *,
    valid_days: float = DEFAULT_VALID_DAYS,
    hosts: Sequence[str] = (),
) -> str:
    """Make one organisation's identity in ``out/NAME``; the private key never leaves it.

    The organisation sends ``identity.pem`` to the others and gives theirs to :func:`trust`.

    Returns:
        The text that the federation file pins as ``identity``.
    """
    identity = Identity.create(name, valid_days=valid_days, hosts=hosts)
    identity.trusting({name: identity.certificate}).save(out / name)
    return identity.public_text


def trust(folder: Path, name: str, certificate_file: Path) -> str:
    """Add the certificate that the organisation ``name`` sent to a party's own folder.

    Returns:
        The public text of that certificate, to be compared with the federation file's and, by
        another channel, with what the organisation itself reads out.

    Raises:
        ConfigError: If the file is not that party's certificate, or another one is trusted.
    """
    checks.file_name(name=name)  # it becomes one
    if not (folder / CERTIFICATE_FILE).exists():
        raise ConfigError(f"{folder}: holds no identity; run securevfl provision first")
    certificate = read_certificate(certificate_file, name=name)
    target = folder / TRUST_FOLDER / f"{name}.pem"
    if target.exists() and read_certificate(target, name=name) != certificate:
        raise ConfigError(
            f"{target}: another certificate of {name!r} is trusted already; remove it first"
        )
    write_bytes(target, certificate_pem(certificate), for_others=True)
    return public_text(certificate)
