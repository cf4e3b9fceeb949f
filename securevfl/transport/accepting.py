"""The primary's open door: who calls must prove a pinned key before a byte of it is read."""

import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Final

from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.ranks import PRIMARY_RANK
from securevfl.transport.connection import Connection, Outgoing
from securevfl.transport.failure import Failure
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import SessionStart
from securevfl.transport.socket_loop import StarLoop
from securevfl.transport.tls import peer_public_text, refusal

# Callers that may prove who they are at the same time; more wait in the system's queue.
_MAX_CALLERS: Final = 64
_BACKLOG: Final = 128
# Refusals that are kept for the message about a party that never came.
_MAX_REFUSALS: Final = 8
# How long a refused caller is listened to, so that it can read why it was refused.
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 1 << 16


def open_listener(address: tuple[str, int]) -> socket.socket:
    """Open the primary's port.

    Raises:
        ConfigError: If the address is in use, not this machine's or no address at all.
    """
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"address {host}:{port}: cannot be listened on ({error.strerror or error}); "
            f"choose another one for the primary"
        ) from None
    listener.setblocking(False)
    return listener


class _Caller:
    """Somebody who has called and not yet proved anything, or who was refused."""

    def __init__(self, connection: socket.socket, *, address: str, deadline: float) -> None:
        self.socket = connection
        self.address = address
        self.deadline = deadline
        self.refused = False


class Doorkeeper:
    """Accepts calls in the thread of a :class:`StarLoop` and admits each pinned party once.

    Args:
        loop: Where admitted connections go.
        listener: From :func:`open_listener`.
        context: TLS 1.3, demanding a certificate.
        names: Party name by pinned public text, for the secondaries.
        ranks: Rank by party name.
        session: The id that every frame of this session carries.
    """

    def __init__(
        self,
        *,
        loop: StarLoop,
        listener: socket.socket,
        context: ssl.SSLContext,
        names: Mapping[str, str],
        ranks: Mapping[str, int],
        session: bytes,
    ) -> None:
        self.refusals: list[str] = []
        """Who was refused and why, the first few."""
        self._loop = loop
        self._listener = listener
        self._context = context
        self._names = names
        self._ranks = ranks
        self._session = session
        self._callers: set[_Caller] = set()
        loop.selector.register(listener, selectors.EVENT_READ, self._accept)

    def tick(self, now: float) -> None:
        """Send those away whose time is over."""
        for caller in [caller for caller in self._callers if now > caller.deadline]:
            if not caller.refused:
                self._note(caller.address, "did not prove its identity in time")
            self._dismiss(caller)

    def stop(self) -> None:
        """Close the door and dismiss everybody who waits."""
        for caller in list(self._callers):
            self._dismiss(caller)
        if self._listener.fileno() >= 0:
            self._loop.selector.unregister(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        try:
            raw, address = self._listener.accept()
        except OSError:
            return  # the caller hung up between the notice and the call
        place = str(address[0])
        if len(self._callers) >= _MAX_CALLERS:
            self._note(place, "too many calls at once")
            raw.close()
            return
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        deadline = time.monotonic() + self._loop.limits.handshake_timeout_s
        caller = _Caller(connection, address=place, deadline=deadline)
        self._callers.add(caller)
        self._loop.selector.register(
            connection, selectors.EVENT_READ, lambda: self._shake_hands(caller)
        )
        self._shake_hands(caller)

    def _shake_hands(self, caller: _Caller) -> None:
        connection = caller.socket
        if caller.refused:
            self._linger(caller)
            return
        assert isinstance(connection, ssl.SSLSocket)
        try:
            connection.do_handshake()
            self._admit(caller, connection)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._refuse(caller, refusal(error))
        except SecureVflError as error:
            self._refuse(caller, str(error))

    def _admit(self, caller: _Caller, connection: ssl.SSLSocket) -> None:
        name = self._names.get(peer_public_text(connection))
        if name is None:
            self._refuse(caller, "its key is pinned for no secondary")
            return
        if name in self._loop.connections:
            self._turn_away_twin(caller, connection, name)
            return
        self._callers.discard(caller)
        self._loop.selector.unregister(connection)
        admitted = Connection(
            peer=name,
            connection=connection,
            reader=FrameReader(
                peer=name,
                sender_rank=self._ranks[name],
                session=self._session,
                max_body_bytes=self._loop.limits.max_message_bytes,
            ),
            session=self._session,
            own_rank=PRIMARY_RANK,
            max_waiting=self._loop.limits.max_waiting_messages,
        )
        greeting = SessionStart(rank=self._ranks[name]).to_message()
        admitted.outgoing.append(Outgoing(encode(greeting)))
        admitted.unread = True  # TLS may have read the party's first frame with the handshake
        self._loop.add(admitted)

    def _turn_away_twin(self, caller: _Caller, connection: ssl.SSLSocket, name: str) -> None:
        reason = f"a party of this name has joined already, so this second {name} was refused"
        greeting = SessionStart(rank=self._ranks[name]).to_message()
        abort = Failure(party=name, reason=reason).to_message()
        for sequence, message in enumerate((greeting, abort)):
            for buffer in encode(message).frame(
                session=self._session, sender_rank=PRIMARY_RANK, sequence=sequence
            ):
                connection.send(buffer)  # a few hundred bytes always fit into a new connection
        self._refuse(caller, f"{name} had joined already")

    def _refuse(self, caller: _Caller, reason: str) -> None:
        """Stop sending, but read on for a moment: the alert must not be lost by a reset."""
        self._note(caller.address, reason)
        assert isinstance(caller.socket, ssl.SSLSocket)
        self._loop.selector.unregister(caller.socket)
        raw = socket.socket(fileno=caller.socket.detach())
        raw.setblocking(False)
        caller.socket = raw
        caller.refused = True
        caller.deadline = time.monotonic() + _LINGER_S
        self._loop.selector.register(raw, selectors.EVENT_READ, lambda: self._linger(caller))
        try:
            raw.shutdown(socket.SHUT_WR)
        except OSError:
            self._dismiss(caller)

    def _linger(self, caller: _Caller) -> None:
        try:
            if not caller.socket.recv(_LINGER_BYTES):
                self._dismiss(caller)
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(caller)

    def _dismiss(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        self._loop.selector.unregister(caller.socket)
        caller.socket.close()

    def _note(self, address: str, reason: str) -> None:
        if len(self.refusals) < _MAX_REFUSALS:
            self.refusals.append(f"{address}: {reason}")
