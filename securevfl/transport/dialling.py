"""A secondary's call to the primary: dial until it answers, prove identities, learn the session."""

import contextlib
import socket
import ssl
import time
from typing import Final

from securevfl.core.errors import (
    AuthenticationError,
    ConfigError,
    PartyFailedError,
    PartyTimeoutError,
    ProtocolError,
)
from securevfl.core.ranks import PRIMARY_RANK
from securevfl.transport.connection import Connection, TransportLimits
from securevfl.transport.failure import Failure
from securevfl.transport.framing import SESSION_BYTES, FrameReader
from securevfl.transport.message import Message, StarKind
from securevfl.transport.tls import peer_public_text, refusal

# Pause between calls while the primary is not there yet.
_REDIAL_S: Final = 0.1


def dial(
    address: tuple[str, int],
    *,
    context: ssl.SSLContext,
    peer: str,
    pinned: str,
    rank: int,
    deadline_s: float,
    limits: TransportLimits,
) -> Connection:
    """Return an authenticated connection to the primary.

    Args:
        address: The primary's host and port.
        context: TLS 1.3 with this party's certificate.
        peer: The primary's name.
        pinned: The primary's pinned public text.
        rank: This party's rank, which the primary must agree to.
        deadline_s: Seconds until the primary must have answered.
        limits: Deadlines and sizes.

    Raises:
        PartyTimeoutError: If it did not answer in time.
        AuthenticationError: If either end does not accept the other's identity.
        PartyFailedError: If the primary turns this party away.
        ConfigError: If the host name is unknown.

    Reveals:
        To the primary, and on the wire to anybody: that this party takes part.
    """
    deadline = time.monotonic() + deadline_s
    place = f"{peer} ({address[0]}:{address[1]})"
    raw = _call(address, place=place, deadline=deadline, deadline_s=deadline_s)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.settimeout(min(limits.handshake_timeout_s, max(_REDIAL_S, deadline - time.monotonic())))
    secured: ssl.SSLSocket | None = None
    try:
        secured = context.wrap_socket(raw)
        if peer_public_text(secured) != pinned:
            raise AuthenticationError(f"{place}: holds another key than the pinned {pinned}")
        reader = FrameReader(
            peer=peer,
            sender_rank=PRIMARY_RANK,
            session=None,
            max_body_bytes=limits.max_message_bytes,
        )
        _greet(secured, reader, rank=rank, place=place)
    except TimeoutError:
        _hang_up(secured or raw)
        raise PartyTimeoutError(f"{place}: answered the call and then said nothing") from None
    except ssl.SSLCertVerificationError as error:
        _hang_up(secured or raw)
        raise AuthenticationError(f"{place}: {refusal(error)}") from None
    except OSError as error:
        _hang_up(secured or raw)
        raise AuthenticationError(
            f"{place}: did not accept this party: {refusal(error)}; does its trust folder hold "
            f"this party's certificate, and the federation file its identity?"
        ) from None
    except BaseException:
        _hang_up(secured or raw)
        raise
    secured.setblocking(False)
    session = reader.session or bytes(SESSION_BYTES)
    connection = Connection(
        peer=peer,
        connection=secured,
        reader=reader,
        session=session,
        own_rank=rank,
        max_waiting=limits.max_waiting_messages,
    )
    connection.unread = True  # TLS may have taken in more than the first message
    return connection


def _call(
    address: tuple[str, int], *, place: str, deadline: float, deadline_s: float
) -> socket.socket:
    problem = "no answer"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PartyTimeoutError(
                f"{place}: did not answer within {deadline_s:g} s ({problem}); is the primary "
                f"running, and its port reachable from here?"
            )
        try:
            return socket.create_connection(address, timeout=left)
        except socket.gaierror as error:
            raise ConfigError(f"address {address[0]}:{address[1]}: {error.strerror}") from None
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(_REDIAL_S, left))


def _greet(connection: ssl.SSLSocket, reader: FrameReader, *, rank: int, place: str) -> None:
    greeting = _next_message(connection, reader, place=place)
    found = greeting.figure("rank", int)
    if found != rank:
        raise ProtocolError(
            f"{place}: takes this party for rank {found}, but the federation file here says "
            f"{rank}; compare the two files"
        )


def _next_message(connection: ssl.SSLSocket, reader: FrameReader, *, place: str) -> Message:
    while True:
        count = connection.recv_into(reader.target())
        if count == 0:
            raise PartyFailedError(f"{place}: hung up before it named the session")
        message = reader.advance(count)
        if message is not None and message.kind is StarKind.ABORT:
            raise Failure.from_message(message, relayed=True).error()
        if message is not None:
            return message


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.close()
