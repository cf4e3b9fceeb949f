"""Mutually authenticated TLS 1.3 with pinned keys instead of a certificate authority."""

import datetime
import os
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from cryptography import x509

from securevfl.core.errors import AuthenticationError, ConfigError
from securevfl.transport.identity import Identity, certificate_pem, public_text

_ALTERED: Final = "bytes were altered on the way"
_NO_TLS: Final = "the other end does not speak TLS"
# What OpenSSL says of a broken handshake or connection, in our words: the first that fits.
_IN_WORDS: Final = (
    ("CERTIFICATE_EXPIRED", "the certificate has expired"),
    ("UNKNOWN_CA", "the certificate is not one that the other end trusts"),
    ("BAD_CERTIFICATE", "the certificate is not acceptable"),
    ("CERTIFICATE_UNKNOWN", "the certificate is not acceptable"),
    ("CERTIFICATE_REQUIRED", "no certificate was shown"),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "no certificate was shown"),
    ("PROTOCOL_VERSION", "TLS 1.3 is required"),
    ("UNSUPPORTED_PROTOCOL", "TLS 1.3 is required"),
    ("HTTP_REQUEST", _NO_TLS),
    ("WRONG_VERSION_NUMBER", _NO_TLS),
    ("EOF", "the other end hung up"),
    ("ZERORETURN", "the other end hung up"),
    ("BAD_RECORD_MAC", _ALTERED),
    ("DECRYPTION_FAILED", _ALTERED),
)
_REFUSED: Final = (
    "CERTIFICATE_EXPIRED",
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_REQUIRED",
)
# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL's x509_vfy.h.
_NOT_YET_VALID: Final = 9
_HAS_EXPIRED: Final = 10


def check_pins(identity: Identity, pinned: Mapping[str, str], peers: Iterable[str]) -> None:
    """Check, before anything is sent, that every certificate at hand is the pinned one.

    Args:
        identity: This party's own.
        pinned: Public text by party name, from the federation file.
        peers: The parties that this one talks to.

    Raises:
        ConfigError: If a pin or certificate is missing, has expired or is not valid yet.
        AuthenticationError: If a certificate is not the pinned one.
    """
    own = pinned.get(identity.name)
    if own is not None and own != identity.public_text:
        raise AuthenticationError(
            f"{identity.name}: its own identity is {identity.public_text}, but the federation "
            f"file pins {own}; one of the two is out of date"
        )
    check_validity(identity.name, identity.certificate)
    for name in peers:
        if name not in pinned:
            raise ConfigError(
                f"{name}: the federation file pins no identity for this party; "
                f'add identity = "ed25519:..." from securevfl identity create'
            )
        certificate = identity.trusted.get(name)
        if certificate is None:
            raise ConfigError(
                f"{name}: {identity.name} has no certificate of this party; put its identity.pem "
                f"into the trust folder as {name}.pem"
            )
        found = public_text(certificate)
        if found != pinned[name]:
            raise AuthenticationError(
                f"{name}: its certificate in {identity.name}'s trust folder holds {found}, but "
                f"the federation file pins {pinned[name]}"
            )
        check_validity(name, certificate)


def check_validity(
    name: str, certificate: x509.Certificate, *, now: datetime.datetime | None = None
) -> None:
    """Check that a certificate holds now.

    Raises:
        ConfigError: Naming the party, the limit and what may be wrong.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise ConfigError(
            f"{name}: its certificate expired at {last:%Y-%m-%d %H:%M} UTC, and this machine's "
            f"clock says {now:%Y-%m-%d %H:%M} UTC; make a new one with securevfl identity create, "
            f"or set the clock"
        )
    if now < first:
        raise ConfigError(
            f"{name}: its certificate is valid from {first:%Y-%m-%d %H:%M} UTC, and this "
            f"machine's clock says {now:%Y-%m-%d %H:%M} UTC; set the clock"
        )


def tls_context(identity: Identity, peers: Iterable[str], *, server: bool) -> ssl.SSLContext:
    """Return a TLS 1.3 context that shows ``identity`` and trusts the ``peers`` alone."""
    protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the key is pinned, which says more than a host name
    context.verify_mode = ssl.CERT_REQUIRED
    # The trusted certificates sign nothing: each is an end in itself.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusted = b"".join(certificate_pem(identity.trusted[name]) for name in peers)
    context.load_verify_locations(cadata=trusted.decode())
    if server:
        context.num_tickets = 0  # every connection proves its key anew
    _show_identity(context, identity)
    return context


def peer_public_text(connection: ssl.SSLSocket) -> str:
    """Return the public key that the other end has proved to hold."""
    raw = connection.getpeercert(binary_form=True)
    if raw is None:
        raise AuthenticationError("the other end showed no certificate")
    return public_text(x509.load_der_x509_certificate(raw))


def in_plain_words(error: OSError) -> str:
    """Say why a handshake or a connection failed, without what OpenSSL says of itself."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reasons = {_NOT_YET_VALID: " (not valid yet)", _HAS_EXPIRED: " (expired)"}
        return f"its certificate is not trusted{reasons.get(error.verify_code, '')}"
    if isinstance(error, ssl.SSLError):
        reason = (getattr(error, "reason", None) or f"{type(error).__name__} {error}").upper()
        for word, text in _IN_WORDS:
            if word in reason:
                return text
        return "what came is not what TLS allows"
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return "the other end cut the connection"
    return error.strerror or type(error).__name__


def broken_in_words(error: OSError) -> str:
    """Say why a connection broke whose two ends had proved who they are.

    Such an end does speak TLS: bytes that do not look like it were altered, lost or swapped.
    """
    words = in_plain_words(error)
    return _ALTERED if words == _NO_TLS else words


def own_certificate_refused(error: OSError) -> bool:
    """Return whether the other end says that it does not accept this party's certificate."""
    reason = getattr(error, "reason", None) or ""
    return "ALERT" in reason and any(word in reason for word in _REFUSED)


def _show_identity(context: ssl.SSLContext, identity: Identity) -> None:
    # The ssl module takes a key from a file only. It lies there encrypted, for milliseconds.
    password = os.urandom(32).hex()
    content = identity.key_pem(password=password.encode()) + certificate_pem(identity.certificate)
    if hasattr(os, "memfd_create"):
        # In memory, so that a process which is killed meanwhile leaves nothing.
        with os.fdopen(os.memfd_create("securevfl"), "wb") as file:
            file.write(content)
            file.flush()
            context.load_cert_chain(f"/dev/fd/{file.fileno()}", password=password)
        return
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        path = Path(folder) / "identity.pem"
        path.touch(mode=0o600)
        path.write_bytes(content)
        context.load_cert_chain(path, password=password)
