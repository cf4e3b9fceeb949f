"""The primary's open door: who calls must prove a pinned key before a byte of it is read.

The port is open for the whole run, to everybody. So nothing that a caller does may raise here, and
no address may hold so many places that others find none: the oldest caller of the address that
holds the most goes when there is no room, and who says nothing goes before who says too little.
"""

import errno
import ipaddress
import math
import os
import selectors
import socket
import ssl
import time
from collections.abc import Collection, Mapping
from typing import Final

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.transport.connection import Connection, Outgoing
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.identity import in_plain_words, peer_public_text
from securevfl.transport.message import Failure, FailureKind, SessionStart
from securevfl.transport.socket_loop import StarLoop

# Callers that may prove who they are at the same time, and those of one address among them. Many
# parties may call from one address at once; who is sent away for want of room calls again.
_MAX_CALLERS: Final = 64
_MAX_CALLERS_OF_ADDRESS: Final = 16
_BACKLOG: Final = 128
# A party's first bytes follow its call at once; the rest of the handshake takes its computing.
_FIRST_BYTES_S: Final = 3.0
# Refusals that are kept for the message about a party that never came.
_MAX_REFUSALS: Final = 8
# Who has an IPv6 address has all of its network.
_IPV6_NETWORK: Final = 64
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
        # Python adds the address to what the system says, which is named here already.
        named = isinstance(error, socket.gaierror) or not error.errno
        why = (error.strerror or error) if named else os.strerror(error.errno or 0)
        raise ConfigError(
            f"address {host}:{port}: cannot be listened on ({why}); "
            f"choose another one for the primary"
        ) from None
    listener.setblocking(False)
    return listener


class _Caller:
    """Somebody who has called and not yet proved anything, or who was refused."""

    def __init__(self, connection: socket.socket, *, address: str, now: float) -> None:
        self.socket = connection
        self.address = address
        self.called = now
        self.deadline = now
        """When this phase of the call must be over."""
        self.has_spoken = False
        self.refused = False


