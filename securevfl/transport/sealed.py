"""Messages between two callers through the primary, which must not read them.

Secondaries and helpers have no connection to one another. What they tell one another while linking
would, in the primary's hands, undo the protection: it holds the linkage secret or the Paillier key.
So it is sealed with AES-256-GCM under a key of the pair's own, from the signed session keys.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from securevfl.core.errors import AuthenticationError, ProtocolError
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import Message, StarKind, TypedMessage

_LABEL: Final = b"securevfl/linking/sealed/v1"
_KEY_BYTES: Final = 32
_MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SealedTo(TypedMessage):
    """A message for another caller, under a key that the primary does not have.

    It tells the primary its size and whom it is for.
    """

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "caller to primary, to be passed on"

    rank: int
    """Whom it is for."""

    sealed: npt.NDArray[np.uint8]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"to": self.rank}, tensors={"sealed": self.sealed})

    @classmethod
    def from_message(cls, message: Message) -> "SealedTo":
        """Read a caller's.

        Raises:
            ProtocolError: If it is malformed.
        """
        sealed = message.tensor("sealed", dtype=np.uint8, shape=(None,))
        return cls(rank=message.figure("to", int), sealed=sealed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SealedFrom(TypedMessage):
    """A message of another caller, under the key of the two."""

    KIND: ClassVar = StarKind.SEALED
    WAY: ClassVar = "primary to a caller, passed on"

    rank: int
    """Whose it is, as the primary says; the key proves it."""

    sealed: npt.NDArray[np.uint8]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"from": self.rank}, tensors={"sealed": self.sealed})

    @classmethod
    def from_message(cls, message: Message) -> "SealedFrom":
        """Read what the primary passed on.

        Raises:
            ProtocolError: If it is malformed.
        """
        sealed = message.tensor("sealed", dtype=np.uint8, shape=(None,))
        return cls(rank=message.figure("from", int), sealed=sealed)


class SealedLine:
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
        return opened


def _direction_key(pair_key: bytes, session: bytes, sender: int, receiver: int) -> bytes:
    # One key a direction: two parties' first messages would share a nonce otherwise.
    info = _LABEL + session + struct.pack(">II", sender, receiver)
    return HKDFExpand(algorithm=SHA256(), length=_KEY_BYTES, info=info).derive(pair_key)


def _nonce(number: int) -> bytes:
    return struct.pack(">IQ", 0, number)
