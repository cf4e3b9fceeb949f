"""The star between the parties: secondaries dial out to the primary's one open port.

Both ends share their verbs: send, receive with a deadline, abort, close; what they share is in
:mod:`securevfl.transport.endpoint`.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NoReturn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.transport.accepting import Doorkeeper, open_listener
from securevfl.transport.connection import Outgoing, TransportLimits
from securevfl.transport.dialling import dial
from securevfl.transport.endpoint import LONGEST_NAP_S, Kinds, Transport
from securevfl.transport.framing import SESSION_BYTES, encode
from securevfl.transport.identity import Identity, tls_context
from securevfl.transport.message import Failure, Message

Enough = Callable[[Collection[str], float], bool]
"""Whether these parties, after so many seconds, are enough to begin."""

# Who waits to be let in calls about every second.
_CALLS_AGAIN_WITHIN_S: Final = 5.0


def new_session() -> bytes:
    """Return a fresh session id; the primary draws one for every start."""
    return secrets.token_bytes(SESSION_BYTES)


class PrimaryTransport(Transport):
    """The primary's end: listens, admits every pinned secondary once, relays the first failure.

    Args:
        address: Host and port to listen on; port 0 lets the system choose one.
        identity: The primary's own, with every secondary's certificate among the trusted.
        pinned: Public text of every party, from the federation file.
        session: 16 bytes, from :func:`new_session`; never used twice.
        ranks: Rank by name; the primary has 0.
        limits: Deadlines and sizes.

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
    ) -> None:
        if len(session) != SESSION_BYTES:
            raise ConfigError(f"session: must be {SESSION_BYTES} bytes, got {len(session)}")
        super().__init__(address, identity, pinned, ranks, limits)
        self.session = session
        self._door: Doorkeeper | None = None

    def listen(self) -> tuple[str, int]:
        """Open the port and return its address.

        Raises:
            ConfigError: If the address is in use or not this machine's.
        """
        listener = open_listener(self._address)
        host, port = listener.getsockname()[:2]
        self._door = Doorkeeper(
            loop=self._loop,
            listener=listener,
            context=tls_context(self._identity, self._peers, server=True),
            names={self._pinned[name]: name for name in self.secondaries},
            ranks=self.ranks,
            session=self.session,
        )
        self._loop.service = self._door
        self._loop.start()
        return str(host), int(port)

    def wait_for_parties(
        self,
        deadline_s: float,
        on_join: Callable[[str], None] | None = None,
        *,
        enough: Enough | None = None,
        else_said: str = "",
    ) -> frozenset[str]:
        """Wait until every secondary has joined, or enough of them; return who has.

        Whoever is not there then is turned away until the session ends.

        Args:
            deadline_s: Seconds until those that are missing are given up.
            on_join: Called with each party's name, in this thread, as it joins.
            enough: Called with who has joined and after how many seconds; returns whether nobody
                else is waited for. None waits for all.
            else_said: What more the error says.

        Raises:
            PartyAbsentError: Naming who is missing, and who was refused meanwhile.
            PartyFailedError: If a party that had joined is lost.

        Reveals:
            To each secondary: the session id and its rank.
        """
        checks.positive(deadline_s=deadline_s)
        begin = time.monotonic()
        told: set[str] = set()
        while True:
            with self._loop.changed:
                self.check()
                fresh = [name for name in self._loop.connections if name not in told]
                if not fresh:
                    waited_s = time.monotonic() - begin
                    missing = [name for name in self.secondaries if name not in told]
                    if not missing or (enough is not None and enough(told, waited_s)):
                        if self._door is not None:
                            self._door.leave_out(missing)
                        return frozenset(told)
                    if waited_s >= deadline_s:
                        self._give_up_joining(told, deadline_s, else_said)
                    self._loop.changed.wait(min(deadline_s - waited_s, LONGEST_NAP_S))
            for name in fresh:
                told.add(name)
                if on_join is not None:
                    on_join(name)

    def dismiss(self, name: str, reason: str) -> None:
        """Send one secondary away that has joined, and hold the session without it.

        Args:
            name: The secondary.
            reason: Why, in one sentence without private data.

        Reveals:
            To that secondary: the reason.
        """
        assert self._door is not None, "it has come through the door"
        failure = Failure(party=name, reason=reason)
        with self._loop.changed:
            self._door.leave_out([name])
            connection = self._connection(name)
            # Its end is no loss from now on.
            connection.peer_left = True
            connection.outgoing.append(Outgoing(encode(failure.to_message())))
        self._loop.wake()

    def calling(self) -> tuple[str, ...]:
        """Return who was not there when the session began, and calls now to be let in."""
        return () if self._door is None else self._door.calling(_CALLS_AGAIN_WITHIN_S)

    def send(self, name: str, message: Message, *, owned: bool = False) -> None:
        """Send one message to one secondary.

        Large arrays are sent from where they lie, so this waits until TLS has taken them, unless
        ``owned`` says that nobody will change them any more.

        Raises:
            ProtocolError: Or the kind of it that fits the federation's failure.

        Reveals:
            To the secondary ``name``: the message, as its kind says; to others: its size.
        """
        self._post([name], encode(message), owned=owned)

    def broadcast(self, names: Sequence[str], message: Message, *, owned: bool = False) -> None:
        """Send one message to several secondaries; see :meth:`send`.

        Reveals:
            To each of ``names``: the message, as its kind says; to others: its size.
        """
        self._post(names, encode(message), owned=owned)

    def relay(self, name: str, message: Message, *, received: Message) -> None:
        """Pass on to one secondary what another one sent, without waiting until it is taken in.

        While it is under way it counts among what waits of its sender, which is held back when
        that is too much.

        Args:
            name: Whom it is for.
            message: What is sent.
            received: As it came.

        Raises:
            ProtocolError: Or the kind of it that fits the federation's failure.

        Reveals:
            To the secondary ``name``: the message, as its kind says; to others: its size.
        """
        self.check()
        origin = self._connection(received.sender)
        passed = origin.pass_on(received, encode(message))
        self._queue([(self._connection(name), passed)])

    def receive(
        self, name: str, kind: Kinds, *, round_number: int | None, deadline_s: float
    ) -> Message:
        """Return the next message of one secondary, which must be what is due.

        Args:
            name: The secondary.
            kind: What is due; one kind or several.
            round_number: The round it must belong to; None takes any.
            deadline_s: Seconds to wait.

        Raises:
            ProtocolError: If something else came; every party is told.
            PartyTimeoutError: If nothing came in time; every party is told.
            PartyFailedError: If a party of the federation has failed meanwhile.

        Reveals:
            Nothing; what came was revealed by its sender.
        """
        return self._receive_first(
            [name],
            kind,
            round_number=round_number,
            deadline=time.monotonic() + deadline_s,
            patience_s=deadline_s,
        )

    def receive_any(self, names: Sequence[str], kind: Kinds, *, deadline_s: float) -> Message:
        """Return the next message of the secondary that is first, of any round.

        Raises:
            ProtocolError: And its kinds, as :meth:`receive` does.

        Reveals:
            Nothing; what came was revealed by its sender.
        """
        return self._receive_first(
            names,
            kind,
            round_number=None,
            deadline=time.monotonic() + deadline_s,
            patience_s=deadline_s,
        )

    def receive_each(
        self, names: Sequence[str], kind: Kinds, *, round_number: int | None, deadline_s: float
    ) -> Iterator[Message]:
        """Yield one message of each secondary as they arrive, within one common deadline.

        Raises:
            ProtocolError: And its kinds, as :meth:`receive` does.

        Reveals:
            Nothing; what came was revealed by its sender.
        """
        deadline = time.monotonic() + deadline_s
        waiting = set(names)
        while waiting:
            message = self._receive_first(
                waiting,
                kind,
                round_number=round_number,
                deadline=deadline,
                patience_s=deadline_s,
            )
            waiting.discard(message.sender)
            yield message

    def _give_up_joining(self, told: set[str], deadline_s: float, else_said: str) -> NoReturn:
        missing = ", ".join(name for name in self.secondaries if name not in told)
        refused = "; ".join(self._door.refusals) if self._door is not None else ""
        note = f"; refused meanwhile: {refused}" if refused else ""
        self._fail(missing, f"did not join within {deadline_s:g} s{else_said}{note}", "absent")


