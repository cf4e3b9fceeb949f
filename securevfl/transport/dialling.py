"""A secondary's calls to the primary: until one succeeds, both ends prove who they are."""

import contextlib
import socket
import ssl
import time
from typing import Final

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import (
    AuthenticationError,
    PartyAbsentError,
    PartyLostError,
    ProtocolError,
)
from securevfl.transport.connection import Connection, TransportLimits
from securevfl.transport.framing import SESSION_BYTES, FrameReader, encode
from securevfl.transport.identity import in_plain_words, own_certificate_refused, peer_public_text
from securevfl.transport.message import Failure, Message, StarKind, failure_kind, public_reason

# Pause between calls while nobody answers, and the longest one between calls that are answered
# and come to nothing: these cost the other end a handshake each.
_REDIAL_S: Final = 0.1
_LONGEST_REDIAL_S: Final = 1.0
# How long the primary may take to hang up, once it was told why this party does.
_LAST_WORD_S: Final = 1.0
_READ_BYTES: Final = 1 << 14


class _CallFailedError(Exception):
    """A call came to nothing, and another one may not.

    Attributes:
        text: Why, in plain words.
        telling: How much it says about the true cause: 0 if nobody answered, 1 if somebody did, 2
            if an identity was not accepted.
    """

    def __init__(self, text: str, *, telling: int) -> None:
        super().__init__(text)
        self.text = text
        self.telling = telling


def dial(
    address: tuple[str, int],
    *,
    context: ssl.SSLContext,
    peer: str,
    pinned: str,
    own_name: str,
    rank: int,
    deadline_s: float,
    limits: TransportLimits,
    returning: bool = False,
) -> Connection:
    """Return an authenticated connection to the primary, calling until there is one.

    Whatever ends a call, the next one may find the primary there: it may have yet to start, a
    tunnel may answer before the service behind it is up, somebody else may hold the port, a name
    may not be known yet. Only what the authenticated primary itself says ends this before its time.

    Args:
        address: The primary's host and port.
        context: TLS 1.3 with this party's certificate.
        peer: The primary's name.
        pinned: The primary's pinned public text.
        own_name: This party's name.
        rank: Its rank, which the primary must agree to.
        deadline_s: Seconds until the primary must have answered.
        limits: Deadlines and sizes.
        returning: Whether a primary that holds an earlier connection of this party is called again
            until it has noticed that this one is lost.

    Raises:
        PartyAbsentError: If it did not let this party in in time; says what ended the calls.
        AuthenticationError: If time was over and an end had not accepted the other's identity.
        ProtocolError: If the primary counts the parties otherwise, or speaks another protocol.
        PartyFailedError: If the primary turns this party away.

    Reveals:
        To the primary, and on the wire to anybody: that this party takes part.
    """
    deadline = time.monotonic() + deadline_s
    place = f"{peer} ({address[0]}:{address[1]})"
    calls, pause_s = 0, _REDIAL_S
    best: _CallFailedError | None = None
    while True:
        calls += 1
        try:
            return _call(
                address,
                context=context,
                peer=peer,
                pinned=pinned,
                own_name=own_name,
                rank=rank,
                patience_s=max(_REDIAL_S, deadline - time.monotonic()),
                limits=limits,
                returning=returning,
            )
        except _CallFailedError as last:
            if best is None or last.telling >= best.telling:
                best = last
            left = deadline - time.monotonic()
            if left <= 0:
                raise _gave_up(place, best, last, calls=calls, deadline_s=deadline_s) from None
            time.sleep(min(pause_s, left))
            pause_s = min(2 * pause_s, _LONGEST_REDIAL_S) if last.telling else _REDIAL_S


def _gave_up(
    place: str, best: _CallFailedError, last: _CallFailedError, *, calls: int, deadline_s: float
) -> ProtocolError:
    """Return the error that names what said most, and what came last if that is another thing."""
    at_last = f"; the last of {calls} calls: {last.text}" if last.text != best.text else ""
    if best.telling == 0:
        return PartyAbsentError(
            f"{place}: did not answer within {deadline_s:g} s ({best.text}); is the primary "
            f"running, and its port reachable from here?"
        )
    within = f"did not let this party in within {deadline_s:g} s and {calls} calls: {best.text}"
    if best.telling == 1:
        return PartyAbsentError(
            f"{place}: {within}{at_last}; is the primary up behind this address, or does another "
            f"service answer there?"
        )
    return AuthenticationError(f"{place}: {within}{at_last}")


