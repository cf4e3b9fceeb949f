"""A party's lines to the others that compute on shares, and to the dealer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from securevfl.core.errors import ProtocolError
from securevfl.mpc.dealt_tuples import TupleDealer, TupleRequest
from securevfl.stages.programs.messages import (
    AT_DEALER,
    ComputingBegin,
    ComputingDealing,
    ComputingKey,
    ComputingKind,
    ComputingRequest,
    ComputingSeed,
    ComputingTensor,
)
from securevfl.transport.channels import CallerChannels, Channels, receive_from
from securevfl.transport.message import StarKind


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
        """Return corrections that were asked for.

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
