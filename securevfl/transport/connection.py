"""One authenticated connection: TLS 1.3 with pinned keys, and queues of messages both ways.

Only the thread that owns all sockets calls :meth:`Connection.read` and :meth:`Connection.write`:
OpenSSL allows one user of a connection at a time. Other threads use the two queues only.

The memory that a peer can make this party use is bounded. Once ``max_waiting_bytes`` of received
messages wait, further bytes stay in the socket, so that TCP holds the sender back; this end reports
that to the peer, which then does not take it for lost. A turn is bounded in frames and system
calls.
"""

import os
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cryptography import x509

from securevfl.core import checks
from securevfl.core.errors import AuthenticationError, ConfigError, ProtocolError
from securevfl.transport.framing import RECORD_BYTES, EncodedMessage, FrameReader
from securevfl.transport.identity import Identity, certificate_pem, check_validity, public_text
from securevfl.transport.message import Message

# Bounds of one peer's turn: enough for a whole share of usual size. A call reads one TLS record of
# at most 16 KiB, so these are 4 MiB.
TURN_CALLS: Final = 256
TURN_FRAMES: Final = 128
_TURN_BYTES: Final = TURN_CALLS * RECORD_BYTES
# Records that a message may come in: those of a large body, and two for each of its arrays.
_SPARE_RECORDS: Final = 1 << 12
_LEAST_RECORD_BYTES: Final = 1 << 10
# Heartbeats that a peer may send beyond those due. A process that was stopped for long reads all of
# them at once, so they are counted over the whole session.
_SPARE_PINGS: Final = 200
_PINGS_PER_HEARTBEAT: Final = 2
# Four heartbeats are sent within the tolerated silence, so that three may be late.
HEARTBEATS_PER_SILENCE: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportLimits:
    """Timeouts and sizes of a transport."""

    silence_timeout_s: checks.Positive = 10.0
    """Seconds without a heartbeat or message after which a party counts as lost."""

    lowest_rate: checks.NonNegative = 1000.0
    """Smallest rate, in bytes a second over ``silence_timeout_s``, at which a party must read
    waiting messages, or counts as lost; 0: any."""

    handshake_timeout_s: checks.Positive = 10.0
    """Seconds for a caller to prove who it is."""

    farewell_timeout_s: checks.Positive = 2.0
    """Seconds to deliver the last messages when the federation ends or fails."""

    busy_timeout_s: checks.Positive = 3600.0
    """Seconds of a session for which a party may have no room for messages, less the time for the
    bytes that it reads at ``lowest_rate``. It also bounds this party's own waits while others
    wait."""

    max_message_bytes: checks.Count = 1 << 30
    """Largest body of one message; memory is set aside for it."""

    max_waiting_bytes: checks.Count = 1 << 26
    """Most bytes of one party's messages that wait to be received or relayed; at this bound its
    socket is not read. A single message may be larger."""

    max_waiting_messages: checks.Count = 4096
    """Most messages of one party that wait to be received; more end the federation."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message in the queue of outgoing messages."""

    encoded: EncodedMessage
    held_for: "Connection | None" = None
    """The connection that a relayed message came from, among whose waiting bytes it counts until it
    is sent."""
    held_bytes: int = 0
    """Number of bytes that a relayed message holds at ``held_for``; 0 for others."""
    sent: bool = field(default=False, init=False)
    """True once TLS has accepted the message's last byte."""


