"""A federation between processes: both ends of the authenticated star."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import Announcement, Gradient, RoundKind, Share
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import ROUNDS_AHEAD, RoundCounter, RoundPlan, RunPlan
from securevfl.federation.session.handshake import Rejoin
from securevfl.federation.session.peers import Handlers, HandlerTable, M, Words
from securevfl.ledger.countersigning import Countersigning, LedgerKind
from securevfl.mpc.crypten_bridge import CrypTenBridge
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import CrypTenSumTo, SumTo
from securevfl.transport.message import Message, StarKind, TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

# Secure sums over the star: what CrypTen's reveal sends and receives.


class PrimaryWire:
    """The primary's end of the wire, from which CrypTen's reveal gets the masked words."""

    def __init__(
        self, transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
    ) -> None:
        self._transport = transport
        self._names = names
        self._deadline_s = deadline_s

    def add_words(
        self, round_number: int, total: Int64[Tensor, " words"], ranks: Sequence[int]
    ) -> None:
        """Receive one share from every rank and add it to ``total`` modulo 2^64.

        Shares are added in the order in which they arrive.

        Reveals:
            To the primary: masked words, whose sum alone means anything.
        """
        summed = total.numpy()
        shares = self._transport.receive_each(
            [self._names[rank] for rank in ranks],
            RoundKind.SHARE,
            round_number=round_number,
            deadline_s=self._deadline_s,
        )
        for message in shares:
            np.add(summed, Share.from_message(message, count=len(summed)).words, out=summed)

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Refuse: the primary keeps its own words to itself.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("the primary collects words and sends none")


class SecondaryWire:
    """A secondary's end of the wire, into which CrypTen's reveal puts the masked words."""

    def __init__(self, transport: SecondaryTransport) -> None:
        self._transport = transport

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Send this round's share.

        Reveals:
            To the primary: words masked by keys that it does not have.
        """
        share = Share(round_number=round_number, words=words.numpy())
        self._transport.send(share.to_message())

    def add_words(self, round_number: int, total: Tensor, ranks: Sequence[int]) -> None:
        """Refuse: only the primary collects.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("only the primary collects words")


def sum_to_primary(
    transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
) -> SumTo:
    """Return the primary's end of secure sums.

    Args:
        transport: The primary's end of the star.
        names: The secondaries by rank.
        deadline_s: How long a secondary may take to send its words, in seconds.
    """
    wire = PrimaryWire(transport, names, deadline_s=deadline_s)
    return CrypTenSumTo(CrypTenBridge(wire, rank=PRIMARY_RANK), None)


def sum_from_secondary(
    transport: SecondaryTransport, plan: RunPlan, pair_keys: Mapping[int, bytes], *, rank: int
) -> tuple[SumTo, PairwiseMasks]:
    """Return a secondary's end of secure sums, and its masks, which are the caller's to close.

    Bound from the start is what a plan has beyond the session's facts, which are in the pair keys:
    the format of words, and how many rows train.

    Args:
        transport: This party's end of the star.
        plan: The run.
        pair_keys: Its keys with every other caller, by rank.
        rank: Its own.
    """
    others = {peer: key for peer, key in pair_keys.items() if peer in plan.secondaries}
    masks = PairwiseMasks(rank, others, degree=plan.config.privacy.mask_degree)
    agreed = repr((plan.cut, plan.training_rows))
    masks.bind(hashlib.sha256(agreed.encode()).digest(), tuple(others))
    return CrypTenSumTo(CrypTenBridge(SecondaryWire(transport), rank=rank), masks), masks


# Peers over the star: any stage's messages.


class PeersOverStar:
    """Secondaries in other processes, over the authenticated star."""

    def __init__(
        self,
        transport: PrimaryTransport,
        names: Mapping[int, str],
        *,
        deadline_s: float,
        work_s: float | None = None,
    ) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            names: The secondaries by rank.
            deadline_s: How long a secondary may take to send its words, in seconds.
            work_s: How long it may take to answer a message, in seconds; None: ``deadline_s``.
        """
        self._transport = transport
        self._names = dict(names)
        self._work_s = deadline_s if work_s is None else work_s
        self.sum_to = sum_to_primary(transport, self._names, deadline_s=deadline_s)
        """This party's end of secure sums."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._names)

    def tell(self, message: TypedMessage) -> None:
        """Send a message to every secondary.

        Reveals:
            What :meth:`Peers.tell` reveals.
        """
        self._transport.broadcast(list(self._names.values()), message.to_message())

    def ask(self, message: TypedMessage, answer: type[M], **known: Any) -> list[M]:
        """Send a message to every secondary, and wait for their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        self.tell(message)
        received = self._transport.receive_each(
            list(self._names.values()),
            answer.KIND,
            round_number=getattr(message, "round_number", 0),
            deadline_s=self._work_s,
        )
        answers = {one.sender: answer.from_message(one, **known) for one in received}
        # By rank, not by arrival: a sum of floats depends on its order.
        return [answers[name] for name in self._names.values()]

    def total(self, message: TypedMessage, own: Words, *, round_number: int) -> Words:
        """Send a message to every secondary, and add up their masked words.

        Reveals:
            What :meth:`Peers.total` reveals.
        """
        self.tell(message)
        total = self.sum_to(own.cpu(), round_number=round_number, active=self.ranks)
        assert total is not None, "the primary's reveal returns the total"
        return total.to(own.device)


