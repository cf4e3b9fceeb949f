"""Messages of parties that compute on shares, and the lines that carry them, to the dealer too."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from securevfl.core.errors import ProtocolError
from securevfl.mpc.dealt_sums import SEED_BYTES
from securevfl.mpc.dealt_tuples import TupleDealer, TupleRequest
from securevfl.transport.channels import CallerChannels, Channels, Kinds, receive_from
from securevfl.transport.message import (
    DeclaredMessage,
    Message,
    MessageKind,
    StarKind,
    TypedMessage,
    wire,
)

KEY_BYTES: Final = 32


class ComputingKind(MessageKind):
    """Kinds of messages of parties that compute together."""

    COMPUTING_KEY = 55
    COMPUTING_SEED = 56
    COMPUTING_TENSOR = 57
    COMPUTING_REQUEST = 58
    COMPUTING_DEALING = 59
    COMPUTING_DONE = 60
    COMPUTING_BEGIN = 61


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputingKey(DeclaredMessage):
    """A fresh key, from which the two make streams that hide shares from all others."""

    KIND: ClassVar = ComputingKind.COMPUTING_KEY
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"masks": "key", "no record": "lengths"}

    key: bytes = wire(length=KEY_BYTES, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputingSeed(DeclaredMessage):
    """The seed of a member's shares of random numbers, and a hash of what runs.

    Sealed where the primary relays it.
    """

    KIND: ClassVar = ComputingKind.COMPUTING_SEED
    WAY: ClassVar = "dealer to every party that computes"
    COVERS: ClassVar = {"masks": "seed", "no record": "context lengths"}

    seed: bytes = wire(length=SEED_BYTES, repr=False)
    context: bytes = wire(length=32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComputingTensor(TypedMessage):
    """One step's array: shares of what is opened, uniform by themselves, or what a program sends.

    Between secondaries it is sealed, and the primary relays it.
    """

    KIND: ClassVar = ComputingKind.COMPUTING_TENSOR
    WAY: ClassVar = "party that computes to another one"
    COVERS: ClassVar = {
        "masks": "values",
        "programs": "values lengths",
        "no record": "step",
    }

    step: int
    values: npt.NDArray[Any]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"step": self.step}, tensors={"values": self.values})

    @classmethod
    def from_message(
        cls,
        message: Message,
        *,
        step: int,
        dtype: npt.DTypeLike,
        shape: tuple[int | None, ...],
    ) -> "ComputingTensor":
        """Read a party's.

        Args:
            message: As it came.
            step: The step that this party is at.
            dtype: The array's type.
            shape: Its shape; None stands for any length.

        Raises:
            ProtocolError: If it is of another step, type or shape: the parties run two programs.
        """
        message.require_only("step", "values")
        if message.figure("step", int) != step:
            raise ProtocolError(
                f"{message.sender}: sent step {message.meta['step']} of a program that is at "
                f"{step} here"
            )
        values = message.tensor("values", dtype=dtype, shape=shape, finite=False)
        return cls(step=step, values=values)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputingBegin(DeclaredMessage):
    """Who computes next, and under which number: each of them needs a seed."""

    KIND: ClassVar = ComputingKind.COMPUTING_BEGIN
    WAY: ClassVar = "first party that computes to dealer"
    COVERS: ClassVar = {"no record": "world number lengths"}

    world: tuple[int, ...]
    number: int = wire(least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputingRequest(TypedMessage):
    """Which random numbers a program needs next: their numbers, kinds and sizes."""

    KIND: ClassVar = ComputingKind.COMPUTING_REQUEST
    WAY: ClassVar = "first party that computes to dealer"
    COVERS: ClassVar = {"no record": "requests lengths"}

    requests: tuple[TupleRequest, ...]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(
            kind=self.KIND, meta={"requests": [asdict(request) for request in self.requests]}
        )

    @classmethod
    def from_message(cls, message: Message) -> "ComputingRequest":
        """Read a party's.

        Raises:
            ProtocolError: If it asks for nothing that could be dealt.
        """
        message.require_only("requests")
        listed = message.figure("requests", list)
        return cls(requests=tuple(TupleRequest.from_json(item) for item in listed))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComputingDealing(DeclaredMessage):
    """What makes shares of random numbers fit together: uniform numbers."""

    KIND: ClassVar = ComputingKind.COMPUTING_DEALING
    WAY: ClassVar = "dealer to the first party that computes"
    COVERS: ClassVar = {"masks": "words", "no record": "number lengths"}

    number: int
    """Number of the first request that it answers."""
    words: Int64[np.ndarray, " count"] = wire(repr=False)


@dataclass(frozen=True, slots=True)
class ComputingDone(DeclaredMessage):
    """The sender's part of a program is done."""

    KIND: ClassVar = ComputingKind.COMPUTING_DONE
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"no record": "lengths"}


