"""The thread that owns a party's sockets: bytes, heartbeats, and the first failure.

It keeps the connections alive while the party's own thread computes. The first failure, of any
origin, is stored, sent to every peer that can be reached, and raised by every wait of this party.
"""

import errno
import ipaddress
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, ProtocolError, SecureVflError
from securevfl.transport.connection import (
    HEARTBEATS_PER_SILENCE,
    Connection,
    Outgoing,
    Purpose,
    TransportLimits,
    broken_in_words,
    in_plain_words,
    other_purpose,
    peer_public_text,
)
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import (
    Failure,
    Leave,
    Message,
    Ping,
    SessionStart,
    StarKind,
    require_empty,
)

_DRAIN_BYTES: Final = 1 << 16


class StarLoop:
    """The socket loop of one party, which owns all its connections.

    Args:
        own_name: This party's name, as the origin of its failures.
        relays: Whether this party is the primary, which forwards a party's failure to all others.
        limits: Timeouts and sizes.
    """

    def __init__(self, *, own_name: str, relays: bool, limits: TransportLimits) -> None:
        self.changed = threading.Condition()
        """Notified whenever a message, a failure or a party came, a message went out, or a caller
        was refused."""
        self.connections: dict[str, Connection] = {}
        self.selector = selectors.DefaultSelector()
        self.limits = limits
        self.door: Doorkeeper | None = None
        self._own_name = own_name
        self._relays = relays
        self._failure: Failure | None = None
        self._heard_by_abort = False
        self._closing = False
        self._farewell_deadline: float | None = None
        self._flushed: set[str] = set()
        self._gone: set[str] = set()
        self.news = False
        """Whether this turn ends with a notice to those who wait."""
        self._heartbeat_s = limits.silence_timeout_s / HEARTBEATS_PER_SILENCE
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self.selector.register(self._wake_receive, selectors.EVENT_READ, self._woken)
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="securevfl-star", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._last_turn = time.monotonic()
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """The first failure of the federation that this party knows of."""
        return self._failure

    @property
    def ending(self) -> bool:
        """Whether the federation is over, successfully or not."""
        return self._closing or self._failure is not None

    def wake(self) -> None:
        """Make the thread check its queues now."""
        try:
            self._wake_send.send(b"\0")
        except (BlockingIOError, OSError):
            return  # enough wake-ups wait already, or the thread has ended

    def fail(self, failure: Failure, *, reported_by_peer: bool = False) -> Failure:
        """Record a failure and notify peers; return the first failure, this or an earlier one.

        Args:
            failure: The failure.
            reported_by_peer: Whether a peer has reported it, so that it need not be notified.
        """
        with self.changed:
            if self._failure is None and not self._closing:
                self._failure = failure
                self._heard_by_abort = reported_by_peer
            first = self._failure or failure
            self.changed.notify_all()
        self.wake()
        return first

    def add(self, connection: Connection) -> None:
        """Add an authenticated connection to the loop."""
        with self.changed:
            self.connections[connection.peer] = connection
            self._listen(connection)
            self.changed.notify_all()
        self.wake()

    def close(self) -> None:
        """Send queued messages and a farewell, and end the thread; may be called again."""
        with self.changed:
            self._closing = True
        self.wake()
        if self._thread.ident is None:
            self._release_sockets()
        else:
            # The farewell has its own timeout; the rest is for a busy machine.
            self._thread.join(timeout=2 * self.limits.farewell_timeout_s + 10)

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._turn()
        except Exception as error:
            # A bug here must not make the party's own thread wait for ever.
            text = f"its transport broke by an unexpected {type(error).__name__}"
            self.fail(Failure(party=self._own_name, reason=text))
            raise
        finally:
            self._release_sockets()
            with self.changed:
                self.changed.notify_all()

    def _turn(self) -> None:
        for connection in self.connections.values():
            if connection.full and connection.has_room:
                self._set_full(connection, full=False)
        busy = any(
            (c.unread and not c.full) or (c.has_output and not c.blocked)
            for c in self.connections.values()
        )
        for key, _ in self.selector.select(0 if busy else self._heartbeat_s / 2):
            key.data()
        now = time.monotonic()
        # One bounded read for each peer, so that no peer delays others, or sending.
        for connection in list(self.connections.values()):
            if connection.unread and not connection.full:
                self._read(connection)
        if self.ending and self._farewell_deadline is None:
            self._begin_farewell(now)
        for connection in list(self.connections.values()):
            self._write(connection, now)
        if self._farewell_deadline is None:
            self._watch(now)
            if self.door is not None:
                self.door.tick(now)
        self._last_turn = now
        if self.news:
            self.news = False
            with self.changed:
                self.changed.notify_all()

    def _woken(self) -> None:
        try:
            self._wake_receive.recv(_DRAIN_BYTES)
        except BlockingIOError:
            return

    def _listen(self, connection: Connection) -> None:
        """Register the events that the connection waits for."""
        events = 0 if connection.full else selectors.EVENT_READ
        if connection.blocked:
            events |= selectors.EVENT_WRITE
        known = self.selector.get_map().get(connection.socket)
        if known is not None:
            if known.events == events:
                return
            self.selector.unregister(connection.socket)
        if events:
            self.selector.register(connection.socket, events, lambda: _mark_unread(connection))

    def _set_full(self, connection: Connection, *, full: bool) -> None:
        """Stop or resume reading a socket, and report it to the peer."""
        connection.full = full
        self._listen(connection)
        connection.outgoing.appendleft(_heartbeat(connection))

    def _read(self, connection: Connection) -> None:
        if connection.peer in self._gone:
            return
        if self._farewell_deadline is not None:
            self._drain(connection)
            return
        if self.ending:
            connection.unread = False  # the farewell begins in this very turn
            return
        was_full = connection.full
        try:
            messages = connection.read(time.monotonic())
            for message in messages:
                self._take(connection, message)
        except ProtocolError as error:
            if connection.peer_left:
                self._forget(connection)
                return
            text = str(error).removeprefix(f"{connection.peer}: ")
            self.fail(Failure(party=connection.peer, reason=text, kind="protocol"))
            return
        self.news = self.news or bool(messages)
        if connection.ended:
            self._lost(connection, connection.end_reason)
        elif connection.full and not was_full:
            self._set_full(connection, full=True)

    def _take(self, connection: Connection, message: Message) -> None:
        require_empty(message)
        if message.kind is StarKind.PING:
            connection.heard_ping(time.monotonic(), full=Ping.from_message(message).full)
            return
        if message.kind is StarKind.ABORT:
            failure = Failure.from_message(message, relayed=not self._relays)
            self.fail(failure, reported_by_peer=True)
        elif message.kind is StarKind.LEAVE:
            if connection.peer_left:
                raise ProtocolError(f"{connection.peer}: sent LEAVE twice")
            connection.peer_left = True
        elif message.kind is StarKind.SESSION:
            raise ProtocolError(f"{connection.peer}: sent SESSION twice")
        else:
            connection.keep(message)

    def _lost(self, connection: Connection, reason: str) -> None:
        self._forget(connection)
        if not connection.peer_left:
            self.fail(Failure(party=connection.peer, reason=reason, kind="lost"))

    def _forget(self, connection: Connection) -> None:
        connection.ended = True
        connection.unread = False
        connection.drop_unsent()
        if connection.peer not in self._gone:
            self._gone.add(connection.peer)
            if connection.socket in self.selector.get_map():
                self.selector.unregister(connection.socket)
            connection.socket.close()
        self.news = True

    def _write(self, connection: Connection, now: float) -> None:
        if connection.peer in self._gone or connection.peer in self._flushed:
            return
        was_blocked = connection.blocked
        try:
            self.news |= connection.write(now)
        except OSError as error:
            # The party's last message may give the reason: read it first.
            if self._farewell_deadline is None:
                self._read(connection)
            if not connection.ended:
                self._lost(connection, f"its connection broke: {broken_in_words(error)}")
            return
        if connection.blocked != was_blocked:
            self._listen(connection)
        if self._farewell_deadline is not None and not connection.has_output:
            self._flushed.add(connection.peer)
            connection.half_close()

    def _watch(self, now: float) -> None:
        """Send heartbeats, and detect parties that are silent or do not read."""
        limit = self.limits.silence_timeout_s
        stopped = now - self._last_turn > limit / 2
        for connection in self.connections.values():
            if connection.ended:
                continue
            if stopped:  # this process itself was stopped, so no peer is to blame
                connection.forgive(now)
            connection.excuse(now)
            rate = connection.rate(now, over_s=limit)
            if now - connection.last_heard > limit and not connection.peer_left:
                text = f"gave no sign of life for {limit:g} s"
                self.fail(Failure(party=connection.peer, reason=text, kind="timeout"))
            elif now - connection.last_progress > limit:
                text = f"took in nothing of what was sent to it for {limit:g} s"
                self.fail(Failure(party=connection.peer, reason=text, kind="timeout"))
            elif rate is not None and rate < self.limits.lowest_rate:
                text = (
                    f"took in {rate:,.0f} bytes a second of what was sent to it, over {limit:g} s; "
                    f"the lowest rate is {self.limits.lowest_rate:,.0f}"
                )
                self.fail(Failure(party=connection.peer, reason=text, kind="timeout"))
            elif now - connection.last_sent > self._heartbeat_s and not connection.has_output:
                connection.outgoing.append(_heartbeat(connection))
                self._write(connection, now)

    def _begin_farewell(self, now: float) -> None:
        self._farewell_deadline = now + self.limits.farewell_timeout_s
        if self.door is not None:
            self.door.stop()
        last = self._failure.to_message() if self._failure else Leave().to_message()
        for connection in self.connections.values():
            if self._failure is not None:
                connection.drop_unsent()
            if self._relays or not self._heard_by_abort:
                connection.outgoing.append(Outgoing(encode(last)))
            if connection.full and connection.peer not in self._gone:
                connection.full = False  # later messages are dropped
                self._listen(connection)

    def _drain(self, connection: Connection) -> None:
        """Drop bytes that still arrive: closing with unread bytes would lose our last message."""
        connection.unread = False
        try:
            if connection.socket.recv(_DRAIN_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # TLS has its own errors for "try again"; the next turn detects the end
        else:
            self._forget(connection)
            return
        if connection.peer in self._flushed:
            self._forget(connection)

    def _is_finished(self) -> bool:
        if self._farewell_deadline is None:
            return False
        # No farewell is expected of a party that was lost by silence.
        failure = self._failure
        lost = failure.party if failure is not None and failure.kind == "timeout" else ""
        done = all(peer in self._gone or peer == lost for peer in self.connections)
        return done or time.monotonic() > self._farewell_deadline

    def _release_sockets(self) -> None:
        if self.door is not None:
            self.door.stop()
        for connection in self.connections.values():
            connection.ended = True
            connection.socket.close()
        self.selector.close()
        self._wake_receive.close()
        self._wake_send.close()


def _mark_unread(connection: Connection) -> None:
    connection.unread = True


def _heartbeat(connection: Connection) -> Outgoing:
    return Outgoing(encode(Ping(full=connection.full).to_message()))


# Most callers in the handshake at a time, and of one address. Many parties may call from one
# address at once; a caller that is refused for lack of room calls again.
_MAX_CALLERS: Final = 64
_MAX_CALLERS_OF_ADDRESS: Final = 16
_BACKLOG: Final = 128
# Seconds for a caller's first bytes, which follow at once; the rest of the handshake needs
# computing.
_FIRST_BYTES_S: Final = 3.0
# Refusals that are kept for the message about a party that never came.
_MAX_REFUSALS: Final = 8
# The owner of an IPv6 address has the whole network.
_IPV6_NETWORK: Final = 64
# Seconds that a refused caller's socket stays open, so that it can read the reason.
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 1 << 16


def open_listener(address: tuple[str, int]) -> socket.socket:
    """Open the primary's listening socket.

    Raises:
        ConfigError: If the address is in use, not this machine's, or no address.
    """
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python adds the address to the system's text, which is named here already.
        named = isinstance(error, socket.gaierror) or not error.errno
        why = (error.strerror or error) if named else os.strerror(error.errno or 0)
        raise ConfigError(
            f"address {host}:{port}: cannot be listened on ({why}); "
            f"choose another one for the primary"
        ) from None
    listener.setblocking(False)
    return listener


class _Caller:
    """A caller that has not proved its identity yet, or was refused."""

    def __init__(self, connection: socket.socket, *, address: str, now: float) -> None:
        self.socket = connection
        self.address = address
        self.called = now
        self.deadline = now
        """End of this phase of the call."""
        self.has_spoken = False
        self.refused = False


def _origin(address: str) -> str:
    """Return the address, or IPv6 network, that counts as one caller."""
    try:
        place = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(place, ipaddress.IPv6Address):
        mapped = place.ipv4_mapped
        network = ipaddress.ip_network((place, _IPV6_NETWORK), strict=False)
        return str(mapped or network)
    return str(place)


@dataclass(kw_only=True, eq=False)
class Doorkeeper:
    """Accepts calls in the thread of a :class:`StarLoop`, and admits each pinned party once."""

    loop: StarLoop
    """Loop that gets admitted connections."""
    listener: socket.socket
    """Listening socket from :func:`open_listener`."""
    context: ssl.SSLContext
    """TLS 1.3, demanding a certificate."""
    names: Mapping[str, str]
    """Party name by pinned public text, for the secondaries."""
    ranks: Mapping[str, int]
    """Rank by party name."""
    session: bytes
    """The id that every frame of this session carries."""
    purpose: Purpose
    """Purpose of the calls; others are refused, and may call again."""

    def __post_init__(self) -> None:
        self._refusals: dict[tuple[str, str], int] = {}
        self._busy: dict[str, str] = {}
        self._callers: dict[_Caller, None] = {}  # in the order of their calls
        self.loop.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    @property
    def refusals(self) -> list[str]:
        """The last refusals: address, reason and count."""
        return [
            f"{address}: {reason}" + (f" ({count} times)" if count > 1 else "")
            for (address, reason), count in self._refusals.items()
        ]

    @property
    def busy(self) -> Mapping[str, str]:
        """By party: what it does instead, where its last call had another purpose."""
        return dict(self._busy)

    def tick(self, now: float) -> None:
        """Dismiss callers whose time is over."""
        for caller in [caller for caller in self._callers if now > caller.deadline]:
            if not caller.refused:
                self._note(caller.address, "did not prove its identity in time")
            self._dismiss(caller)

    def stop(self) -> None:
        """Stop listening and dismiss all callers."""
        for caller in list(self._callers):
            self._dismiss(caller)
        if self.listener.fileno() >= 0:
            self.loop.selector.unregister(self.listener)
            self.listener.close()

    def _accept(self) -> None:
        try:
            raw, address = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._callers:
                self._dismiss(next(iter(self._callers)))  # no handle is left for another
            return  # or the caller hung up meanwhile
        place = str(address[0])
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            raw.close()
            return
        caller = _Caller(raw, address=place, now=time.monotonic())
        caller.deadline += min(self.loop.limits.handshake_timeout_s, _FIRST_BYTES_S)
        self._make_room(place)
        self._callers[caller] = None
        self.loop.selector.register(raw, selectors.EVENT_READ, lambda: self._hear(caller))

    def _make_room(self, place: str) -> None:
        """Dismiss the oldest caller of an address with too many callers, if there is one."""
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
        # Refused callers have had the reason; silent ones are no party, or a slow one.
        first = min(
            crowd, key=lambda caller: (not caller.refused, caller.has_spoken, caller.called)
        )
        if not first.refused:
            self._note(first.address, "was sent away for want of room: too many calls at once")
        self._dismiss(first)

    def _hear(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # dismissed meanwhile
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
        """Start TLS with a caller that has sent bytes; return whether it succeeded."""
        raw = caller.socket
        try:
            spoken = raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            spoken = b""
        # Unregistered before Python's TLS takes over the file descriptor, or closes it.
        self.loop.selector.unregister(raw)
        try:
            if not spoken:
                raise ConnectionResetError
            # This raises too if the caller has hung up.
            caller.socket = self.context.wrap_socket(
                raw, server_side=True, do_handshake_on_connect=False
            )
        except (OSError, ValueError):
            raw.close()
            del self._callers[caller]
            self._note(caller.address, "hung up at once")
            return False
        caller.has_spoken = True
        caller.deadline = caller.called + self.loop.limits.handshake_timeout_s
        self.loop.selector.register(caller.socket, selectors.EVENT_READ, lambda: self._hear(caller))
        return True

    def _admit(self, caller: _Caller, connection: ssl.SSLSocket) -> None:
        name = self.names.get(peer_public_text(connection))
        if name is None:
            self._refuse(caller, "its key is pinned for no secondary")
            return
        if (busy := other_purpose(connection, self.purpose)) is not None:
            self._busy[name] = f"{name} {busy}"
            self._refuse(caller, self._busy[name])
            return
        # Held until the party is among the connections, so that the set of parties does not change
        # meanwhile.
        with self.loop.changed:
            if name in self.loop.connections:
                self._turn_away(caller, connection, name)
            else:
                self._let_in(caller, connection, name)

    def _let_in(self, caller: _Caller, connection: ssl.SSLSocket, name: str) -> None:
        del self._callers[caller]
        self._busy.pop(name, None)
        self.loop.selector.unregister(connection)
        admitted = Connection(
            peer=name,
            socket=connection,
            reader=FrameReader(
                peer=name,
                sender_rank=self.ranks[name],
                session=self.session,
                max_body_bytes=self.loop.limits.max_message_bytes,
            ),
            session=self.session,
            own_rank=PRIMARY_RANK,
            limits=self.loop.limits,
        )
        greeting = SessionStart(rank=self.ranks[name]).to_message()
        admitted.outgoing.append(Outgoing(encode(greeting)))
        admitted.unread = True  # TLS may have read the party's first frame with the handshake
        self.loop.add(admitted)

    def _turn_away(self, caller: _Caller, connection: ssl.SSLSocket, name: str) -> None:
        """Say to a second one of a name why it is refused.

        A party may notice its lost connection before the primary does, and call again.
        """
        reason = f"a party of this name has joined already, so this second {name} was refused"
        abort = encode(Failure(party=name, reason=reason, kind="twice").to_message())
        for buffer in abort.frame(session=self.session, sender_rank=PRIMARY_RANK, sequence=0):
            connection.send(buffer)  # a few hundred bytes always fit into a new connection's buffer
        self._refuse(caller, f"{name} had joined already")

    def _refuse(self, caller: _Caller, reason: str) -> None:
        """Refuse a caller, but read on for a moment, so that a reset does not lose the alert."""
        self._note(caller.address, reason)
        assert isinstance(caller.socket, ssl.SSLSocket)
        self.loop.selector.unregister(caller.socket)
        raw = socket.socket(fileno=caller.socket.detach())
        raw.setblocking(False)
        caller.socket = raw
        caller.refused = True
        caller.deadline = time.monotonic() + _LINGER_S
        self.loop.selector.register(raw, selectors.EVENT_READ, lambda: self._hear(caller))
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
        self.loop.selector.unregister(caller.socket)
        caller.socket.close()

    def _note(self, address: str, reason: str) -> None:
        """Count a refusal, and drop the oldest if there are too many."""
        key = (address, reason)
        self._refusals[key] = self._refusals.pop(key, 0) + 1
        self.loop.news = True
        if len(self._refusals) > _MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
