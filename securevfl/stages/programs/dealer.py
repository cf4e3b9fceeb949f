"""The dealer's part where parties compute on shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from securevfl.core.errors import ProtocolError
from securevfl.mpc.dealt_tuples import TupleDealer
from securevfl.stages.programs.messages import (
    AT_DEALER,
    ComputingBegin,
    ComputingDealing,
    ComputingKind,
    ComputingRequest,
    ComputingSeed,
)
from securevfl.transport.channels import CallerChannels
from securevfl.transport.message import StarKind


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
