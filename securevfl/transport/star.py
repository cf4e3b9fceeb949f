"""The star of connections: secondaries dial out to the primary's only open port.

Both ends can send, receive with a timeout, abort and close.
"""

import contextlib
import math
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, TypeVar

from securevfl.core import checks, errors, interrupts
from securevfl.core.conventions import PRIMARY_RANK
from securevfl.transport.connection import (
    Connection,
    Outgoing,
    Purpose,
    TransportLimits,
    check_pins,
    in_plain_words,
    other_purpose,
    own_certificate_refused,
    peer_public_text,
    tls_context,
)
from securevfl.transport.framing import SESSION_BYTES, EncodedMessage, FrameReader, encode
from securevfl.transport.identity import Identity
from securevfl.transport.message import (
    Failure,
    FailureKind,
    Message,
    MessageKind,
    SessionStart,
    StarKind,
    failure_kind,
    public_reason,
)
from securevfl.transport.socket_loop import Doorkeeper, StarLoop, open_listener

# Seconds between calls without an answer, and at most between calls that fail after an answer,
# which cost the other end a handshake each.
_REDIAL_S: Final = 0.1
_LONGEST_REDIAL_S: Final = 1.0
# Seconds for the primary to hang up after it got this party's reason for leaving.
_LAST_WORD_S: Final = 1.0
_READ_BYTES: Final = 1 << 14