class ReplyOverStar:
    """Answers the primary over the star."""

    def __init__(
        self, transport: SecondaryTransport, sum_to: SumTo, ranks: tuple[int, ...]
    ) -> None:
        self._transport = transport
        self._sum_to = sum_to
        self._ranks = ranks

    def send(self, message: TypedMessage) -> None:
        """Send a message back.

        Reveals:
            What :meth:`Reply.send` reveals.
        """
        self._transport.send(message.to_message())

    def prepare(self, count: int, *, round_number: int) -> None:
        """Prepare the masks of so many words.

        Reveals:
            Nothing.
        """
        self._sum_to.prepare(count, round_number=round_number, active=self._ranks)

    def add(self, words: Words, *, round_number: int) -> None:
        """Add words to a sum under masks.

        Reveals:
            What :meth:`Reply.add` reveals.
        """
        self._sum_to(words.cpu(), round_number=round_number, active=self._ranks)


def serve(
    handlers: Handlers,
    transport: SecondaryTransport,
    sum_to: SumTo,
    *,
    ranks: tuple[int, ...],
    deadline_s: float,
) -> None:
    """Handle the primary's messages until one ends the stage.

    Args:
        handlers: What this party does with each message type.
        transport: Its end of the star.
        sum_to: Its end of secure sums.
        ranks: Ranks of all secondaries, which get the same messages.
        deadline_s: How long the primary may be silent, in seconds.

    Raises:
        ProtocolError: If the primary leaves the protocol, fails or falls silent.

    Reveals:
        To the primary: what the handlers answer.
    """
    table, reply, ended = HandlerTable(handlers), ReplyOverStar(transport, sum_to, ranks), False
    while not ended:
        message = transport.receive(
            table.kinds, round_number=table.round_number, deadline_s=deadline_s
        )
        sum_to.bind(message.digest(), ranks)
        ended = table.handle(table.read(message), reply)


# The primary's end of rounds.


class FederatedExchange:
    """An exchange with secondaries in other processes, over the authenticated star."""

    def __init__(
        self,
        transport: PrimaryTransport,
        names: Mapping[int, str],
        cut: CutLayer,
        *,
        deadline_s: float,
        device: torch.device,
        work_s: float | None = None,
        rounds: RoundCounter | None = None,
    ) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            names: The secondaries by rank.
            cut: The format of what crosses the cut.
            deadline_s: How long a secondary may take to answer, in seconds.
            device: Where the primary computes.
            work_s: How long it may work on a message before it answers, in seconds; None:
                ``deadline_s``.
            rounds: Continues a session's round numbers; None begins them.
        """
        self.transport = transport
        self.names = dict(names)
        self.cut = cut
        self.device = device
        self.rounds = RoundCounter() if rounds is None else rounds
        self.peers = PeersOverStar(transport, names, deadline_s=deadline_s, work_s=work_s)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return self.peers.ranks

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Announce the round and return the average of the active secondaries.

        Reveals:
            What :meth:`Exchange.release` reveals.
        """
        self._announce(plan)
        return self._collect(plan)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Announce rounds ahead, and yield each one's average in turn.

        Reveals:
            What :meth:`Exchange.release_each` says.
        """
        under_way: deque[RoundPlan] = deque()
        for plan in plans:
            self._announce(plan)
            under_way.append(plan)
            if len(under_way) == ROUNDS_AHEAD:
                yield self._collect(under_way.popleft())
        while under_way:
            yield self._collect(under_way.popleft())

    def _announce(self, plan: RoundPlan) -> None:
        self._tell(plan.active, Announcement(plan=plan))

    def _collect(self, plan: RoundPlan) -> Tensor:
        total = self.peers.sum_to(
            self.cut.zeros(len(plan.rows)), round_number=plan.round_number, active=plan.active
        )
        assert total is not None, "the primary's reveal returns the total"
        return self.cut.decode(total.to(self.device), rows=len(plan.rows), active=len(plan.active))

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Send the gradient of the aggregate to every active secondary.

        Reveals:
            What :meth:`Exchange.return_gradient` reveals.
        """
        sent = gradient.detach().cpu().numpy()
        self._tell(plan.active, Gradient(round_number=plan.round_number, gradient=sent))

    def _tell(self, ranks: Sequence[int], told: TypedMessage) -> None:
        self.transport.broadcast([self.names[rank] for rank in ranks], told.to_message())


# A secondary's end of rounds.


