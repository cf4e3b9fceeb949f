"""Channels between parties: direct, or sealed end to end and relayed by the primary.

Secondaries and helpers have no connection to one another. What they tell one another while linking
would, in the primary's hands, undo the protection: it holds the linkage secret or the Paillier key.
So it is sealed with AES-256-GCM under a key of the pair's own, from the signed session keys.

The primary talks to everybody, and relays sealed messages while it waits for its own. A caller
talks to the primary directly and to other callers through it. Both have the same two verbs.
"""

import struct
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from jaxtyping import UInt8

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import AuthenticationError, ProtocolError
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import (
    DeclaredMessage,
    Message,
    MessageKind,
    StarKind,
    require_empty,
    wire,
)
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, Transport

# Messages between two callers through the primary, which must not read them.

_LABEL: Final = b"securevfl/linking/sealed/v1"
_KEY_BYTES: Final = 32
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SealedTo(DeclaredMessage):
    """A message for another caller, under a key that the primary does not have.

    The primary sees its size and whom it is for.
    """

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "caller to primary, to be passed on"
    COVERS: ClassVar = {"no record": "rank", "masks": "sealed", "sizes and times": "lengths"}

    rank: int = wire(name="to")
    """Whom it is for."""

    sealed: UInt8[np.ndarray, " _bytes"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SealedFrom(DeclaredMessage):
    """A message of another caller, under the key of the two."""

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "primary to a caller, passed on"
    COVERS: ClassVar = {"no record": "rank", "masks": "sealed", "sizes and times": "lengths"}

    rank: int = wire(name="from")
    """Whose it is, as the primary says; the key proves it."""

    sealed: UInt8[np.ndarray, " _bytes"]


class SealedChannel:
    """One caller's end of the line to another one.

    Args:
        pair_key: What the two agreed on in this session; masks use it too, so keys of this line
            are derived from it under a name of their own.
        session: The session's id.
        own_rank: This party's rank.
        peer: The other party's name.
        peer_rank: Its rank.
    """

    def __init__(
        self, pair_key: bytes, *, session: bytes, own_rank: int, peer: str, peer_rank: int
    ) -> None:
        self._session = session
        self._own_rank = own_rank
        self._peer = peer
        self._peer_rank = peer_rank
        self._out = AESGCM(_direction_key(pair_key, session, own_rank, peer_rank))
        self._in = AESGCM(_direction_key(pair_key, session, peer_rank, own_rank))
        self._sent = self._received = 0
        self._reader = FrameReader(
            peer=peer, sender_rank=peer_rank, session=session, max_body_bytes=_MOST_BYTES
        )

    def seal(self, message: Message) -> Message:
        """Return a message as the primary may relay it.

        Reveals:
            To the relaying primary: the message's size and whom it is for.
        """
        frame = encode(message).frame(
            session=self._session, sender_rank=self._own_rank, sequence=self._sent
        )
        sealed = self._out.encrypt(_nonce(self._sent), b"".join(frame), None)
        self._sent += 1
        letter = np.frombuffer(sealed, dtype=np.uint8)
        return SealedTo(rank=self._peer_rank, sealed=letter).to_message()

    def open(self, message: Message) -> Message:
        """Return the message in a sealed one.

        Raises:
            AuthenticationError: If it was changed, replayed, left out or put into another order.
            ProtocolError: If it is not one message.
        """
        sealed = message.tensor("sealed", dtype=np.uint8, shape=(None,))
        try:
            frame = self._in.decrypt(_nonce(self._received), sealed.tobytes(), None)
        except InvalidTag:
            raise AuthenticationError(
                f"{self._peer}: what the primary relayed is not what was sent"
            ) from None
        self._received += 1
        rest = memoryview(frame)
        while (opened := self._reader.message()) is None and len(rest):
            room = self._reader.target()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            self._reader.advance(count)
            rest = rest[count:]
        if opened is None or len(rest) or self._reader.staged_bytes:
            raise ProtocolError(f"{self._peer}: sealed something that is not one message")
        require_empty(opened)
        return opened


def _direction_key(pair_key: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    # One key a direction: two parties' first messages would share a nonce otherwise.
    info = _LABEL + session + struct.pack(">II", sender, receiver)
    return HKDFExpand(algorithm=SHA256(), length=_KEY_BYTES, info=info).derive(pair_key)


def _nonce(number: int) -> bytes:
    return struct.pack(">IQ", 0, number)


# Where a party's linkage messages go out and come in, whoever they are for.

Kinds = tuple[MessageKind, ...]

# What one party may send before its turn; one message by itself may be larger. Exchanges that are
# under way at a time have some 16 MiB an array.
_MOST_HELD_BYTES: Final = 1 << 28


@runtime_checkable
class Channels(Protocol):
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

    def check(self) -> None:
        """Raise the federation's failure if there is one; for long computations between waits.

        Raises:
            ProtocolError: A party failed, was silent or lied.
        """
        ...


M = TypeVar("M", bound=DeclaredMessage)


def receive_from(lines: Channels, name: str, kind: type[M], **known: Any) -> M:
    """Return the next message of a party, which must be of one type, checked.

    Args:
        lines: This party's.
        name: Whose message it is.
        kind: Its type.
        known: Lengths of axes, and what rules of its fields name.

    Raises:
        ProtocolError: If it is another one, or malformed, or a party failed.
    """
    return kind.from_message(lines.receive(name, kind.KIND), **known)


class _ChannelsOverStar(ABC):
    """Channels over the star, and what has come of one party while another's message was due."""

    def __init__(self, transport: Transport, kinds: Kinds, *, deadline_s: float) -> None:
        self.check = transport.check
        self._kinds = kinds
        self._deadline_s = deadline_s
        self._waiting: dict[str, deque[Message]] = defaultdict(deque)
        self._held: dict[str, int] = defaultdict(int)

    def receive(self, name: str, *kinds: MessageKind, begin: float | None = None) -> Message:
        """Return a party's next message; the primary relays sealed ones meanwhile.

        What others send meanwhile makes the wait no longer.

        Args:
            name: The party, which is named if nothing comes in time.
            kinds: What is due.
            begin: Since when the wait counts, by ``time.monotonic``; None: from now on.

        Raises:
            ProtocolError: If another kind came, or a party failed.
            AuthenticationError: If a sealed message was tampered with.

        Reveals:
            To callers: what was sealed for them. To a primary that relays it: sizes.
        """
        begin = time.monotonic() if begin is None else begin
        while not self._waiting[name]:
            self._take_in(begin, name)
        message = self._waiting[name].popleft()
        self._held[name] -= message.held_bytes
        if message.kind not in kinds:
            due = " or ".join(kind.name for kind in kinds)
            raise ProtocolError(f"{name}: sent {message.kind.name} where {due} was due")
        return message

    def receive_any(self, *kinds: MessageKind) -> tuple[str, Message]:
        """Return whichever party's message is there first, with that party's name.

        Raises:
            ProtocolError: As :meth:`receive`.
            AuthenticationError: As :meth:`receive`.

        Reveals:
            What :meth:`receive` reveals.
        """
        begin = time.monotonic()
        while not any(self._waiting.values()):
            self._take_in(begin)
        name = next(name for name, waiting in self._waiting.items() if waiting)
        return name, self.receive(name, *kinds)

    @abstractmethod
    def _next(self, begin: float, *turn_of: str) -> tuple[str, Message] | None:
        """Receive a message; return it with its sender, or None if it was passed on."""

    def _take_in(self, begin: float, *turn_of: str) -> None:
        if (came := self._next(begin, *turn_of)) is not None:
            self._put(*came)

    def _put(self, sender: str, message: Message) -> None:
        held = self._held[sender]
        if held and held + message.held_bytes > _MOST_HELD_BYTES:
            raise ProtocolError(
                f"{sender}: sends more than {_MOST_HELD_BYTES >> 20} MiB before its turn"
            )
        self._held[sender] += message.held_bytes
        self._waiting[sender].append(message)


class PrimaryChannels(_ChannelsOverStar):
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
        super().__init__(transport, kinds, deadline_s=deadline_s)
        self._transport = transport
        self._names = {rank: name for name, rank in ranks.items() if rank}
        self._ranks = ranks

    def send(self, message: Message, *names: str) -> None:
        """Send a message to callers.

        Reveals:
            To these callers: the message, as its kind says.
        """
        self._transport.broadcast(names, message)

    def _next(self, begin: float, *turn_of: str) -> tuple[str, Message] | None:
        came = self._transport.receive_any(
            list(self._names.values()),
            self._kinds,
            deadline_s=self._deadline_s,
            begin=begin,
            turn_of=turn_of,
        )
        if came.kind is not StarKind.SEALED:
            return came.sender, came
        self._relay(came)
        return None

    def _relay(self, message: Message) -> None:
        letter = SealedTo.from_message(message)
        to = letter.rank
        sender = self._ranks[message.sender]
        if to not in self._names or to == sender:
            raise ProtocolError(f"{message.sender}: sealed a message for rank {to}, no other party")
        sealed = SealedFrom(rank=sender, sealed=letter.sealed).to_message()
        self._transport.relay(self._names[to], sealed, received=message)


class CallerChannels(_ChannelsOverStar):
    """A secondary's or a helper's: one connection, and a sealed line to each other caller.

    Args:
        transport: Its connection.
        ranks: Name to rank of everybody.
        sealed: Its ends of the session's sealed lines, by name of the other caller. They number
            what they carry, so a session has them once, however many stages it has.
        kinds: What may come at all.
        deadline_s: Seconds to wait for a message of the primary, or of anybody.
        between_s: Seconds to wait for one of another caller, which is named then.
    """

    def __init__(
        self,
        transport: SecondaryTransport,
        ranks: Mapping[str, int],
        sealed: Mapping[str, SealedChannel],
        *,
        kinds: Kinds,
        deadline_s: float,
        between_s: float,
    ) -> None:
        super().__init__(transport, kinds, deadline_s=deadline_s)
        self._between_s = between_s
        self._transport = transport
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

    def _next(self, begin: float, *turn_of: str) -> tuple[str, Message]:
        direct = not turn_of or self._primary in turn_of
        came = self._transport.receive(
            self._kinds,
            round_number=0,
            deadline_s=self._deadline_s if direct else self._between_s,
            begin=begin,
            turn_of=turn_of,
        )
        if came.kind is not StarKind.SEALED:
            return self._primary, came
        peer = self._peers.get(SealedFrom.from_message(came).rank)
        if peer is None:
            raise ProtocolError(f"{came.sender}: relayed a message of nobody")
        return peer, self._sealed[peer].open(came)
