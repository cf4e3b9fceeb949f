"""A federation between processes: both ends of the authenticated star."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from securevfl.core.devices import reads
from securevfl.core.errors import ProtocolError
from securevfl.core.waits import Wait
from securevfl.federation.messages import RoundKind, RoundPlan, Share
from securevfl.federation.run_plan import ROUNDS_AHEAD, RunPlan
from securevfl.federation.session.peers import Handlers, HandlerTable, M, Peers
from securevfl.mpc.codec import SumTo, Words
from securevfl.mpc.crypten_bridge import CrypTenSumTo
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.on_shares import Seat, SharedSum
from securevfl.transport.message import TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport


@dataclass(frozen=True)
class PrimaryWire:
    """The primary's end of the wire, from which CrypTen's reveal gets the masked words."""

    transport: PrimaryTransport
    names: Mapping[int, str]
    deadline_s: float
    masked: ClassVar[bool] = False

    def carry(self, round_number: int, words: Words, ranks: Sequence[int]) -> None:
        """Receive one share from every rank and add it to ``words`` modulo 2^64.

        Shares are added in the order in which they arrive.

        Reveals:
            To the primary: masked words, whose sum alone means anything.
        """
        summed = words.numpy()
        names = [self.names[rank] for rank in ranks]
        for message in self.transport.receive_each(
            names, RoundKind.SHARE, round_number=round_number, deadline_s=self.deadline_s
        ):
            np.add(summed, Share.from_message(message, count=len(summed)).words, out=summed)


@dataclass(frozen=True)
class SecondaryWire:
    """A secondary's end of the wire, into which CrypTen's reveal puts the masked words."""

    transport: SecondaryTransport
    masked: ClassVar[bool] = True

    def carry(self, round_number: int, words: Words, ranks: Sequence[int]) -> None:  # noqa: ARG002
        """Send this round's share.

        Reveals:
            To the primary: words masked by keys that it does not have.
        """
        share = Share(round_number=round_number, words=words.numpy())
        self.transport.send(share.to_message())


def sum_from_secondary(
    transport: SecondaryTransport,
    plan: RunPlan,
    pair_keys: Mapping[int, bytes],
    *,
    rank: int,
    context: bytes = b"",
) -> tuple[SumTo, PairwiseMasks]:
    """Return a secondary's end of secure sums, and its masks, which are the caller's to close.

    Bound from the start is what a plan has beyond the session's facts, which are in the pair keys:
    the format of words, and how many rows train.

    Args:
        transport: This party's end of the star.
        plan: The run.
        pair_keys: Its keys with every other caller, by rank.
        rank: Its own.
        context: What runs, the same at all parties, for words that are added up on shares.
    """
    others = {peer: key for peer, key in pair_keys.items() if peer in plan.secondaries}
    masks = PairwiseMasks(rank, others, degree=plan.config.privacy.mask_degree)
    agreed = repr((plan.cut, plan.training_rows))
    masks.bind(hashlib.sha256(agreed.encode()).digest(), tuple(others))
    wire = SecondaryWire(transport)
    if plan.config.engine == "masked":
        return CrypTenSumTo(wire, masks), masks
    world = tuple(plan.secondaries)
    seat = Seat(rank=rank, world=world, pair_keys=others, context=context)
    return SharedSum(wire, masks, seat), masks


class PeersOverStar(Peers):
    """Secondaries in other processes, over the authenticated star."""

    ahead = ROUNDS_AHEAD

    def __init__(
        self,
        transport: PrimaryTransport,
        names: Mapping[int, str],
        *,
        wait: Wait,
        work_s: float | None = None,
    ) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            names: The secondaries by rank.
            wait: How long a secondary may take to take a message in, and to send its words.
            work_s: How long it may take to answer a message, in seconds; None: as long.
        """
        self._transport = transport
        self._names = dict(names)
        self._wait_s = wait.primary_s
        self._work_s = self._wait_s if work_s is None else work_s
        wire = PrimaryWire(transport, self._names, self._wait_s)
        self._sum_to = CrypTenSumTo(wire, None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._names)

    @property
    def traffic(self) -> int:
        """Bytes that the primary has sent to all parties and received from them."""
        sent, received = self._transport.bytes_sent, self._transport.bytes_received
        return sum(sent.values()) + sum(received.values())

    def name(self, rank: int) -> str:
        """Return a secondary's name in the federation file."""
        return self._names[rank]

    def tell(self, message: TypedMessage, ranks: Sequence[int] | None = None) -> None:
        """Send a message to secondaries.

        Reveals:
            What :meth:`Peers.tell` reveals.
        """
        names = [self._names[rank] for rank in (self.ranks if ranks is None else ranks)]
        self._transport.broadcast(names, message.to_message(), deadline_s=self._wait_s)

    def ask(
        self,
        message: TypedMessage,
        answer: type[M],
        ranks: Sequence[int] | None = None,
        **known: Any,
    ) -> list[M]:
        """Send a message to secondaries, and wait for their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        self.tell(message, ranks)
        names = [self._names[rank] for rank in (self.ranks if ranks is None else ranks)]
        received = self._transport.receive_each(
            names,
            answer.KIND,
            round_number=getattr(message, "round_number", 0),
            deadline_s=self._work_s,
        )
        answers = {reply.sender: answer.from_message(reply, **known) for reply in received}
        # By rank, not by arrival: a sum of floats depends on its order.
        return [answers[name] for name in names]

    def add_up(self, own: Words, ranks: Sequence[int], *, round_number: int) -> Words:
        """Add up the masked words of secondaries as they arrive.

        Reveals:
            What :meth:`Peers.add_up` reveals.
        """
        total = self._sum_to(own.cpu(), round_number=round_number, active=ranks)
        assert total is not None, "the primary's reveal returns the total"
        return total.to(own.device)


@dataclass(frozen=True)
class ReplyOverStar:
    """Answers one message of the primary over the star."""

    transport: SecondaryTransport
    sum_to: SumTo
    ranks: tuple[int, ...]
    """Who has this message of the primary too, and adds words to the same sum."""

    def send(self, message: TypedMessage) -> None:
        """Send a message back.

        Reveals:
            What :meth:`Reply.send` reveals.
        """
        self.transport.send(message.to_message())

    def prepare(self, count: int, *, round_number: int) -> None:
        """Prepare the masks of so many words.

        Reveals:
            Nothing.
        """
        self.sum_to.prepare(count, round_number=round_number, active=self.ranks)

    def add(self, words: Words, *, round_number: int) -> None:
        """Add words to a sum under masks; see :meth:`Reply.add`.

        Reveals:
            What :meth:`Reply.add` reveals.
        """
        (known,) = reads().host(words)
        self.sum_to(known, round_number=round_number, active=self.ranks)


def serve(
    handlers: Handlers,
    transport: SecondaryTransport,
    sum_to: SumTo,
    *,
    ranks: tuple[int, ...],
    deadline_s: float,
    follow_s: float | None = None,
) -> None:
    """Handle the primary's messages until one ends the stage.

    Args:
        handlers: What this party does with each message type.
        transport: Its end of the star.
        sum_to: Its end of secure sums.
        ranks: Ranks of all secondaries, which get the same messages but for those of rounds.
        deadline_s: How long the primary may be silent, in seconds.
        follow_s: The same where a certain message must follow; None: ``deadline_s``.

    Raises:
        ProtocolError: If the primary leaves the protocol, announces more rounds ahead than it may,
            fails or falls silent.
        PrivacyError: If a release that it asks for is forbidden; the ledger has decided.

    Reveals:
        To the primary: what the handlers answer.
    """
    table, active = HandlerTable(handlers), ranks
    while True:
        waits = table.round_number is not None
        message = transport.receive(
            table.kinds,
            round_number=table.round_number,
            deadline_s=deadline_s if follow_s is None or not waits else follow_s,
        )
        read = table.read(message)
        if not waits:
            # What follows goes to the same parties.
            active = read.active if isinstance(read, RoundPlan) else ranks
        if table.is_to_all(read):
            sum_to.bind(message.digest(), active)
        # The primary may announce so many rounds before it has this one's answer.
        if isinstance(read, RoundPlan) and (waiting := transport.waiting) >= ROUNDS_AHEAD:
            raise ProtocolError(
                f"round {read.round_number}: the primary has sent {waiting} messages behind it; "
                f"it may announce {ROUNDS_AHEAD} rounds ahead"
            )
        if table.handle(read, ReplyOverStar(transport, sum_to, active)):
            return
