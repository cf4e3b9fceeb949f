"""Where a party's linkage messages go out and come in, whoever they are for.

The primary talks to everybody, and relays sealed messages while it waits for its own. A caller
talks to the primary directly and to other callers through it. Both have the same two verbs.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from typing import Final, Protocol, runtime_checkable

from securevfl.core.errors import ProtocolError
from securevfl.core.ranks import PRIMARY_RANK
from securevfl.transport.message import Message, MessageKind, StarKind
from securevfl.transport.sealed import SealedFrom, SealedLine, SealedTo
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

Kinds = tuple[MessageKind, ...]

# What one party may send before its turn; one message by itself may be larger. Exchanges that are
# under way at a time have some 16 MiB an array.
_MOST_HELD_BYTES: Final = 1 << 28


@runtime_checkable
class Lines(Protocol):
    """One party's way to every other one."""

    def send(self, message: Message, *names: str) -> None:
        """Send a message to one party or several.

        Reveals:
            To these parties: the message; to a primary that relays it: its size.
        """
        ...

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        """Return the next message of a party, which must be of one of the kinds.

        Raises:
            ProtocolError: If it is of another one, or a party failed.
        """
        ...


class _Inboxes:
    """What has come, by sender, while another one's message was due."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Message]] = defaultdict(deque)
        self._held: dict[str, int] = defaultdict(int)

    def put(self, sender: str, message: Message) -> None:
        held = self._held[sender]
        if held and held + message.held_bytes > _MOST_HELD_BYTES:
            raise ProtocolError(
                f"{sender}: sends more than {_MOST_HELD_BYTES >> 20} MiB before its turn"
            )
        self._held[sender] += message.held_bytes
        self._waiting[sender].append(message)

    def take(self, sender: str, kinds: Collection[MessageKind]) -> Message | None:
        if not self._waiting[sender]:
            return None
        message = self._waiting[sender].popleft()
        self._held[sender] -= message.held_bytes
        if message.kind not in kinds:
            due = " or ".join(kind.name for kind in kinds)
            raise ProtocolError(f"{sender}: sent {message.kind.name} where {due} was due")
        return message


class PrimaryLines:
    """The primary's: direct lines to everybody, and the switchboard between callers.

    Args:
        transport: The star.
        ranks: Name to rank of everybody.
        kinds: What may come at all.
        deadline_s: Seconds to wait for a message.
    """

    def __init__(
        self,
        transport: PrimaryTransport,
        ranks: Mapping[str, int],
        *,
        kinds: Kinds,
        deadline_s: float,
    ) -> None:
        self._transport = transport
        self._kinds = kinds
        self._names = {rank: name for name, rank in ranks.items() if rank}
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._inboxes = _Inboxes()

    def send(self, message: Message, *names: str) -> None:
        """Send a message to callers.

        Reveals:
            To these callers: the message, as its kind says.
        """
        self._transport.broadcast(names, message)

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        """Return a caller's next message, and relay what callers tell one another meanwhile.

        Raises:
            ProtocolError: If another kind came, or a party failed.

        Reveals:
            To the callers: what was sealed for them. To the primary: sizes.
        """
        while (message := self._inboxes.take(name, kinds)) is None:
            came = self._transport.receive_any(
                list(self._names.values()), self._kinds, deadline_s=self._deadline_s
            )
            if came.kind is StarKind.SEALED:
                self._relay(came)
            else:
                self._inboxes.put(came.sender, came)
        return message

    def _relay(self, message: Message) -> None:
        letter = SealedTo.from_message(message)
        to = letter.rank
        sender = self._ranks[message.sender]
        if to not in self._names or to == sender:
            raise ProtocolError(f"{message.sender}: sealed a message for rank {to}, who is nobody")
        sealed = SealedFrom(rank=sender, sealed=letter.sealed).to_message()
        self._transport.relay(self._names[to], sealed, received=message)


class CallerLines:
    """A secondary's or a helper's: one connection, and a sealed line to each other caller.

    Args:
        transport: Its connection.
        ranks: Name to rank of everybody.
        sealed: Its ends of the session's sealed lines, by name of the other caller. They number
            what they carry, so a session has them once, however many stages it has.
        kinds: What may come at all.
        deadline_s: Seconds to wait for a message.
    """

    def __init__(
        self,
        transport: SecondaryTransport,
        ranks: Mapping[str, int],
        sealed: Mapping[str, SealedLine],
        *,
        kinds: Kinds,
        deadline_s: float,
    ) -> None:
        self._transport = transport
        self._kinds = kinds
        self._deadline_s = deadline_s
        self._inboxes = _Inboxes()
        self._primary = next(name for name, rank in ranks.items() if rank == PRIMARY_RANK)
        self._peers = {ranks[name]: name for name in sealed if name in ranks}
        self._sealed = sealed

    def send(self, message: Message, *names: str) -> None:
        """Send a message to the primary, or sealed to other callers.

        Reveals:
            To these parties: the message, as its kind says; to a primary that relays it: its size.
        """
        for name in names:
            direct = name == self._primary
            self._transport.send(message if direct else self._sealed[name].seal(message))

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        """Return a party's next message.

        Raises:
            ProtocolError: If another kind came, or a party failed.
            AuthenticationError: If a sealed message was tampered with.

        Reveals:
            Nothing; what came was revealed by its sender.
        """
        while (message := self._inboxes.take(name, kinds)) is None:
            came = self._transport.receive(self._kinds, round_number=0, deadline_s=self._deadline_s)
            if came.kind is not StarKind.SEALED:
                self._inboxes.put(self._primary, came)
                continue
            peer = self._peers.get(SealedFrom.from_message(came).rank)
            if peer is None:
                raise ProtocolError(f"{came.sender}: relayed a message of nobody")
            self._inboxes.put(peer, self._sealed[peer].open(came))
        return message