AT_SECONDARY: Kinds = (
    ComputingKind.COMPUTING_SEED,
    ComputingKind.COMPUTING_TENSOR,
    ComputingKind.COMPUTING_DEALING,
    StarKind.SEALED,
    StarKind.DONE,
)
AT_PRIMARY: Kinds = (*AT_SECONDARY[:-1], ComputingKind.COMPUTING_KEY, ComputingKind.COMPUTING_DONE)
AT_DEALER: Kinds = (
    ComputingKind.COMPUTING_BEGIN,
    ComputingKind.COMPUTING_REQUEST,
    StarKind.SEALED,
    StarKind.DONE,
)


@dataclass(frozen=True)
class ComputingLines:
    """A party's lines to the others that compute, over the star."""

    channels: Channels
    names: Mapping[int, str]
    """Names of all parties, by rank."""

    def send(self, rank: int, step: int, values: npt.NDArray[Any]) -> None:
        """Send an array.

        Reveals:
            To that party: the array; to a primary that relays it: its size.
        """
        self.channels.send(ComputingTensor(step=step, values=values).to_message(), self.names[rank])

    def receive(
        self, rank: int, step: int, *, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
    ) -> npt.NDArray[Any]:
        """Return a party's next array; see :class:`securevfl.mpc.on_shares.Lines`.

        Raises:
            ProtocolError: If it is not what is due.
        """
        message = self.channels.receive(self.names[rank], ComputingKind.COMPUTING_TENSOR)
        read = ComputingTensor.from_message(message, step=step, dtype=dtype, shape=shape)
        return read.values


@dataclass(frozen=True)
class LineToDealer:
    """A member's way to the dealer, over the star."""

    channels: Channels
    dealer: str
    context: bytes
    """Hash of what runs, as this party has it."""

    def begin(self, world: Sequence[int], number: int) -> None:
        """Let the dealer send seeds; see :class:`securevfl.mpc.dealt_tuples.DealerLine`.

        Reveals:
            To the dealer: who computes.
        """
        begin = ComputingBegin(world=tuple(world), number=number)
        self.channels.send(begin.to_message(), self.dealer)

    def seed(self) -> bytes:
        """Return this member's seed.

        Raises:
            ProtocolError: If it was dealt for something else.
        """
        seed = receive_from(self.channels, self.dealer, ComputingSeed)
        if seed.context != self.context:
            raise ProtocolError(
                f"{self.dealer}: deals for another session or program than this party's"
            )
        return seed.seed

    def ask(self, requests: Sequence[TupleRequest]) -> None:
        """Ask for corrections.

        Reveals:
            To the dealer: sizes.
        """
        request = ComputingRequest(requests=tuple(requests))
        self.channels.send(request.to_message(), self.dealer)

    def take(self, number: int, count: int) -> Int64[np.ndarray, " count"]:
        """Receive ``count`` words of corrections for request ``number``.

        Raises:
            ProtocolError: If they are others, or of another size.
        """
        dealt = receive_from(self.channels, self.dealer, ComputingDealing, count=count)
        if dealt.number != number:
            raise ProtocolError(f"{self.dealer}: dealt {dealt.number} where {number} was due")
        return dealt.words


def key_from(channels: Channels, secondary: str) -> bytes:
    """Return the key that a secondary has drawn for its streams with the primary."""
    return receive_from(channels, secondary, ComputingKey).key


@dataclass(eq=False)
class DealingParty:
    """The dealer's part in a session: seeds and corrections, until it is let go."""

    channels: CallerChannels
    names: Mapping[int, str]
    """Names of the parties that may compute, by rank."""
    context: bytes
    """Hash of what runs, as the dealer has it."""
    dealt: int = field(default=0, init=False)
    """Requests so far."""
    _dealer: TupleDealer = field(init=False)

    def __post_init__(self) -> None:
        self._dealer = TupleDealer(tuple(self.names), self.context)

    def deal(self) -> None:
        """Deal until the primary lets this party go.

        Raises:
            ProtocolError: If a number is asked for twice, or a party leaves the protocol.

        Reveals:
            To every party that computes: uniform numbers. The dealer learns sizes.
        """
        dealer, first, seeds = self._dealer, "", dict[int, bytes]()
        while True:
            sender, message = self.channels.receive_any(*AT_DEALER)
            if message.kind is StarKind.DONE:
                return
            if message.kind is ComputingKind.COMPUTING_BEGIN:
                begin = ComputingBegin.from_message(message)
                seeds = dealer.begin(begin.world, begin.number)
                first = self.names[begin.world[0]]
            if sender != first:
                raise ProtocolError(f"{sender}: asks for randomness in the place of {first!r}")
            if message.kind is ComputingKind.COMPUTING_BEGIN:
                for rank, seed in seeds.items():
                    seed_message = ComputingSeed(seed=seed, context=self.context)
                    self.channels.send(seed_message.to_message(), self.names[rank])
                continue
            requests = ComputingRequest.from_message(message).requests
            words = dealer.corrections(requests)
            self.dealt += len(requests)
            dealing = ComputingDealing(number=requests[0].number, words=words)
            self.channels.send(dealing.to_message(), sender)
