"""What both ends of the star have in common: order, deadlines, one failure for all.

Used as a context manager, an end says farewell when its block ends well, and when an error leaves
the block, tells every party who failed and why.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Final, NoReturn, TypeVar

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.transport.connection import Connection, Outgoing, TransportLimits
from securevfl.transport.framing import EncodedMessage
from securevfl.transport.identity import Identity, check_pins
from securevfl.transport.message import (
    Failure,
    FailureKind,
    Message,
    MessageKind,
    failure_kind,
    public_reason,
)
from securevfl.transport.socket_loop import StarLoop

# A wait wakes up this often even if a notification were lost; it costs nothing.
LONGEST_NAP_S: Final = 1.0

_Self = TypeVar("_Self", bound="Transport")
Kinds = MessageKind | Collection[MessageKind]


class Transport:
    """What both ends of the star have in common."""

    def __init__(
        self,
        address: tuple[str, int],
        identity: Identity,
        pinned: Mapping[str, str],
        ranks: Mapping[str, int],
        limits: TransportLimits,
    ) -> None:
        self.name = identity.name
        self.ranks = dict(ranks)
        primaries = [name for name, rank in ranks.items() if rank == PRIMARY_RANK]
        if len(primaries) != 1 or len(set(ranks.values())) != len(ranks):
            raise ConfigError(f"ranks: must be unique, with one party of rank 0; got {dict(ranks)}")
        if identity.name not in ranks:
            raise ConfigError(f"{identity.name}: is no party of this federation: {sorted(ranks)}")
        self.primary = primaries[0]
        self.secondaries = tuple(name for name in ranks if name != self.primary)
        is_primary = identity.name == self.primary
        self._peers = self.secondaries if is_primary else (self.primary,)
        check_pins(identity, pinned, self._peers)
        self._address = address
        self._identity = identity
        self._pinned = dict(pinned)
        self._limits = limits
        self._loop = StarLoop(own_name=identity.name, relays=is_primary, limits=limits)

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
        """Take in larger messages of everybody, and more of them, from now on.

        Args:
            limits: Those that hold once parties have greeted each other; sizes alone are used.
        """
        for connection in list(self._loop.connections.values()):
            connection.widen(limits)
        self._loop.wake()

    def abort(self, reason: str, *, kind: FailureKind = "failed") -> None:
        """End the federation for everybody because of this party; the first failure stays.

        Args:
            reason: One sentence without private data.
            kind: Which error the others raise.

        Reveals:
            To every party: this party's name and the reason.
        """
        self._loop.fail(Failure(party=self.name, reason=reason, kind=kind))

    def check(self) -> None:
        """Raise the federation's failure if there is one; for long computations between waits.

        Raises:
            ProtocolError: Or the kind of it that fits: a party failed, was silent, lied.
        """
        if self._loop.failure is not None:
            raise self._loop.failure.error()

    def close(self) -> None:
        """Deliver what waits, say farewell and close; safe to call again.

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
            raise ProtocolError(f"{name}: has not joined")
        return connection

    def _post(self, names: Sequence[str], encoded: EncodedMessage, *, owned: bool) -> None:
        self.check()
        items = [(self._connection(name), Outgoing(encoded)) for name in names]
        self._queue(items)
        if encoded.borrows and not owned:
            self._wait_sent(items)

    def _queue(self, items: Sequence[tuple[Connection, Outgoing]]) -> None:
        for connection, item in items:
            if connection.peer_left:
                kind = item.encoded.kind.name
                self._fail(connection.peer, f"left before {kind} was sent", "failed")
            connection.outgoing.append(item)
        self._loop.wake()

    def _wait_sent(self, items: Sequence[tuple[Connection, Outgoing]]) -> None:
        # The loop finds a peer that takes nothing within the limit of silence.
        with self._loop.changed:
            while waiting := [pair for pair in items if not pair[1].sent]:
                self.check()
                for connection, item in waiting:
                    if connection.ended and connection.peer_left:
                        due = item.encoded.kind.name
                        self._fail(connection.peer, f"left before it took {due}", "failed")
                self._loop.changed.wait(LONGEST_NAP_S)

    def _receive_first(
        self,
        names: Collection[str],
        kinds: Kinds,
        *,
        round_number: int | None,
        deadline: float,
        patience_s: float,
    ) -> Message:
        """Return the next message of whichever party of ``names`` is first."""
        wanted = (kinds,) if isinstance(kinds, MessageKind) else tuple(kinds)
        connections = [self._connection(name) for name in names]
        due = " or ".join(kind.name for kind in wanted)
        with self._loop.changed:
            while True:
                self.check()
                for connection in connections:
                    if connection.incoming:
                        message = connection.take()
                        if connection.full:
                            self._loop.wake()
                        self._expect(message, wanted, round_number)
                        return message
                    # One that broke is named by the loop, with the reason, in a moment.
                    if connection.peer_left:
                        self._fail(connection.peer, f"left before it sent {due}", "failed")
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = ", ".join(sorted(names))
                    text = f"sent no {due} within {patience_s:g} s"
                    self._fail(missing, text, "timeout")
                self._loop.changed.wait(min(left, LONGEST_NAP_S))

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
