"""Parties' long-term identities: Ed25519 keys, self-signed certificates, and their exchange."""

import base64
import datetime
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from securevfl.core import checks
from securevfl.core.errors import AuthenticationError, ConfigError
from securevfl.core.files import write_bytes

KEY_FILE: Final = "identity.key"
CERTIFICATE_FILE: Final = "identity.pem"
TRUST_FOLDER: Final = "trust"

# A run on one machine creates identities and throws them away.
SHORT_LIVED_DAYS: Final = 2.0
DEFAULT_VALID_DAYS: Final = 365.0

_PREFIX: Final = "ed25519:"
# The same key also signs TLS handshakes; the tag separates the two kinds of messages.
_SIGNATURE_TAG: Final = b"securevfl signature v1\x00"
# A certificate is valid from an hour before its creation, for parties whose clocks are slow.
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)
# Time before a certificate's end when warnings begin.
_SOON: Final = datetime.timedelta(days=30)
# Mode bits of a file for all but its owner.
_OTHERS: Final = 0o077


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Identity:
    """A party's private key, its certificate, and the certificates that it trusts."""

    name: str
    """The party, as the federation file calls it."""

    certificate: x509.Certificate = field(repr=False)
    """Public: binds :attr:`name` to the key; signed by the key itself."""

    trusted: Mapping[str, x509.Certificate] = field(default_factory=dict, repr=False)
    """Certificates by party name, from the ``trust`` folder; its own may be among them."""

    _key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def create(cls, name: str, *, valid_days: float, hosts: Sequence[str] = ()) -> "Identity":
        """Create a new key and its certificate.

        Args:
            name: The party.
            valid_days: Validity of the certificate from now on, in days, > 0.
            hosts: Host names and addresses for the certificate. Only the key is checked, so a
                secondary, which only dials out, needs none.
        """
        checks.positive(valid_days=valid_days)
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + datetime.timedelta(days=valid_days))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return cls(name=name, certificate=builder.sign(key, None), _key=key)

    @classmethod
    def load(cls, folder: Path, name: str) -> "Identity":
        """Read a party's identity from its folder, or from a file of :meth:`bundle`.

        Raises:
            ConfigError: If a file is missing, unreadable or another party's, or other users may
                read the private key.
        """
        if folder.exists() and not folder.is_dir():
            return cls._unbundle(folder, name)
        key = _parse_key(_read_private(folder / KEY_FILE), folder / KEY_FILE)
        certificate = read_certificate(folder / CERTIFICATE_FILE, name=name)
        if public_text(certificate) != _text_of(key.public_key()):
            raise ConfigError(
                f"{folder}: {CERTIFICATE_FILE} and {KEY_FILE} do not belong together; "
                f"run securevfl identity create again"
            )
        trusted = {
            path.stem: read_certificate(path, name=path.stem)
            for path in sorted((folder / TRUST_FOLDER).glob("*.pem"))
        }
        return cls(name=name, certificate=certificate, trusted=trusted, _key=key)

    @property
    def public_text(self) -> str:
        """The text that the federation file pins: ``ed25519:`` and the public key in base64."""
        return public_text(self.certificate)

    def trusting(self, certificates: Mapping[str, x509.Certificate]) -> "Identity":
        """Return this identity with ``certificates`` as the trusted ones."""
        return replace(self, trusted=dict(certificates))

    def save(self, folder: Path) -> None:
        """Write the key (mode 0600), the certificate and the trusted certificates.

        Raises:
            ConfigError: If the folder already holds a key, which is never overwritten.
        """
        path = folder / KEY_FILE
        if path.exists():
            raise ConfigError(f"{path}: exists already, and a key is never overwritten; move it")
        write_bytes(path, self.key_pem())
        write_bytes(folder / CERTIFICATE_FILE, certificate_pem(self.certificate), for_others=True)
        for name, certificate in self.trusted.items():
            path = folder / TRUST_FOLDER / f"{name}.pem"
            write_bytes(path, certificate_pem(certificate), for_others=True)

    def bundle(self) -> bytes:
        """Return the identity as one PEM text: the key, its certificate and the trusted ones."""
        others = [theirs for name, theirs in self.trusted.items() if name != self.name]
        return self.key_pem() + b"".join(map(certificate_pem, [self.certificate, *others]))

    @classmethod
    def _unbundle(cls, path: Path, name: str) -> "Identity":
        text = _read_private(path)  # once: an inherited descriptor cannot be read twice
        key = _parse_key(text, path)
        try:
            certificates = x509.load_pem_x509_certificates(text)
        except ValueError:
            raise ConfigError(f"{path}: holds no PEM certificates beside its key") from None
        held = {common_name(certificate): certificate for certificate in certificates}
        own = held.get(name)
        if own is None or public_text(own) != _text_of(key.public_key()):
            raise ConfigError(f"{path}: its key and certificate are not those of {name!r}")
        return cls(name=name, certificate=own, trusted=held, _key=key)

    def sign(self, message: bytes) -> bytes:
        """Return this party's signature of ``message``, 64 bytes."""
        return self._key.sign(_SIGNATURE_TAG + message)

    def key_pem(self, *, password: bytes | None = None) -> bytes:
        """Return the private key as PKCS #8 text, encrypted when a ``password`` is given."""
        protection = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection
        )