@dataclass(kw_only=True, eq=False)
class Connection:
    """The connection to one party whose identity is proved."""

    peer: str
    socket: ssl.SSLSocket
    reader: FrameReader
    session: bytes
    own_rank: int
    limits: TransportLimits

    def __post_init__(self) -> None:
        self.incoming: deque[Message] = deque()
        self.outgoing: deque[Outgoing] = deque()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_heard = self.last_sent = self.last_progress = self._began = time.monotonic()
        self._waiting_since: float | None = None
        self._sent_by_then = 0
        self._without_room_s = 0.0
        self._counted = self._began
        self._counted_bytes = 0
        self.blocked = False
        """Whether the last write stopped because the network accepts no more."""
        self.unread = False
        """Whether the last read stopped at the end of its turn, with bytes left."""
        self.full = False
        """Whether the socket is not read until this party has received waiting messages."""
        self.peer_full = False
        """Whether the peer has reported that it does not read for now."""
        self.waited_s = 0.0
        """The transport's total seconds of waiting when a message was last sent to or received from
        it."""
        self.peer_left = False
        """Whether the peer is done or was dismissed."""
        self.ended = False
        """Whether nothing more can arrive."""
        self.end_reason = "its connection closed: the process ended or the network broke"
        """Why, in words."""
        self._sequence = 0
        self._records = 0
        self._pings = 0
        # Each counter has one writing thread: the socket thread counts kept and passed bytes, the
        # party's own thread taken ones.
        self._kept_bytes = self._taken_bytes = self._passed_bytes = 0
        self._current: Outgoing | None = None
        self._buffers: deque[memoryview] = deque()

    @property
    def has_output(self) -> bool:
        """Whether bytes wait to be sent."""
        return self._current is not None or bool(self.outgoing)

    def rate(self, now: float, *, over_s: float) -> float | None:
        """Return the bytes a second sent since bytes began to wait, once every ``over_s``.

        None if nothing waits, or the interval is not over.
        """
        if not self.has_output:
            self._waiting_since = None
            return None
        if self._waiting_since is None:
            self._waiting_since, self._sent_by_then = now, self.bytes_sent
        seconds = now - self._waiting_since
        if seconds < over_s:
            return None
        taken, self._waiting_since = self.bytes_sent - self._sent_by_then, None
        return taken / seconds

    def excuse(self, now: float) -> None:
        """Restart timeouts that a busy party may exceed.

        The party is not read while too many of its messages wait, and may report the same of this
        party. Its time without room is added up over the session, less the time for the bytes that
        it reads.
        """
        if self.full:
            self.last_heard = now
        if self.peer_full and self.has_output:
            self._without_room_s += now - self._counted
        taken = self.bytes_sent - self._counted_bytes
        given_back_s = taken / max(1.0, self.limits.lowest_rate)
        self._without_room_s = max(0.0, self._without_room_s - given_back_s)
        self._counted, self._counted_bytes = now, self.bytes_sent
        if self.peer_full and self._without_room_s <= self.limits.busy_timeout_s:
            self.last_progress, self._waiting_since = now, None

    def forgive(self, now: float) -> None:
        """Restart all timeouts, since this process itself was stopped."""
        self.last_heard = self.last_progress = self._counted = now
        self._waiting_since = None

    def drop_unsent(self) -> None:
        """Drop messages whose sending has not begun; one that has begun is finished."""
        self.outgoing.clear()

    def widen(self, limits: TransportLimits) -> None:
        """Accept larger and more messages from now on."""
        self.reader.max_body_bytes = limits.max_message_bytes
        self.limits = limits

    @property
    def waiting_bytes(self) -> int:
        """Bytes of messages that wait to be received or relayed."""
        return self._kept_bytes - self._taken_bytes - self._passed_bytes

    @property
    def has_room(self) -> bool:
        """Whether the peer's next bytes may be read; always if no message waits."""
        waiting = self.waiting_bytes
        bound = self.limits.max_waiting_bytes
        return waiting == 0 or (waiting < bound and waiting + self.reader.announced_bytes <= bound)

    def keep(self, message: Message) -> None:
        """Queue a received message for the party's own thread.

        Raises:
            ProtocolError: If too many messages wait already.
        """
        if len(self.incoming) >= self.limits.max_waiting_messages:
            raise ProtocolError(
                f"{self.peer}: sends faster than the protocol allows; "
                f"{len(self.incoming)} messages wait"
            )
        self._kept_bytes += message.held_bytes
        self.incoming.append(message)

    def take(self) -> Message:
        """Return the message that has waited longest; called by the party's own thread."""
        message = self.incoming.popleft()
        self._taken_bytes += message.held_bytes
        return message

    def pass_on(self, message: Message, encoded: EncodedMessage) -> Outgoing:
        """Return a received message for another peer's queue.

        Until it is sent it counts as waiting here, so that the sender is held back if the receiver
        does not read.
        """
        self._taken_bytes -= message.held_bytes
        return Outgoing(encoded, held_for=self, held_bytes=message.held_bytes)

    def heard_ping(self, now: float, *, full: bool) -> None:
        """Record a heartbeat.

        Raises:
            ProtocolError: If heartbeats arrive far more often than they are due.
        """
        self._pings += 1
        heartbeats = (now - self._began) * HEARTBEATS_PER_SILENCE / self.limits.silence_timeout_s
        # One more for every frame sent to the peer, which may report being full and having room
        # again after each.
        due = _PINGS_PER_HEARTBEAT * (heartbeats + self._sequence)
        if self._pings > _SPARE_PINGS + due:
            raise ProtocolError(
                f"{self.peer}: sent {self._pings} heartbeats in {now - self._began:.0f} s, "
                f"where {heartbeats:.0f} were due"
            )
        self.peer_full = full

    def read(self, now: float) -> list[Message]:
        """Read messages that have arrived, for one turn.

        Sets :attr:`ended` when the connection is closed or broken; earlier messages count. Sets
        :attr:`full` when too many bytes wait.

        Raises:
            ProtocolError: If the bytes are no valid next frame.
        """
        messages: list[Message] = []
        taken = calls = held = 0
        self.unread = True
        while calls < TURN_CALLS and len(messages) < TURN_FRAMES and held < _TURN_BYTES:
            message = self.reader.message()
            if message is not None:
                self._records = 0
                held += message.held_bytes
                messages.append(message)
                continue
            if not self.has_room:
                self.full = True
                break
            count = self._receive()
            if count == 0:
                self.unread = False
                break
            calls += 1
            taken += count
            self.reader.advance(count)
        if taken:
            self.bytes_received += taken
            self.last_heard = now
        return messages

    def _receive(self) -> int:
        """Return the number of received bytes: 0 if there are none, or the connection has ended."""
        try:
            count = self.socket.recv_into(self.reader.target())
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            self.ended = True
            self.end_reason = f"its connection broke: {broken_in_words(error)}"
            return 0
        self.ended = count == 0
        self._records += 1
        if self._records > _SPARE_RECORDS + self.reader.announced_bytes // _LEAST_RECORD_BYTES:
            raise ProtocolError(
                f"{self.peer}: sends a message in {self._records} pieces and more, far too small"
            )
        return count

    def write(self, now: float) -> bool:
        """Send queued bytes while the network accepts them; return whether a message is sent.

        Raises:
            OSError: If the connection broke.
        """
        finished = False
        written = 0
        self.blocked = False
        while written < _TURN_BYTES and self._next_buffer():
            # TLS reports progress only when a whole buffer is sent: over a slow line a large array
            # would look like a party that does not read.
            try:
                count = self.socket.send(self._buffers[0][:RECORD_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.blocked = True
                break
            written += count
            if count < len(self._buffers[0]):
                self._buffers[0] = self._buffers[0][count:]
                continue
            self._buffers.popleft()
            if not self._buffers and self._current is not None:
                self._current.sent = True
                if (origin := self._current.held_for) is not None:
                    origin._passed_bytes += self._current.held_bytes
                self._current = None
                finished = True
        if written:
            self.bytes_sent += written
            self.last_sent = now
        if written or not self.has_output:
            self.last_progress = now
        return finished

    def half_close(self) -> None:
        """Shut down sending, so that the peer reads everything sent before."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.ended = True  # the other end has closed, which was the aim

    def _next_buffer(self) -> bool:
        if self._buffers:
            return True
        if not self.outgoing:
            return False
        self._current = self.outgoing.popleft()
        frame = self._current.encoded.frame(
            session=self.session, sender_rank=self.own_rank, sequence=self._sequence
        )
        self._sequence += 1
        self._buffers.extend(frame)
        return True


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