def _origin(address: str) -> str:
    """Return what counts as one caller's address."""
    try:
        place = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(place, ipaddress.IPv6Address):
        mapped = place.ipv4_mapped
        network = ipaddress.ip_network((place, _IPV6_NETWORK), strict=False)
        return str(mapped or network)
    return str(place)


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
        self._refusals: dict[tuple[str, str], int] = {}
        self._loop = loop
        self._listener = listener
        self._context = context
        self._names = names
        self._ranks = ranks
        self._session = session
        self._callers: dict[_Caller, None] = {}  # in the order of their calls
        self._outside: dict[str, float] = {}
        loop.selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def refusals(self) -> list[str]:
        """Who was refused, why and how often: the last few."""
        return [
            f"{address}: {reason}" + (f" ({count} times)" if count > 1 else "")
            for (address, reason), count in self._refusals.items()
        ]

    def leave_out(self, names: Collection[str]) -> None:
        """Turn certain parties away from now on; the loop's lock must be held."""
        self._outside |= dict.fromkeys(names, -math.inf)

    def calling(self, within_s: float) -> tuple[str, ...]:
        """Return who of those that are left out has called within the last so many seconds."""
        since = time.monotonic() - within_s
        return tuple(name for name, called in self._outside.items() if called >= since)

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
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._callers:
                self._dismiss(next(iter(self._callers)))  # no handle is left for a new caller
            return  # or the caller hung up between the notice and the call
        place = str(address[0])
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            raw.close()
            return
        caller = _Caller(raw, address=place, now=time.monotonic())
        caller.deadline += min(self._loop.limits.handshake_timeout_s, _FIRST_BYTES_S)
        self._make_room(place)
        self._callers[caller] = None
        self._loop.selector.register(raw, selectors.EVENT_READ, lambda: self._hear(caller))

    def _make_room(self, place: str) -> None:
        """Send the oldest caller away of the address that holds too much, if one does."""
        held: dict[str, list[_Caller]] = {}
        for caller in self._callers:
            held.setdefault(_origin(caller.address), []).append(caller)
        own = held.get(_origin(place), [])
        if len(own) >= _MAX_CALLERS_OF_ADDRESS:
            crowd = own
        elif len(self._callers) >= _MAX_CALLERS:
            crowd = max(held.values(), key=len)
        else:
            return
        # Who was refused has heard why; who has said nothing is no party, or a slow one.
        first = min(
            crowd, key=lambda caller: (not caller.refused, caller.has_spoken, caller.called)
        )
        if not first.refused:
            self._note(first.address, "was sent away for want of room: too many calls at once")
        self._dismiss(first)

    def _hear(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # sent away since the system told of its bytes
        if caller.refused:
            self._linger(caller)
            return
        if not caller.has_spoken and not self._begin_tls(caller):
            return
        connection = caller.socket
        assert isinstance(connection, ssl.SSLSocket)
        try:
            connection.do_handshake()
            self._admit(caller, connection)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._refuse(caller, in_plain_words(error))
        except (SecureVflError, ValueError) as error:
            self._refuse(caller, str(error))

    def _begin_tls(self, caller: _Caller) -> bool:
        """Give a caller that has spoken a TLS connection; return whether it has one now."""
        raw = caller.socket
        try:
            spoken = raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            spoken = b""
        # Unknown to the selector before Python's TLS takes its handle over, or closes it.
        self._loop.selector.unregister(raw)
        try:
            if not spoken:
                raise ConnectionResetError
            # Raises too, if the caller has hung up since.
            caller.socket = self._context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except (OSError, ValueError):
            raw.close()
            del self._callers[caller]
            self._note(caller.address, "hung up at once")
            return False
        caller.has_spoken = True
        caller.deadline = caller.called + self._loop.limits.handshake_timeout_s
        self._loop.selector.register(
            caller.socket, selectors.EVENT_READ, lambda: self._hear(caller)
        )
        return True

    def _admit(self, caller: _Caller, connection: ssl.SSLSocket) -> None:
        name = self._names.get(peer_public_text(connection))
        if name is None:
            self._refuse(caller, "its key is pinned for no secondary")
            return
        # Held until it is among the connections: nobody comes in while it is settled who is there.
        with self._loop.changed:
            if name in self._outside:
                self._outside[name] = time.monotonic()
                said = "is lost to the others, who go on without it; it may join when an epoch ends"
                self._turn_away(
                    caller, connection, name, said, "lost", note=f"{name} came too late"
                )
            elif name in self._loop.connections:
                said = f"a party of this name has joined already, so this second {name} was refused"
                note = f"{name} had joined already"
                self._turn_away(caller, connection, name, said, "twice", note=note)
            else:
                self._let_in(caller, connection, name)

    def _let_in(self, caller: _Caller, connection: ssl.SSLSocket, name: str) -> None:
        del self._callers[caller]
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
            limits=self._loop.limits,
        )
        greeting = SessionStart(rank=self._ranks[name]).to_message()
        admitted.outgoing.append(Outgoing(encode(greeting)))
        admitted.unread = True  # TLS may have read the party's first frame with the handshake
        self._loop.add(admitted)

    def _turn_away(
        self,
        caller: _Caller,
        connection: ssl.SSLSocket,
        name: str,
        reason: str,
        kind: FailureKind,
        *,
        note: str,
    ) -> None:
        # A party that has lost its connection may know it before the primary does: it calls again.
        abort = encode(Failure(party=name, reason=reason, kind=kind).to_message())
        for buffer in abort.frame(session=self._session, sender_rank=PRIMARY_RANK, sequence=0):
            connection.send(buffer)  # a few hundred bytes always fit into a new connection
        self._refuse(caller, note)

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
        self._loop.selector.register(raw, selectors.EVENT_READ, lambda: self._hear(caller))
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
        del self._callers[caller]
        self._loop.selector.unregister(caller.socket)
        caller.socket.close()

    def _note(self, address: str, reason: str) -> None:
        """Count a refusal; the one that was noted longest ago makes room."""
        key = (address, reason)
        self._refusals[key] = self._refusals.pop(key, 0) + 1
        if len(self._refusals) > _MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
