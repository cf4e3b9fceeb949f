"""The one thread of a party that owns its sockets: bytes, heartbeats, the first failure.

The party's own thread computes; this one keeps the connections alive meanwhile. The first
failure, from wherever it comes, is kept, told to every peer that can still be reached and raised
by every wait of this party.
"""

import selectors
import socket
import threading
import time
from typing import Final, Protocol, runtime_checkable

from securevfl.core.errors import ProtocolError
from securevfl.transport.connection import (
    HEARTBEATS_PER_SILENCE,
    Connection,
    Outgoing,
    TransportLimits,
)
from securevfl.transport.framing import encode
from securevfl.transport.identity import broken_in_words
from securevfl.transport.message import Failure, Leave, Message, Ping, StarKind

_DRAIN_BYTES: Final = 1 << 16


@runtime_checkable
class Service(Protocol):
    """What else lives in the thread: the primary's open door."""

    def tick(self, now: float) -> None:
        """Look after deadlines; called every turn."""
        ...

    def stop(self) -> None:
        """Close everything; called once."""
        ...


class StarLoop:
    """Owns every connection of one party; see the module's text.

    Args:
        own_name: This party, named as the origin of its own failures.
        relays: Whether this party is the primary, which tells everybody what it hears from one.
        limits: Deadlines and sizes.
    """

    def __init__(self, *, own_name: str, relays: bool, limits: TransportLimits) -> None:
        self.changed = threading.Condition()
        """Notified whenever a message, a failure or a party came, or a message went out."""
        self.connections: dict[str, Connection] = {}
        self.selector = selectors.DefaultSelector()
        self.limits = limits
        self.service: Service | None = None
        self._own_name = own_name
        self._relays = relays
        self._failure: Failure | None = None
        self._heard_by_abort = False
        self._closing = False
        self._farewell_deadline: float | None = None
        self._flushed: set[str] = set()
        self._gone: set[str] = set()
        self._news = False
        self._heartbeat_s = limits.silence_timeout_s / HEARTBEATS_PER_SILENCE
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self.selector.register(self._wake_receive, selectors.EVENT_READ, self._woken)
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="securevfl-star", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._last_turn = time.monotonic()
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """The first failure of the federation that this party knows of."""
        return self._failure

    @property
    def ending(self) -> bool:
        """Whether the federation is over, well or badly."""
        return self._closing or self._failure is not None

    def wake(self) -> None:
        """Make the thread look at its queues now."""
        try:
            self._wake_send.send(b"\0")
        except (BlockingIOError, OSError):
            return  # enough wake-ups wait already, or the thread has ended

    def fail(self, failure: Failure, *, heard: bool = False) -> Failure:
        """Record the first failure and tell the peers; return the one that was first.

        Args:
            failure: What happened.
            heard: Whether a peer told it, so that this peer need not be told.
        """
        with self.changed:
            if self._failure is None and not self._closing:
                self._failure = failure
                self._heard_by_abort = heard
            first = self._failure or failure
            self.changed.notify_all()
        self.wake()
        return first

    def add(self, connection: Connection) -> None:
        """Serve an authenticated connection from now on."""
        with self.changed:
            self.connections[connection.peer] = connection
            self._listen(connection)
            self.changed.notify_all()
        self.wake()

    def close(self) -> None:
        """Deliver what waits, say farewell and end the thread; safe to call again."""
        with self.changed:
            self._closing = True
        self.wake()
        if self._thread.ident is None:
            self._release_sockets()
        else:
            # The farewell has its own deadline; the rest is what a busy machine may need.
            self._thread.join(timeout=2 * self.limits.farewell_timeout_s + 10)

    def _run(self) -> None:
        try:
            while not self._finished():
                self._turn()
        except Exception as error:
            # A bug here must not leave the party's own thread waiting for ever.
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
        # One bounded read each: nobody's bytes keep another's, or what is to be sent, waiting.
        for connection in list(self.connections.values()):
            if connection.unread and not connection.full:
                self._read(connection)
        if self.ending and self._farewell_deadline is None:
            self._begin_farewell(now)
        for connection in list(self.connections.values()):
            self._write(connection, now)
        if self._farewell_deadline is None:
            self._watch(now)
            if self.service is not None:
                self.service.tick(now)
        self._last_turn = now
        if self._news:
            self._news = False
            with self.changed:
                self.changed.notify_all()

    def _woken(self) -> None:
        try:
            self._wake_receive.recv(_DRAIN_BYTES)
        except BlockingIOError:
            return

    def _listen(self, connection: Connection) -> None:
        """Ask the system for what the connection waits for."""
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
        """Leave a socket alone, or listen to it again, and say so to the peer."""
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
        self._news = self._news or bool(messages)
        if connection.ended:
            self._lost(connection, connection.end_reason)
        elif connection.full and not was_full:
            self._set_full(connection, full=True)

    def _take(self, connection: Connection, message: Message) -> None:
        if message.kind is StarKind.PING:
            connection.heard_ping(time.monotonic(), full=Ping.from_message(message).full)
            return
        if message.kind is StarKind.ABORT:
            failure = Failure.from_message(
                message, relayed=not self._relays, receiver=self._own_name
            )
            self.fail(failure, heard=True)
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
        self._news = True

    def _write(self, connection: Connection, now: float) -> None:
        if connection.peer in self._gone or connection.peer in self._flushed:
            return
        was_blocked = connection.blocked
        try:
            self._news |= connection.write(now)
        except OSError as error:
            # What the party sent before it went may say why: read that first.
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
        """Send heartbeats, and find the parties that send none."""
        limit = self.limits.silence_timeout_s
        stopped = now - self._last_turn > limit / 2
        for connection in self.connections.values():
            if connection.ended:
                continue
            if stopped:  # it was this process that stood still, and nobody else is to blame
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
        if self.service is not None:
            self.service.stop()
        last = self._failure.to_message() if self._failure else Leave().to_message()
        for connection in self.connections.values():
            if self._failure is not None:
                connection.drop_unsent()
            if self._relays or not self._heard_by_abort:
                connection.outgoing.append(Outgoing(encode(last)))
            if connection.full and connection.peer not in self._gone:
                connection.full = False  # what still comes is dropped
                self._listen(connection)

    def _drain(self, connection: Connection) -> None:
        """Drop what still arrives: closing with unread bytes would lose our last message."""
        connection.unread = False
        try:
            if connection.socket.recv(_DRAIN_BYTES):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass  # TLS says "try again" with errors of its own; the end shows in the next turn
        else:
            self._forget(connection)
            return
        if connection.peer in self._flushed:
            self._forget(connection)

    def _finished(self) -> bool:
        if self._farewell_deadline is None:
            return False
        # Nobody waits for the goodbye of a party that is lost because it was silent.
        failure = self._failure
        lost = failure.party if failure is not None and failure.kind == "timeout" else ""
        done = all(peer in self._gone or peer == lost for peer in self.connections)
        return done or time.monotonic() > self._farewell_deadline

    def _release_sockets(self) -> None:
        if self.service is not None:
            self.service.stop()
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