def public_text(certificate: x509.Certificate) -> str:
    """Return the public key of a certificate as the federation file pins it.

    Raises:
        AuthenticationError: If the certificate holds another kind of key.
    """
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise AuthenticationError("certificate: must hold an Ed25519 key, and holds another kind")
    return _text_of(key)


def verify(identity: str, signature: bytes, message: bytes) -> None:
    """Check that the party pinned as ``identity`` signed ``message`` by :meth:`Identity.sign`.

    Raises:
        AuthenticationError: If the signature is not valid.
        ConfigError: If ``identity`` is not the text of an Ed25519 public key.
    """
    key = Ed25519PublicKey.from_public_bytes(parse_public_text(identity))
    try:
        key.verify(signature, _SIGNATURE_TAG + message)
    except InvalidSignature:
        raise AuthenticationError(f"signature: was not made by {identity}") from None


def parse_public_text(identity: str) -> bytes:
    """Return the 32 bytes of a pinned public key.

    Raises:
        ConfigError: If the text is not ``ed25519:`` and 32 bytes in base64.
    """
    text = identity.removeprefix(_PREFIX)
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    if text == identity or len(raw) != 32:  # an Ed25519 public key has 32 bytes
        raise ConfigError(
            f'identity: must be "{_PREFIX}" and a public key in base64, as securevfl identity '
            f"create prints it; got {identity!r}"
        )
    return raw


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate as PEM text, for sending to other organisations."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_certificate(path: Path, *, name: str | None = None) -> x509.Certificate:
    """Read the certificate of the party ``name``; of any party, if None.

    Raises:
        ConfigError: If the file is missing, no certificate, or another party's.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; securevfl identity create makes identities"
        ) from None
    except ValueError:
        raise ConfigError(f"{path}: is not a PEM certificate") from None
    certificate_name = common_name(certificate)
    if name is not None and certificate_name != name:
        raise ConfigError(f"{path}: is the certificate of {certificate_name!r}, not of {name!r}")
    return certificate


def common_name(certificate: x509.Certificate) -> str:
    """Return the name of the party in a certificate."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def check_validity(
    name: str, certificate: x509.Certificate, *, now: datetime.datetime | None = None
) -> None:
    """Check that a certificate is valid now.

    Raises:
        ConfigError: Naming the party, the limit of validity and possible causes.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise ConfigError(
            f"{name}: its certificate expired at {last:%Y-%m-%d %H:%M} UTC, and this machine's "
            f"clock says {now:%Y-%m-%d %H:%M} UTC; make a new one with securevfl identity "
            f"provision --renew, or set the clock"
        )
    if now < first:
        raise ConfigError(
            f"{name}: its certificate is valid from {first:%Y-%m-%d %H:%M} UTC, and this "
            f"machine's clock says {now:%Y-%m-%d %H:%M} UTC; set the clock"
        )


def expiring(
    identity: Identity, peers: Iterable[str], *, now: datetime.datetime | None = None
) -> list[str]:
    """Return a warning for each certificate, this party's and peers', that expires soon."""
    now = now or datetime.datetime.now(datetime.UTC)
    held = {identity.name: identity.certificate}
    held |= {name: identity.trusted[name] for name in peers if name in identity.trusted}
    return [
        f"{name}: its certificate expires at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
        f"securevfl identity provision --renew makes a new one there"
        for name, certificate in held.items()
        if _days(certificate) > SHORT_LIVED_DAYS and certificate.not_valid_after_utc - now < _SOON
    ]


def _days(certificate: x509.Certificate) -> float:
    lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc - _CLOCK_SKEW
    return lasts / datetime.timedelta(days=1)


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _text_of(key: Ed25519PublicKey) -> str:
    return _PREFIX + base64.b64encode(key.public_bytes_raw()).decode()


def _read_private(path: Path) -> bytes:
    """Read a private file; refuse it if other users may read it."""
    try:
        exposed = os.name == "posix" and path.stat().st_mode & _OTHERS
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; securevfl identity create makes identities"
        ) from None
    if exposed:
        raise ConfigError(f"{path}: other users may read this private key; chmod 600 it")
    return content


def _parse_key(text: bytes, path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(text, password=None)
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: is not an unencrypted PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: must hold an Ed25519 key, and holds another kind")
    return key


def provision(
    names: Sequence[str],
    out: Path,
    *,
    valid_days: float = DEFAULT_VALID_DAYS,
    hosts: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Create all parties' identities at one place: for one machine, or by a trusted coordinator.

    Writes ``out/NAME/identity.key``, ``identity.pem`` and ``trust/*.pem`` (all parties'
    certificates) for each name. The caller sees all private keys; organisations that do not trust
    one another each run :func:`own_identity` and exchange certificates.

    Args:
        names: All parties.
        out: Folder for a folder of each party.
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
    """Create identities in memory that trust one another, for one run on this machine."""
    made = {name: Identity.create(name, valid_days=SHORT_LIVED_DAYS) for name in names}
    certificates = {name: identity.certificate for name, identity in made.items()}
    return {name: identity.trusting(certificates) for name, identity in made.items()}


def own_identity(
    name: str,
    folder: Path,
    *,
    valid_days: float = DEFAULT_VALID_DAYS,
    hosts: Sequence[str] = (),
) -> Identity:
    """Create one organisation's identity in ``folder``, which the private key never leaves.

    The organisation sends ``identity.pem`` to the others and gives theirs to :func:`trust`.

    Raises:
        ConfigError: If a key exists already.
    """
    identity = Identity.create(name, valid_days=valid_days, hosts=hosts)
    identity.trusting({name: identity.certificate}).save(folder)
    return identity


def trust(folder: Path, name: str, certificate_file: Path, *, replace: bool = False) -> str:
    """Add the certificate that the organisation ``name`` has sent to a party's folder.

    Args:
        folder: The party's own.
        name: The organisation.
        certificate_file: The file that it sent.
        replace: Whether to replace another certificate of that name.

    Returns:
        The certificate's public text, to be compared with the federation file and, by another
        channel, with the organisation's own.

    Raises:
        ConfigError: If the file is not that organisation's certificate, or another one is trusted.
    """
    checks.file_name(name=name)  # it becomes one
    if not (folder / CERTIFICATE_FILE).exists():
        raise ConfigError(f"{folder}: holds no identity; run securevfl identity provision first")
    certificate = read_certificate(certificate_file, name=name)
    target = folder / TRUST_FOLDER / f"{name}.pem"
    another = target.exists() and read_certificate(target, name=name) != certificate
    if another and not replace:
        raise ConfigError(
            f"{target}: another certificate of {name!r} is trusted already; add --replace if that "
            f"party says that it has a new one"
        )
    write_bytes(target, certificate_pem(certificate), for_others=True)
    return public_text(certificate)