def _call(
    address: tuple[str, int],
    *,
    context: ssl.SSLContext,
    peer: str,
    pinned: str,
    own_name: str,
    rank: int,
    patience_s: float,
    limits: TransportLimits,
    returning: bool,
) -> Connection:
    """Call once; raise :class:`_CallFailedError` if a later call may succeed."""
    place = f"{peer} ({address[0]}:{address[1]})"
    patience_s = min(limits.handshake_timeout_s, patience_s)
    try:
        raw = socket.create_connection(address, timeout=patience_s)
    except OSError as error:
        text = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise _CallFailedError(text, telling=0) from None
    secured: ssl.SSLSocket | None = None
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secured = context.wrap_socket(raw)
        found = peer_public_text(secured)
        if found != pinned:
            raise _CallFailedError(f"it holds the key {found}, not the pinned {pinned}", telling=2)
        reader = FrameReader(
            peer=peer,
            sender_rank=PRIMARY_RANK,
            session=None,
            max_body_bytes=limits.max_message_bytes,
        )
        _greet(secured, reader, own_name=own_name, rank=rank, place=place)
        secured.setblocking(False)
    except BaseException as error:
        _hang_up(secured or raw)
        if returning and isinstance(error, PartyLostError):
            raise _CallFailedError(str(error), telling=1) from None
        failed = _as_failed_call(error)
        if failed is None:
            raise
        raise failed from None
    session = reader.session or bytes(SESSION_BYTES)
    connection = Connection(
        peer=peer,
        connection=secured,
        reader=reader,
        session=session,
        own_rank=rank,
        limits=limits,
    )
    connection.unread = True  # TLS may have taken in more than the first message
    return connection


def _as_failed_call(error: BaseException) -> _CallFailedError | None:
    """Return what ended a call, or None if it ends the joining."""
    if isinstance(error, TimeoutError):
        return _CallFailedError("it answered the call and then said nothing", telling=1)
    if isinstance(error, AuthenticationError | ssl.SSLCertVerificationError):
        text = in_plain_words(error) if isinstance(error, OSError) else str(error)
        return _CallFailedError(text, telling=2)
    if isinstance(error, OSError) and own_certificate_refused(error):
        return _CallFailedError(
            f"it did not accept this party: {in_plain_words(error)}; does its trust folder hold "
            f"this party's certificate, and the federation file its identity?",
            telling=2,
        )
    if isinstance(error, OSError):
        text = f"it answered the call, and then {in_plain_words(error)}"
        return _CallFailedError(text, telling=1)
    return error if isinstance(error, _CallFailedError) else None


def _greet(
    connection: ssl.SSLSocket, reader: FrameReader, *, own_name: str, rank: int, place: str
) -> None:
    found = rank
    try:
        found = _next_message(connection, reader).figure("rank", int)
        if found != rank:
            raise ProtocolError(
                f"{place}: takes this party for rank {found}, but the federation file here says "
                f"{rank}; compare the two files"
            )
    except ProtocolError as error:
        if error.party is None:  # else it is the primary that says it
            _say_why(connection, reader, own_name=own_name, rank=found, error=error)
        raise


def _say_why(
    connection: ssl.SSLSocket,
    reader: FrameReader,
    *,
    own_name: str,
    rank: int,
    error: ProtocolError,
) -> None:
    """Tell the primary why this party hangs up, so that it need not take it for lost.

    A primary of another version does not read it, and says itself that it is another one.

    Args:
        connection: What is hung up then.
        reader: What has come on it.
        own_name: This party's name.
        rank: The rank by which the primary knows it.
        error: What ends the call.
    """
    failure = Failure(party=own_name, reason=public_reason(error), kind=failure_kind(error))
    session = reader.session or bytes(SESSION_BYTES)
    with contextlib.suppress(OSError):
        for buffer in encode(failure.to_message()).frame(
            session=session, sender_rank=rank, sequence=0
        ):
            connection.sendall(buffer)
        # Bytes that nobody has read would let the system drop what was sent.
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_LAST_WORD_S)
        while connection.recv(_READ_BYTES):
            pass


def _next_message(connection: ssl.SSLSocket, reader: FrameReader) -> Message:
    while (message := reader.message()) is None:
        count = connection.recv_into(reader.target())
        if count == 0:
            raise _CallFailedError("it hung up before it named the session", telling=1)
        reader.advance(count)
    if message.kind is StarKind.ABORT:
        raise Failure.from_message(message, relayed=True).error()
    return message


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()
