"""Mutually authenticated TLS 1.3 with pinned keys instead of a certificate authority."""

import os
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from cryptography import x509

from securevfl.core.errors import AuthenticationError, ConfigError
from securevfl.transport.identity import Identity, certificate_pem, check_validity, public_text

_ALTERED: Final = "bytes were altered on the way"
_NO_TLS: Final = "the other end does not speak TLS"

# OpenSSL's reasons for a broken handshake or connection, and ours; the first match counts.
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
    """Check before anything is sent that the parties' certificates are the pinned ones.

    Args:
        identity: This party's identity.
        pinned: Public text by party name, from the federation file.
        peers: The parties that this one connects to.

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
        key_text = public_text(certificate)
        if key_text != pinned[name]:
            raise AuthenticationError(
                f"{name}: its certificate in {identity.name}'s trust folder holds {key_text}, but "
                f"the federation file pins {pinned[name]}"
            )
        check_validity(name, certificate)


Purpose = Literal["securevfl-run", "securevfl-check"]
"""Purpose of a connection, which both ends name in the handshake (ALPN) and which must agree."""

_DOES: Final[Mapping[Purpose, str]] = {
    "securevfl-run": "is in a run, and this party in securevfl check --peers",
    "securevfl-check": "is still in securevfl check --peers",
}


def other_purpose(connection: ssl.SSLSocket, purpose: Purpose) -> str | None:
    """Return what the other end of a connection does, if it is something else; else None."""
    if connection.selected_alpn_protocol() == purpose:
        return None
    other: Purpose = "securevfl-check" if purpose == "securevfl-run" else "securevfl-run"
    return f"{_DOES[other]}, or has another version of securevfl"


def tls_context(
    identity: Identity, peers: Iterable[str], *, server: bool, purpose: Purpose = "securevfl-run"
) -> ssl.SSLContext:
    """Return a TLS 1.3 context that presents ``identity`` and trusts only ``peers``."""
    protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([purpose])
    context.check_hostname = False  # the pinned key identifies the peer better than a host name
    context.verify_mode = ssl.CERT_REQUIRED
    # Each trusted certificate is an end entity and signs no other.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusted = b"".join(certificate_pem(identity.trusted[name]) for name in peers)
    context.load_verify_locations(cadata=trusted.decode())
    if server:
        context.num_tickets = 0  # every connection must prove its key
    _show_identity(context, identity)
    return context


def peer_public_text(connection: ssl.SSLSocket) -> str:
    """Return the public key whose possession the other end has proved."""
    raw = connection.getpeercert(binary_form=True)
    if raw is None:
        raise AuthenticationError("the other end showed no certificate")
    return public_text(x509.load_der_x509_certificate(raw))


def in_plain_words(error: OSError) -> str:
    """Return why a handshake or connection failed, in words instead of OpenSSL's codes."""
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
    """Return why an authenticated connection broke, in words.

    Its ends do speak TLS, so bytes that are no TLS were altered on the way.
    """
    words = in_plain_words(error)
    return _ALTERED if words == _NO_TLS else words


def own_certificate_refused(error: OSError) -> bool:
    """Return whether the other end has refused this party's certificate."""
    reason = getattr(error, "reason", None) or ""
    return "ALERT" in reason and any(word in reason for word in _REFUSED)


def _show_identity(context: ssl.SSLContext, identity: Identity) -> None:
    # The ssl module reads keys from files only. The file holds it encrypted, for milliseconds.
    password = os.urandom(32).hex()
    content = identity.key_pem(password=password.encode()) + certificate_pem(identity.certificate)
    if hasattr(os, "memfd_create"):
        # In memory, so that a process that is killed meanwhile leaves no file.
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