class SecondaryTransport(Transport):
    """A secondary's end: dials out, and talks to the primary alone.

    Args:
        address: Host and port of the primary.
        identity: This party's own, with the primary's certificate among the trusted.
        pinned: Public text of every party, from the federation file.
        ranks: Rank by name; the primary has 0.
        limits: Deadlines and sizes.

    Raises:
        ConfigError: If an identity or certificate is missing or not valid now.
        AuthenticationError: If a certificate is not the pinned one.
    """

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        pinned: Mapping[str, str],
        ranks: Mapping[str, int],
        *,
        limits: TransportLimits = TransportLimits(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(address, identity, pinned, ranks, limits)
        self.session = b""
        """The session's id, once connected."""

    def connect(self, deadline_s: float, *, returning: bool = False) -> None:
        """Dial until the primary answers, prove this party's identity and learn the session.

        Args:
            deadline_s: Seconds until the primary must have let this party in.
            returning: Whether the primary may not know yet that it has lost this party, and turn
                it away because of its first connection; it calls again then.

        Raises:
            PartyAbsentError: If the primary does not let this party in in time.
            AuthenticationError: If time is over, and an end had not accepted the other's identity.
            ProtocolError: If the primary counts the parties otherwise, or speaks another protocol.
            PartyFailedError: If the primary turns this party away.

        Reveals:
            To the primary, and on the wire to anybody: that this party takes part.
        """
        checks.positive(deadline_s=deadline_s)
        connection = dial(
            self._address,
            context=tls_context(self._identity, self._peers, server=False),
            peer=self.primary,
            pinned=self._pinned[self.primary],
            own_name=self.name,
            rank=self.ranks[self.name],
            deadline_s=deadline_s,
            limits=self._limits,
            returning=returning,
        )
        self.session = connection.session
        self._loop.add(connection)
        self._loop.start()

    @property
    def waiting(self) -> int:
        """Messages of the primary that have come and were not received yet."""
        return len(self._connection(self.primary).incoming)

    def send(self, message: Message, *, owned: bool = False) -> None:
        """Send one message to the primary; see :meth:`PrimaryTransport.send`.

        Reveals:
            To the primary: the message, as its kind says; to others: its size.
        """
        self._post([self.primary], encode(message), owned=owned)

    def receive(self, kind: Kinds, *, round_number: int | None, deadline_s: float) -> Message:
        """Return the primary's next message; see :meth:`PrimaryTransport.receive`.

        Reveals:
            Nothing; what came was revealed by its sender.
        """
        return self._receive_first(
            [self.primary],
            kind,
            round_number=round_number,
            deadline=time.monotonic() + deadline_s,
            patience_s=deadline_s,
        )
