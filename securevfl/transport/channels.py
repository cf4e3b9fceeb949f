"""Channels between parties: direct, or sealed end to end and relayed by the primary.

Secondaries and helpers are not connected to one another. Their messages while linking hold the
linkage secret or the Paillier key, which would undo the protection if the primary read them. So
they are sealed with AES-256-GCM under a key of the pair, derived from the signed session keys.

The primary is connected to every caller, and relays sealed messages while it waits for its own. A
caller sends to the primary directly and to other callers through it.
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
    """Rank of the receiver."""

    sealed: UInt8[np.ndarray, " _bytes"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SealedFrom(DeclaredMessage):
    """A message of another caller, under the key of the two."""

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "primary to a caller, passed on"
    COVERS: ClassVar = {"no record": "rank", "masks": "sealed", "sizes and times": "lengths"}

    rank: int = wire(name="from")
    """Rank of the sender, as the primary states it; the key proves it."""

    sealed: UInt8[np.ndarray, " _bytes"]


class SealedChannel:
    """One caller's end of the sealed channel to another caller.

    Args:
        pair_key: Key that the two parties agreed on in this session. Masks use it too, so this
            channel derives its keys from it with a separate label.
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
        """Return the sealed message for the primary to relay.

        Reveals:
            To the relaying primary: the message's size and receiver.
        """
        frame = encode(message).frame(
            session=self._session, sender_rank=self._own_rank, sequence=self._sent
        )
        sealed = self._out.encrypt(_nonce(self._sent), b"".join(frame), None)
        self._sent += 1
        letter = np.frombuffer(sealed, dtype=np.uint8)
        return SealedTo(rank=self._peer_rank, sealed=letter).to_message()

    def open(self, message: Message) -> Message:
        """Return the message in a sealed message.

        Raises:
            AuthenticationError: If it was changed, replayed, dropped or reordered.
            ProtocolError: If it does not hold exactly one message.
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
    # A separate key for each direction: otherwise two parties' first messages would share a nonce.
    info = _LABEL + session + struct.pack(">II", sender, receiver)
    return HKDFExpand(algorithm=SHA256(), length=_KEY_BYTES, info=info).derive(pair_key)


def _nonce(number: int) -> bytes:
    return struct.pack(">IQ", 0, number)


Kinds = tuple[MessageKind, ...]

# Bytes that a party may send before its turn; a single message may be larger. Concurrent exchanges
# have about 16 MiB per array.
_MOST_HELD_BYTES: Final = 1 << 28


@runtime_checkable
class Channels(Protocol):
    """One party's channels to all others."""

    def send(self, message: Message, *names: str) -> None:
        """Send a message to one or several parties.

        Reveals:
            To these parties: the message; to a primary that relays it: its size.
        """
        ...

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        """Return a party's next message, which must be of one of the kinds.

        Raises:
            ProtocolError: If it is of another kind, or a party failed.
        """
        ...

    def check(self) -> None:
        """Raise the federation's failure if there is one; for use in long computations.

        Raises:
            ProtocolError: If a party failed, was silent or broke the protocol.
        """
        ...


M = TypeVar("M", bound=DeclaredMessage)


def receive_from(lines: Channels, name: str, kind: type[M], **known: Any) -> M:
    """Return a party's next message, read as the given type and checked.

    Args:
        lines: This party's.
        name: The sender.
        kind: Its type.
        known: Lengths of axes, and values that rules of its fields refer to.

    Raises:
        ProtocolError: If it is of another type or malformed, or a party failed.
    """
    return kind.from_message(lines.receive(name, kind.KIND), **known)


class _ChannelsOverStar(ABC):
    """Channels over the star; stores messages that arrive while another party's is due."""

    def __init__(self, transport: Transport, kinds: Kinds, *, deadline_s: float) -> None:
        self.check = transport.check
        self._kinds = kinds
        self._deadline_s = deadline_s
        self._waiting: dict[str, deque[Message]] = defaultdict(deque)
        self._held: dict[str, int] = defaultdict(int)

    def receive(self, name: str, *kinds: MessageKind, begin: float | None = None) -> Message:
        """Return a party's next message; the primary relays sealed messages meanwhile.

        Messages of other parties do not extend the wait.

        Args:
            name: The party, which the error names after a timeout.
            kinds: The expected kinds.
            begin: Start of the wait by ``time.monotonic``; None: now.

        Raises:
            ProtocolError: If another kind arrived, or a party failed.
            AuthenticationError: If a sealed message was tampered with.

        Reveals:
            To callers: messages sealed for them. To a relaying primary: sizes.
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
        """Return the first message of any party, with the party's name.

        Raises:
            ProtocolError: As :meth:`receive`.
            AuthenticationError: As :meth:`receive`.

        Reveals:
            As :meth:`receive`.
        """
        begin = time.monotonic()
        while not any(self._waiting.values()):
            self._take_in(begin)
        name = next(name for name, waiting in self._waiting.items() if waiting)
        return name, self.receive(name, *kinds)

    @abstractmethod
    def _next(self, begin: float, *turn_of: str) -> tuple[str, Message] | None:
        """Receive a message; return it with its sender, or None if it was relayed."""

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
    """The primary's channels: direct ones to every caller; relays messages between callers.

    Args:
        transport: The star.
        ranks: Rank of every party by name.
        kinds: All kinds that may arrive.
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
            To these callers: the message, as its kind describes.
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
    """A secondary's or helper's channels: to the primary, and sealed ones to other callers.

    Args:
        transport: This party's transport.
        ranks: Rank of every party by name.
        sealed: The session's sealed channels by name of the other caller. They count messages, so
            all stages of a session share them.
        kinds: All kinds that may arrive.
        deadline_s: Seconds to wait for a message of the primary, or of any party.
        between_s: Seconds to wait for a message of another caller.
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
        """Send a message directly to the primary, or sealed to other callers.

        Reveals:
            To these parties: the message, as its kind describes; to a relaying primary: its size.
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