class _CallFailedError(Exception):
    """A call failed, and a later one may succeed.

    Attributes:
        text: Why, in plain words.
        telling: How close it is to the true cause: 0 without an answer, 1 with an answer, 2 if an
            identity was not accepted.
        busy: Whether the other end is there and does something else.
    """

    def __init__(self, text: str, *, telling: int, busy: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.telling = telling
        self.busy = busy


def _gave_up(
    place: str, best: _CallFailedError, last: _CallFailedError, *, calls: int, deadline_s: float
) -> errors.ProtocolError:
    """Return the error for the most telling failed call, and for the last one if it differs."""
    at_last = f"; the last of {calls} calls: {last.text}" if last.text != best.text else ""
    if best.telling == 0:
        return errors.PartyAbsentError(
            f"{place}: did not answer within {deadline_s:g} s ({best.text}); is the primary "
            f"running, and its port reachable from here?"
        )
    within = f"did not let this party in within {deadline_s:g} s and {calls} calls: {best.text}"
    if best.telling == 1:
        return errors.PartyAbsentError(
            f"{place}: {within}{at_last}; is the primary up behind this address, or does another "
            f"service answer there?"
        )
    return errors.AuthenticationError(f"{place}: {within}{at_last}")


def _as_failed_call(error: BaseException) -> _CallFailedError | None:
    """Return the failed call for an error; None if the error must end the attempts."""
    if isinstance(error, TimeoutError):
        return _CallFailedError("it answered the call and then said nothing", telling=1)
    if isinstance(error, errors.AuthenticationError | ssl.SSLCertVerificationError):
        text = in_plain_words(error) if isinstance(error, OSError) else str(error)
        return _CallFailedError(text, telling=2)
    if isinstance(error, OSError) and own_certificate_refused(error):
        return _CallFailedError(
            f"it did not accept this party: {in_plain_words(error)}; does its trust folder "
            f"hold this party's certificate, and the federation file its identity?",
            telling=2,
        )
    if isinstance(error, OSError):
        text = f"it answered the call, and then {in_plain_words(error)}"
        return _CallFailedError(text, telling=1)
    return error if isinstance(error, _CallFailedError) else None


def _next_message(connection: ssl.SSLSocket, reader: FrameReader) -> Message:
    while (message := reader.message()) is None:
        count = connection.recv_into(reader.target())
        if count == 0:
            raise _CallFailedError("it hung up before it named the session", telling=1)
        reader.advance(count)
    if message.kind is StarKind.ABORT:
        raise Failure.from_message(message, relayed=True).error()
    return message


# A wait wakes up this often, in case a notification was lost.
LONGEST_NAP_S: Final = 1.0


class _Turn(NamedTuple):
    """A wait for parties whose turn it is."""

    begin: float
    """Start of the wait, by ``time.monotonic``."""
    until: float
    """End of the wait, by ``time.monotonic``."""
    within: str
    """Length of the wait, in words."""


_Self = TypeVar("_Self", bound="Transport")
Kinds = MessageKind | Collection[MessageKind]


class Transport:
    """Base of both ends of the star."""

    session: bytes
    """The session's id; empty until a secondary is connected."""

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        pinned: Mapping[str, str],
        ranks: Mapping[str, int],
        *,
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
        purpose: Purpose = "securevfl-run",
    ) -> None:
        self.name = identity.name
        self._purpose = purpose
        self.ranks = dict(ranks)
        primaries = [name for name, rank in ranks.items() if rank == PRIMARY_RANK]
        if len(primaries) != 1 or len(set(ranks.values())) != len(ranks):
            raise errors.ConfigError(
                f"ranks: must be unique, with one party of rank 0; got {dict(ranks)}"
            )
        if identity.name not in ranks:
            raise errors.ConfigError(
                f"{identity.name}: is no party of this federation: {sorted(ranks)}"
            )
        self.primary = primaries[0]
        self.secondaries = tuple(name for name in ranks if name != self.primary)
        is_primary = identity.name == self.primary
        self._peers = self.secondaries if is_primary else (self.primary,)
        check_pins(identity, pinned, self._peers)
        self._address = address
        self._identity = identity
        self._pinned = dict(pinned)
        self.limits = limits
        """Deadlines, and the sizes that it began with."""
        self._loop = StarLoop(own_name=identity.name, relays=is_primary, limits=limits)
        self._waited_s = 0.0
        self.patient: frozenset[str] = frozenset()
        """Peers that wait for this party for as long as it takes."""

    @property
    def failure(self) -> Failure | None:
        """The first failure of the federation that this party knows of, or None."""
        return self._loop.failure

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes of frames given to TLS, by peer; TLS adds 22 to each 16 KiB."""
        return {name: peer.bytes_sent for name, peer in list(self._loop.connections.items())}

    @property
    def bytes_received(self) -> dict[str, int]:
        """Bytes of frames taken from TLS, by peer."""
        return {name: peer.bytes_received for name, peer in list(self._loop.connections.items())}

    def widen(self, limits: TransportLimits) -> None:
        """Accept larger and more messages of all peers from now on.

        Args:
            limits: Limits after the greeting; only the sizes are used.
        """
        for connection in list(self._loop.connections.values()):
            connection.widen(limits)
        self._loop.wake()

    def abort(self, reason: str, *, kind: FailureKind = "failed") -> None:
        """End the federation by a failure of this party, unless there was an earlier failure.

        Args:
            reason: One sentence without private data.
            kind: Kind of the error that the others raise.

        Reveals:
            To every party: this party's name and the reason.
        """
        self._loop.fail(Failure(party=self.name, reason=reason, kind=kind))

    def check(self) -> None:
        """Raise the federation's failure if there is one; for use in long computations.

        Raises:
            ProtocolError: Or a subclass: a party failed, was silent, or broke the protocol.
            KeyboardInterrupt: If an interrupt is noted.
        """
        interrupts.check()
        if self._loop.failure is not None:
            raise self._loop.failure.error()

    def close(self) -> None:
        """Send queued messages and a farewell, and close; may be called again.

        Reveals:
            To every peer: that this party is done.
        """
        self._loop.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(public_reason(error), kind=failure_kind(error))
        self.close()

    def _fail(self, party: str, reason: str, kind: FailureKind) -> NoReturn:
        raise self._loop.fail(Failure(party=party, reason=reason, kind=kind)).error()

    def _connection(self, name: str) -> Connection:
        connection = self._loop.connections.get(name)
        if connection is None:
            self.check()
            raise errors.ProtocolError(f"{name}: has not joined")
        return connection

    def _post(
        self,
        names: Sequence[str],
        encoded: EncodedMessage,
        *,
        owned: bool,
        deadline_s: float | None = None,
    ) -> None:
        self.check()
        items = [(self._connection(name), Outgoing(encoded)) for name in names]
        self._queue(items)
        if encoded.borrows and not owned:
            most_s = self.limits.busy_timeout_s
            self._wait_sent(items, most_s if deadline_s is None else deadline_s)

    def _queue(self, items: Sequence[tuple[Connection, Outgoing]]) -> None:
        for connection, item in items:
            if connection.peer_left:
                kind = item.encoded.kind.name
                self._fail(connection.peer, f"left before {kind} was sent", "failed")
            connection.outgoing.append(item)
            connection.waited_s = self._waited_s
        self._loop.wake()

    def _wait_sent(self, items: Sequence[tuple[Connection, Outgoing]], deadline_s: float) -> None:
        with self._turn_of({item.peer for item, _ in items}, deadline_s) as turn:
            while waiting := [pair for pair in items if not pair[1].sent]:
                self.check()
                kind = waiting[0][1].encoded.kind.name
                for connection, _ in waiting:
                    if connection.ended and connection.peer_left:
                        self._fail(connection.peer, f"left before it took {kind}", "failed")
                self._wait(turn, {item.peer for item, _ in waiting}, f"did not take {kind} in")

    @contextlib.contextmanager
    def _turn_of(
        self, names: Collection[str], deadline_s: float, *, begin: float | None = None
    ) -> Iterator[_Turn]:
        """Hold the lock while it is the turn of certain peers.

        Waits are added up since any other peer was last in touch, since that peer waits all the
        time: this party's wait ends before the other peer's.

        Args:
            names: Parties whose turn it is.
            deadline_s: Seconds for the turn.
            begin: Start of the wait by ``time.monotonic``; None: now.
        """
        now, busy_s = time.monotonic(), self.limits.busy_timeout_s
        in_touch = [
            connection.waited_s
            for connection in list(self._loop.connections.values())
            if not (
                connection.peer in names or connection.peer in self.patient or connection.peer_left
            )
        ]
        others_s = busy_s - self._waited_s + min(in_touch, default=math.inf)
        until = (now if begin is None else begin) + deadline_s
        within = f"within {deadline_s:g} s"
        if now + others_s < until:
            until, within = now + others_s, f"by when others had waited for {busy_s:g} s"
        try:
            with self._loop.changed:
                yield _Turn(begin=now, until=until, within=within)
        finally:
            self._waited_s += time.monotonic() - now

    def _wait(self, turn: _Turn, late: Collection[str], text: str) -> None:
        """Wait for news; when the turn is over, fail with the late parties and ``text``."""
        left = turn.until - time.monotonic()
        if left <= 0:
            self._fail(", ".join(sorted(late)), f"{text} {turn.within}", "timeout")
        self._loop.changed.wait(min(left, LONGEST_NAP_S))

    def _receive_first(
        self,
        names: Collection[str],
        kinds: Kinds,
        *,
        round_number: int | None,
        deadline_s: float,
        begin: float | None = None,
        turn_of: Collection[str] = (),
    ) -> Message:
        """Return the first message from any of the parties ``names``.

        Args:
            names: The parties.
            kinds: The expected kind or kinds.
            round_number: The message's round; None accepts any.
            deadline_s: Seconds to wait.
            begin: Start of the wait by ``time.monotonic``; None: now.
            turn_of: Those of the parties whose turn it is; default: all.
        """
        wanted = (kinds,) if isinstance(kinds, MessageKind) else tuple(kinds)
        connections = [self._connection(name) for name in names]
        due = " or ".join(kind.name for kind in wanted)
        late = turn_of or names
        with self._turn_of(late, deadline_s, begin=begin) as turn:
            while True:
                self.check()
                for connection in connections:
                    if connection.incoming:
                        message = connection.take()
                        connection.waited_s = self._waited_s + time.monotonic() - turn.begin
                        if connection.full:
                            self._loop.wake()
                        self._expect(message, wanted, round_number)
                        return message
                    # The loop soon reports a broken connection with its reason.
                    if connection.peer_left:
                        self._fail(connection.peer, f"left before it sent {due}", "failed")
                self._wait(turn, late, f"sent no {due}")

    def _expect(
        self, message: Message, wanted: tuple[MessageKind, ...], round_number: int | None
    ) -> None:
        round_fits = round_number is None or message.round_number == round_number
        if message.kind in wanted and round_fits:
            return
        due = " or ".join(kind.name for kind in wanted)
        of_round = "" if round_number is None else f" of round {round_number}"
        came = f"{message.kind.name} of round {message.round_number}"
        text = f"sent {came} where {due}{of_round} was due"
        self._fail(message.sender, text, "protocol")


def new_session() -> bytes:
    """Return a random session id; the primary draws one for every start."""
    return secrets.token_bytes(SESSION_BYTES)


class PrimaryTransport(Transport):
    """The primary's end of the star: admits every pinned secondary once, forwards failures.

    Args:
        address: Host and port to listen on; port 0 lets the system choose a port.
        identity: The primary's identity, which trusts every secondary's certificate.
        pinned: Public text of every party, from the federation file.
        session: 16 bytes, from :func:`new_session`; never used twice.
        ranks: Rank by name; the primary has 0.
        limits: Timeouts and sizes.

    Raises:
        ConfigError: If an identity or certificate is missing or not valid now.
        AuthenticationError: If a certificate is not the pinned one.
    """

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        pinned: Mapping[str, str],
        session: bytes,
        ranks: Mapping[str, int],
        *,
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
        purpose: Purpose = "securevfl-run",
    ) -> None:
        if len(session) != SESSION_BYTES:
            raise errors.ConfigError(f"session: must be {SESSION_BYTES} bytes, got {len(session)}")
        super().__init__(address, identity, pinned, ranks, limits=limits, purpose=purpose)
        self.session = session
        self._door: Doorkeeper | None = None

    def listen(self) -> tuple[str, int]:
        """Open the port, start the loop, and return the address.

        Raises:
            ConfigError: If the address is in use or not this machine's.
        """
        listener = open_listener(self._address)
        host, port = listener.getsockname()[:2]
        self._door = Doorkeeper(
            loop=self._loop,
            listener=listener,
            context=tls_context(self._identity, self._peers, server=True, purpose=self._purpose),
            purpose=self._purpose,
            names={self._pinned[name]: name for name in self.secondaries},
            ranks=self.ranks,
            session=self.session,
        )
        self._loop.door = self._door
        self._loop.start()
        return str(host), int(port)

    def wait_for_parties(
        self,
        deadline_s: float,
        on_join: Callable[[str], None] | None = None,
        stop: Callable[[float], bool] = lambda _waited_s: False,
    ) -> None:
        """Wait until all secondaries have joined, or ``stop`` says so.

        Args:
            deadline_s: Seconds to wait for missing secondaries.
            on_join: Called with each party's name, in this thread, as it joins.
            stop: Called with the seconds waited while some are missing; returns whether to return
                without them.

        Raises:
            PartyAbsentError: Naming missing parties, and refused callers.
            PartyFailedError: If a joined party is lost.

        Reveals:
            To each secondary: the session id and its rank.
        """
        checks.positive(deadline_s=deadline_s)
        begin = time.monotonic()
        announced: set[str] = set()
        while True:
            with self._loop.changed:
                self.check()
                fresh = [name for name in self._loop.connections if name not in announced]
                if not fresh:
                    waited_s = time.monotonic() - begin
                    missing = [name for name in self.secondaries if name not in announced]
                    if not missing or stop(waited_s):
                        return
                    if waited_s >= deadline_s:
                        self._give_up_joining(missing, deadline_s)
                    self._loop.changed.wait(min(deadline_s - waited_s, LONGEST_NAP_S))
            for name in fresh:
                announced.add(name)
                if on_join is not None:
                    on_join(name)

    @property
    def busy(self) -> Mapping[str, str]:
        """By secondary: what it does instead of what this session is for."""
        return {} if self._door is None else self._door.busy

    @property
    def refusals(self) -> list[str]:
        """Refused callers and the reasons, in words."""
        return [] if self._door is None else self._door.refusals

    def send(self, name: str, message: Message, *, owned: bool = False) -> None:
        """Send a message to one secondary.

        Large arrays are not copied, so this waits until TLS has sent them, unless ``owned`` is
        True: the caller will not change them any more.

        Raises:
            PartyTimeoutError: If the message is not read within ``busy_timeout_s``.
            ProtocolError: Or a subclass, for the federation's failure.

        Reveals:
            To the secondary ``name``: the message, as its kind describes; to observers: its size.
        """
        self._post([name], encode(message), owned=owned)

    def broadcast(
        self,
        names: Sequence[str],
        message: Message,
        *,
        owned: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        """Send a message to several secondaries; see :meth:`send`.

        Args:
            names: The secondaries.
            message: The message.
            owned: Whether the caller will not change the arrays any more.
            deadline_s: Seconds for the secondaries to read it; default: ``busy_timeout_s``.

        Reveals:
            To each of ``names``: the message, as its kind describes; to observers: its size.
        """
        self._post(names, encode(message), owned=owned, deadline_s=deadline_s)

    def relay(self, name: str, message: Message, *, received: Message) -> None:
        """Relay one secondary's message to another, without waiting until it is read.

        Until it is sent, it counts among its sender's waiting messages, whose number is bounded.

        Args:
            name: Rank of the receiver.
            message: The message.
            received: The message as it was received.

        Raises:
            ProtocolError: Or a subclass, for the federation's failure.

        Reveals:
            To the secondary ``name``: the message, as its kind describes; to observers: its size.
        """
        self.check()
        origin = self._connection(received.sender)
        passed = origin.pass_on(received, encode(message))
        self._queue([(self._connection(name), passed)])

    def receive(
        self, name: str, kind: Kinds, *, round_number: int | None, deadline_s: float
    ) -> Message:
        """Return the next message of one secondary, which must be of the expected kind and round.

        Args:
            name: The secondary.
            kind: The expected kind or kinds.
            round_number: The message's round; None accepts any.
            deadline_s: Seconds to wait.

        Raises:
            ProtocolError: If another message arrived; all parties are notified.
            PartyTimeoutError: If nothing arrived in time; all parties are notified.
            PartyFailedError: If a party of the federation has failed.

        Reveals:
            Nothing more than the sender has revealed.
        """
        return self._receive_first([name], kind, round_number=round_number, deadline_s=deadline_s)

    def receive_any(
        self,
        names: Sequence[str],
        kind: Kinds,
        *,
        deadline_s: float,
        begin: float | None = None,
        turn_of: Collection[str] = (),
    ) -> Message:
        """Return the first message from any of these secondaries, of any round.

        Args:
            names: The secondaries.
            kind: The expected kind or kinds.
            deadline_s: Seconds to wait.
            begin: Start of the wait by ``time.monotonic``; None: now.
            turn_of: Secondaries whose turn it is, which the error names after a timeout; default:
                all.

        Raises:
            ProtocolError: Or a subclass, as :meth:`receive`.

        Reveals:
            Nothing more than the sender has revealed.
        """
        return self._receive_first(
            names,
            kind,
            round_number=None,
            deadline_s=deadline_s,
            begin=begin,
            turn_of=turn_of,
        )

    def receive_each(
        self, names: Collection[str], kind: Kinds, *, round_number: int | None, deadline_s: float
    ) -> Iterator[Message]:
        """Yield one message of each secondary in the order of arrival, within one common timeout.

        Raises:
            ProtocolError: Or a subclass, as :meth:`receive`.

        Reveals:
            Nothing more than the sender has revealed.
        """
        begin, waiting = time.monotonic(), set(names)
        while waiting:
            message = self._receive_first(
                waiting, kind, round_number=round_number, deadline_s=deadline_s, begin=begin
            )
            waiting.discard(message.sender)
            yield message

    def _give_up_joining(self, missing: list[str], deadline_s: float) -> NoReturn:
        refused = "; ".join(self.refusals)
        note = f"; refused meanwhile: {refused}" if refused else ""
        self._fail(", ".join(missing), f"did not join within {deadline_s:g} s{note}", "absent")


class SecondaryTransport(Transport):
    """A secondary's end of the star: dials out to the primary.

    Args:
        address: Host and port of the primary.
        identity: This party's identity, which trusts the primary's certificate.
        pinned: Public text of every party, from the federation file.
        ranks: Rank by name; the primary has 0.
        limits: Timeouts and sizes.

    Raises:
        ConfigError: If an identity or certificate is missing or not valid now.
        AuthenticationError: If a certificate is not the pinned one.
    """

    session = b""

    def connect(
        self,
        deadline_s: float,
        *,
        returning: bool = False,
        on_busy: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Dial until the primary answers, prove this party's identity, and join the session.

        After any failed call, the next one may succeed: the primary may not have started yet, a
        tunnel may answer before the service behind it is up, another program may hold the port, a
        name may not be known yet. Only an answer of the authenticated primary ends the attempts
        early.

        Args:
            deadline_s: Seconds for the primary to let this party in.
            returning: Whether the primary may still hold an earlier connection of this party and
                therefore refuse it; this party then calls again.
            on_busy: Receives once what the primary does, if it is something else.

        Raises:
            PartyAbsentError: If the primary does not let this party in in time.
            AuthenticationError: If one end had not accepted the other's identity by then.
            ProtocolError: If the primary has other ranks, or speaks another protocol.
            PartyFailedError: If the primary turns this party away.

        Reveals:
            To the primary, and to observers of the network: that this party takes part.
        """
        checks.positive(deadline_s=deadline_s)
        context = tls_context(self._identity, self._peers, server=False, purpose=self._purpose)
        deadline = time.monotonic() + deadline_s
        calls, pause_s = 0, _REDIAL_S
        best: _CallFailedError | None = None
        noted = False
        while True:
            calls += 1
            try:
                patience_s = max(_REDIAL_S, deadline - time.monotonic())
                connection = self._call(context, patience_s, returning=returning)
            except _CallFailedError as last:
                if best is None or last.telling >= best.telling:
                    best = last
                if last.busy and not noted:
                    on_busy(f"{self._place}: {last.text}")
                    noted = True
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _gave_up(
                        self._place, best, last, calls=calls, deadline_s=deadline_s
                    ) from None
                time.sleep(min(pause_s, left))
                pause_s = min(2 * pause_s, _LONGEST_REDIAL_S) if last.telling else _REDIAL_S
            else:
                self.session = connection.session
                self._loop.add(connection)
                self._loop.start()
                return

    @property
    def _place(self) -> str:
        """The primary with its address, for messages."""
        return f"{self.primary} ({self._address[0]}:{self._address[1]})"

    def _call(self, context: ssl.SSLContext, patience_s: float, *, returning: bool) -> Connection:
        """Call the primary once; raise :class:`_CallFailedError` if a later call may succeed."""
        limits, pinned = self.limits, self._pinned[self.primary]
        patience_s = min(limits.handshake_timeout_s, patience_s)
        try:
            raw = socket.create_connection(self._address, timeout=patience_s)
        except OSError as error:
            text = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise _CallFailedError(text, telling=0) from None
        secured: ssl.SSLSocket | None = None
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = context.wrap_socket(raw)
            key = peer_public_text(secured)
            if key != pinned:
                raise _CallFailedError(
                    f"it holds the key {key}, not the pinned {pinned}", telling=2
                )
            if (busy := other_purpose(secured, self._purpose)) is not None:
                raise _CallFailedError(f"it {busy}", telling=2, busy=True)
            reader = FrameReader(
                peer=self.primary,
                sender_rank=PRIMARY_RANK,
                session=None,
                max_body_bytes=limits.max_message_bytes,
            )
            self._greet(secured, reader)
            secured.setblocking(False)
        except BaseException as error:
            with contextlib.suppress(OSError):
                (secured or raw).close()
            if returning and isinstance(error, errors.PartyLostError):
                raise _CallFailedError(str(error), telling=1) from None
            failed = _as_failed_call(error)
            if failed is None:
                raise
            raise failed from None
        connection = Connection(
            peer=self.primary,
            socket=secured,
            reader=reader,
            session=reader.session or bytes(SESSION_BYTES),
            own_rank=self.ranks[self.name],
            limits=limits,
        )
        connection.unread = True  # TLS may have read more than the first message
        return connection

    def _greet(self, connection: ssl.SSLSocket, reader: FrameReader) -> None:
        own = rank = self.ranks[self.name]
        try:
            rank = SessionStart.from_message(_next_message(connection, reader)).rank
            if rank != own:
                raise errors.ProtocolError(
                    f"{self._place}: takes this party for rank {rank}, but the federation file "
                    f"here says {own}; compare the two files"
                )
        except errors.ProtocolError as error:
            if error.party is None:  # otherwise the primary has reported it
                self._say_why(connection, reader, rank=rank, error=error)
            raise

    def _say_why(
        self,
        connection: ssl.SSLSocket,
        reader: FrameReader,
        *,
        rank: int,
        error: errors.ProtocolError,
    ) -> None:
        """Send the primary the reason for hanging up, so that it does not take this party for lost.

        A primary of another version does not read it, and reports the version itself.

        Args:
            connection: The connection.
            reader: The connection's reader.
            rank: This party's rank at the primary.
            error: The error that ends the call.
        """
        failure = Failure(party=self.name, reason=public_reason(error), kind=failure_kind(error))
        session = reader.session or bytes(SESSION_BYTES)
        with contextlib.suppress(OSError):
            for buffer in encode(failure.to_message()).frame(
                session=session, sender_rank=rank, sequence=0
            ):
                connection.sendall(buffer)
            # Unread bytes would make the system drop sent ones.
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(_LAST_WORD_S)
            while connection.recv(_READ_BYTES):
                pass

    @property
    def waiting(self) -> int:
        """Number of the primary's messages that wait to be received."""
        return len(self._connection(self.primary).incoming)

    def send(self, message: Message, *, owned: bool = False) -> None:
        """Send a message to the primary; see :meth:`PrimaryTransport.send`.

        Reveals:
            To the primary: the message, as its kind describes; to observers: its size.
        """
        self._post([self.primary], encode(message), owned=owned)

    def receive(
        self,
        kind: Kinds,
        *,
        round_number: int | None,
        deadline_s: float,
        begin: float | None = None,
        turn_of: Collection[str] = (),
    ) -> Message:
        """Return the primary's next message; see :meth:`PrimaryTransport.receive_any`.

        Args:
            kind: The expected kind or kinds.
            round_number: The message's round; None accepts any.
            deadline_s: Seconds to wait.
            begin: Start of the wait by ``time.monotonic``; None: now.
            turn_of: Parties whose messages the primary should relay, if it is not the primary's own
                turn.

        Reveals:
            Nothing more than the sender has revealed.
        """
        return self._receive_first(
            [self.primary],
            kind,
            round_number=round_number,
            deadline_s=deadline_s,
            begin=begin,
            turn_of=turn_of,
        )