class SecondaryServer:
    """Answer the primary's messages with one :class:`Secondary`."""

    def __init__(
        self,
        secondary: Secondary,
        transport: SecondaryTransport,
        sum_to: SumTo,
        plan: RunPlan,
        *,
        handlers: Handlers,
        log: Callable[..., None],
        countersigning: Countersigning | None = None,
    ) -> None:
        """Make it.

        Args:
            secondary: Who answers.
            transport: This party's end of the star.
            sum_to: Its end of secure sums.
            plan: The run, as this party has computed it.
            handlers: What it does with each message type besides rounds'.
            log: This party's log.
            countersigning: Where ledger heads are exchanged, before the run may end; None for
                rounds that no ledger of a table is charged with.
        """
        self.secondary = secondary
        self.transport = transport
        self.sum_to = sum_to
        self.plan = plan
        self._handlers = handlers
        self.log = log
        self.countersigning = countersigning
        self._runtime = plan.config.runtime
        self._ranks = tuple(plan.secondaries)
        # With a ledger to countersign, DONE is due after the end's heads and at no other time.
        last = StarKind.DONE if countersigning is None else LedgerKind.COUNTERSIGN
        rejoin = (RoundKind.REJOIN,) if plan.config.continues_on_loss else ()
        self._last = (*rejoin, last)

    def serve(self) -> bool:
        """Answer until the primary says that the run is done, or that a party is back.

        Returns:
            Whether the run is done; if not, this party joins the next session.

        Raises:
            ProtocolError: If the primary leaves the protocol, announces more rounds ahead than it
                may, fails or falls silent.
            PrivacyError: If a release that it asks for is forbidden; the ledger has decided.

        Reveals:
            To the primary: what :meth:`Exchange.release` says, and what the handlers answer.
        """
        table, runtime = HandlerTable(self._handlers), self._runtime
        reply = ReplyOverStar(self.transport, self.sum_to, self._ranks)
        while True:
            waits = table.round_number is not None
            message = self.transport.receive(
                table.kinds if waits else (RoundKind.PLAN, *table.kinds, *self._last),
                round_number=table.round_number,
                deadline_s=runtime.round_timeout_s if waits else runtime.idle_timeout_s,
            )
            if message.kind is RoundKind.PLAN:
                self._round(message)
                continue
            # All others go to every secondary of the session.
            self.sum_to.bind(message.digest(), self._ranks)
            if message.kind in table.kinds:
                table.handle(table.read(message), reply)
            elif message.kind is RoundKind.REJOIN:
                absent = set(self.plan.ranks.values()) - {PRIMARY_RANK, *self._ranks}
                Rejoin.from_message(message, absent=sorted(absent))
                self.secondary.validator.validate_rejoin()
                return False
            elif self._ends(message):
                return True

    def serve_pass(self) -> int:
        """Answer the rounds of one pass over the plan's rows, and return the last one's number.

        Raises:
            ProtocolError: As :meth:`serve`.
            PrivacyError: As :meth:`serve`.

        Reveals:
            To the primary: what :meth:`Exchange.release` says.
        """
        number = 0
        for _ in range(self.plan.releases.rounds):
            message = self.transport.receive(
                RoundKind.PLAN, round_number=None, deadline_s=self._runtime.idle_timeout_s
            )
            self._round(message)
            number = message.round_number
        return number

    def _ends(self, message: Message) -> bool:
        """Return whether the run ends with a message: one that countersigns its end, or is DONE."""
        if self.countersigning is None:
            self.secondary.validator.validate_done()
            return True
        if not self.countersigning.answer(message):
            return False
        self.secondary.validator.validate_done()
        self.transport.receive(
            StarKind.DONE, round_number=None, deadline_s=self._runtime.idle_timeout_s
        )
        return True

    def _round(self, message: Message) -> None:
        plan = Announcement.from_message(message).plan
        self.sum_to.bind(message.digest(), plan.active)
        # Whoever has not had this round's answer may have announced so many and no more.
        if (waiting := self.transport.waiting) >= ROUNDS_AHEAD:
            raise ProtocolError(
                f"round {plan.round_number}: the primary has sent {waiting} messages behind it; "
                f"it may announce {ROUNDS_AHEAD} rounds ahead"
            )

        def prepare() -> None:
            count = self.plan.cut.words(len(plan.rows))
            self.sum_to.prepare(count, round_number=plan.round_number, active=plan.active)

        words = self.secondary.answer(plan, validated=prepare).cpu()
        self.sum_to(words, round_number=plan.round_number, active=plan.active)
        self.log(
            "released",
            round_number=plan.round_number,
            rows=len(plan.rows),
            purpose=plan.purpose,
            epsilon=self.secondary.epsilon_spent,
            not_finite=self.secondary.not_finite,
        )
        if plan.wants_gradient and self.plan.learns:
            message = self.transport.receive(
                RoundKind.GRADIENT,
                round_number=plan.round_number,
                deadline_s=self._runtime.round_timeout_s,
            )
            self.sum_to.bind(message.digest(), plan.active)
            shape = (len(plan.rows), *self.plan.cut.shape)
            gradient = torch.from_numpy(Gradient.from_message(message, shape=shape).gradient)
            self.secondary.learn(plan, gradient.to(self.secondary.device))
