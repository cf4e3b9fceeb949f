"""What parties tell one another of their ledgers: hashes, numbers of lines and signatures."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import ProtocolError
from securevfl.federation.chain import HASH_BYTES
from securevfl.transport.message import Message, MessageKind, TypedMessage

NONCE_BYTES: Final = 16
MOST_LINES: Final = 1 << 18
"""Lines that one proof may have: 8 MiB of hashes."""

_SIGNATURE_BYTES: Final = 64
_NOTHING: Final = (bytes(HASH_BYTES), -1)

Request = Literal["released", "end"]
"""When the primary asks for heads; a session's start and an epoch's end say so by themselves."""


class LedgerKind(MessageKind):
    """What parties tell one another of their ledgers."""

    MEMORIES = 17
    HEADS = 18
    COUNTERSIGN = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Which heads of others' ledgers one party remembers, signed with a fresh number."""

    nonce: bytes
    heads: Mapping[str, tuple[bytes, int]]
    """By party: a head, and the number of lines that it stands for."""
    signature: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedHead:
    """One party's ledger as it is now: head, number of lines, and how it goes on."""

    head: bytes
    lines: int
    signature: bytes
    since: int
    """After how many lines the proof begins."""
    proof: npt.NDArray[np.uint8]
    """SHA-256 of each line from there on, shape [lines - since, 32]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memories(TypedMessage):
    """Which heads of the others' ledgers the sender remembers from earlier runs, signed.

    With them comes a fresh random number. It tells whom the sender has met before, and how many
    lines their ledgers had then.
    """

    KIND: ClassVar = LedgerKind.MEMORIES
    WAY: ClassVar = "secondary to primary; the primary passes all of them, and its own, on"

    parties: Sequence[str]
    """All parties that have a ledger; heads are in their order."""
    memories: Mapping[str, Memory]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        for name, memory in self.memories.items():
            found = [memory.heads.get(other, _NOTHING) for other in self.parties]
            tensors[f"nonce:{name}"] = _array(memory.nonce)
            tensors[f"signature:{name}"] = _array(memory.signature)
            tensors[f"heads:{name}"] = _array(b"".join(head for head, _ in found)).reshape(
                len(found), HASH_BYTES
            )
            tensors[f"lines:{name}"] = np.array([lines for _, lines in found], dtype=np.int64)
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, senders: Collection[str], parties: Sequence[str]
    ) -> "Memories":
        """Read those of ``senders``, each about any of ``parties``.

        Raises:
            ProtocolError: If one is missing or malformed.
        """
        memories, count = {}, len(parties)
        for name in senders:
            heads = message.tensor(f"heads:{name}", dtype=np.uint8, shape=(count, HASH_BYTES))
            lines = message.tensor(f"lines:{name}", dtype=np.int64, shape=(count,)).tolist()
            memories[name] = Memory(
                nonce=_bytes(message, f"nonce:{name}", NONCE_BYTES),
                heads={
                    other: (head.tobytes(), number)
                    for other, head, number in zip(parties, heads, lines, strict=True)
                    if number >= 0
                },
                signature=_bytes(message, f"signature:{name}", _SIGNATURE_BYTES),
            )
        return cls(parties=parties, memories=memories)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads(TypedMessage):
    """The head of the sender's ledger and its number of lines, signed.

    With them come salted hashes of the lines that are new to the others, as proof that the ledger
    goes on from what they remember. They tell how many lines were added, so how often something
    was charged, in other federations too; not what, for whom or how much.
    """

    KIND: ClassVar = LedgerKind.HEADS
    WAY: ClassVar = "secondary to primary; the primary passes all of them, and its own, on"

    heads: Mapping[str, SignedHead]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        for name, signed in self.heads.items():
            tensors[f"head:{name}"] = _array(signed.head)
            tensors[f"lines:{name}"] = np.array([signed.since, signed.lines], dtype=np.int64)
            tensors[f"signature:{name}"] = _array(signed.signature)
            tensors[f"proof:{name}"] = signed.proof
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, senders: Collection[str]) -> "Heads":
        """Read those of ``senders``.

        Raises:
            ProtocolError: If one is missing or malformed.
        """
        heads = {}
        for name in senders:
            since, lines = message.tensor(f"lines:{name}", dtype=np.int64, shape=(2,)).tolist()
            if not 0 <= since <= lines <= since + MOST_LINES:
                raise ProtocolError(
                    f"party {name!r}: a proof from line {since} to line {lines} of its ledger is "
                    f"none that can be; at most {MOST_LINES} lines are taken"
                )
            heads[name] = SignedHead(
                head=_bytes(message, f"head:{name}", HASH_BYTES),
                lines=lines,
                signature=_bytes(message, f"signature:{name}", _SIGNATURE_BYTES),
                since=since,
                proof=message.tensor(
                    f"proof:{name}", dtype=np.uint8, shape=(lines - since, HASH_BYTES)
                ),
            )
        return cls(heads=heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountersignRequest(TypedMessage):
    """State your ledger's head: all rows are released, or the run ends."""

    KIND: ClassVar = LedgerKind.COUNTERSIGN
    WAY: ClassVar = "primary to every secondary"

    point: Request

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"point": self.point})

    @classmethod
    def from_message(cls, message: Message) -> "CountersignRequest":
        """Read the primary's.

        Raises:
            ProtocolError: If it names no such point.
        """
        named = message.figure("point", str)
        for point in get_args(Request):
            if point == named:
                return cls(point=point)
        raise ProtocolError("the primary asks for ledger heads at a point that there is not")


def _array(raw: bytes) -> npt.NDArray[np.generic]:
    return np.frombuffer(raw, dtype=np.uint8)


def _bytes(message: Message, name: str, length: int) -> bytes:
    return message.tensor(name, dtype=np.uint8, shape=(length,)).tobytes()
