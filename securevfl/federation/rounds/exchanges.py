"""How the primary gets averages of rounds, from secondaries or from store; and sends gradients."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.devices import read_together, to_device
from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, RowsReleased
from securevfl.federation.messages import EpochMark, Gradient, RoundPlan
from securevfl.federation.rounds.cut import CutLayer, CutRows
from securevfl.federation.rounds.kept_rounds import CachedRows, CachedTestRounds
from securevfl.federation.rounds.recording import AVERAGE, Recorder
from securevfl.federation.rounds.secondary import Secondary, save_nothing
from securevfl.federation.rounds.stacks import Stacks
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session.peers import Peers, PeersHere
from securevfl.ledger.ledger import Ledger


class Exchange(ABC):
    """How the primary gets averages of rounds, and returns gradients."""

    def __init__(self, rounds: RoundCounter, peers: Peers, ranks: tuple[int, ...]) -> None:
        self.rounds = rounds
        """Gives out the session's round numbers."""
        self.peers = peers
        """All secondaries, for messages outside rounds."""
        self.ranks = ranks
        """Ranks of all secondaries."""

    @abstractmethod
    def release(self, plan: RoundPlan) -> CutRows:
        """Return the average of the active secondaries' clipped, noised representations.

        Reveals:
            To the primary: that average. To the secondaries: the row ids of the batch.
        """

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield independent rounds with their averages, in order.

        Reveals:
            What :meth:`release` reveals, for each.
        """
        for plan in plans:
            yield plan, self.release(plan)

    def return_gradient(self, plan: RoundPlan, gradient: CutRows) -> None:
        """Send the gradient of the loss with respect to the average to the active secondaries.

        Reveals:
            To every active secondary: one and the same tensor, from which labels may be inferred.
        """
        sent = gradient.detach().cpu().numpy()
        self.peers.tell(Gradient(round_number=plan.round_number, gradient=sent), plan.active)


class RoundExchange(Exchange):
    """Rounds with secondaries, in this process or in others.

    Every round is charged to the primary's ledger before it is announced.
    """

    def __init__(
        self,
        peers: Peers,
        cut: CutLayer,
        *,
        device: torch.device,
        rounds: RoundCounter | None = None,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
        blocks: int | None = None,
    ) -> None:
        """Make it.

        Args:
            peers: The secondaries.
            cut: The format of what crosses the cut.
            device: Where the primary computes.
            rounds: Continues a session's round numbers; None begins them.
            ledger: The primary's own, open; None where none is charged, as in an audit.
            recorder: Records averages in the primary's own folder; None records nothing.
            blocks: Number of blocks that a top model expects, one a secondary, where some of these
                may be absent; None: averages as they are.
        """
        super().__init__(RoundCounter() if rounds is None else rounds, peers, peers.ranks)
        self.cut = cut
        self.device = device
        self.ledger = ledger
        self.recorder = recorder
        self.blocks = blocks
        self.epsilon_spent: float | None = None
        """Epsilon after the last charge of this exchange; None before it."""
        self.charged_before: Sequence[Int64[np.ndarray, " batch"]] = ()
        """Rows of rounds that an earlier session has charged and announced, in their order, and
        that are requested once more: the answers are the same releases."""
        self.test_rounds: CachedTestRounds | None = None
        """Averages of test rounds, each requested once; None keeps none."""

    def release(self, plan: RoundPlan) -> CutRows:
        """Charge a round, announce it, and return its average.

        Reveals:
            What :meth:`Exchange.release` says.
        """
        self._charge(plan)
        with read_together():
            self.peers.tell(plan, plan.active)
            average = self.average(plan)
        return self._keep(plan, average)

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Charge rounds, announce them ahead, and yield each one's average in turn.

        Up to :attr:`Peers.ahead` rounds may be under way at once. A plan is taken from ``plans``
        when its round is about to be announced, and no round is announced before the caller is
        done with the average of that many rounds before it. A test round whose average is kept is
        neither charged nor announced.

        Reveals:
            What :meth:`Exchange.release_each` says.
        """
        under_way: deque[RoundPlan] = deque()
        for plan in plans:
            kept = None if self.test_rounds is None else self.test_rounds.find(plan.rows)
            if kept is not None:
                # Those that are kept are the first ones: nothing is under way.
                yield plan, kept.to(self.device)
                continue
            self._charge(plan)
            average = None
            # Secondaries of this process, if any, and the primary wait for their device once.
            with read_together():
                self.peers.tell(plan, plan.active)
                under_way.append(plan)
                if len(under_way) == self.peers.ahead:
                    average = self.average(under_way[0])
            if average is not None:
                first = under_way.popleft()
                yield first, self._keep(first, average)
        for plan in under_way:
            yield plan, self._keep(plan, self.average(plan))

    def average(self, plan: RoundPlan) -> CutRows:
        """Return the average of a round that was announced.

        Reveals:
            To the primary: that average.
        """
        own = self.cut.zeros(len(plan.rows))
        summed = self.peers.add_up(own, plan.active, round_number=plan.round_number)
        total = to_device(summed, self.device)
        active = [self.peers.name(rank) for rank in plan.active]
        return self.cut.decode(
            total, rows=len(plan.rows), active=active, round_number=plan.round_number
        )

    def _charge(self, plan: RoundPlan) -> None:
        """Charge a round, unless an earlier session has."""
        if self.charged_before and np.array_equal(plan.rows, self.charged_before[0]):
            self.charged_before = self.charged_before[1:]
        elif self.ledger is not None:
            self.epsilon_spent = self.ledger.charge(
                round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
            )

    def _keep(self, plan: RoundPlan, average: CutRows) -> CutRows:
        """Record and keep the average of a round; return it as the top model takes it."""
        if self.recorder is not None:
            self.recorder.take(
                AVERAGE,
                round_number=plan.round_number,
                rows=plan.rows,
                active=plan.active,
                purpose=plan.purpose,
                average=average,
            )
        if self.test_rounds is not None:
            self.test_rounds.keep(average)
        if self.blocks is None:
            return average
        # An average over fewer divides each one's numbers by fewer, and what lies in the block of
        # an absent one is the others' noise.
        absent = [rank - 1 for rank in range(1, self.blocks + 1) if rank not in plan.active]
        present = average * (len(plan.active) / self.blocks)
        return without_blocks(present, absent, blocks=self.blocks)


def without_blocks(
    aggregate: Float[Tensor, "rows positions width"], absent: Collection[int], *, blocks: int
) -> Float[Tensor, "rows positions width"]:
    """Return averages with zeros in the coordinates of some secondaries.

    Args:
        aggregate: Whose last axis is one block after the other.
        absent: Numbers of the blocks that become zero, from 0.
        blocks: How many there are.
    """
    masked = aggregate.clone()
    each = aggregate.shape[-1] // blocks
    for block in absent:
        masked[..., each * block : each * (block + 1)] = 0
    return masked


class ReleasedRows(Exchange):
    """An exchange that answers from stored releases: nothing is sent between parties.

    References:
        docs/privacy.md, section 4.
    """

    def __init__(
        self,
        aggregates: Float[Tensor, "rows positions width"],
        *,
        ranks: tuple[int, ...],
        rounds: RoundCounter,
        device: torch.device,
    ) -> None:
        """Make it; no secondary gets messages outside rounds, for a frozen encoder does not train.

        Args:
            aggregates: Of all rows.
            ranks: Of all secondaries.
            rounds: Gives out the session's round numbers.
            device: Where the top model computes.
        """
        super().__init__(rounds, PeersHere({}), ranks)
        self._aggregates = aggregates
        self._device = device

    def release(self, plan: RoundPlan) -> CutRows:
        """Return the stored aggregates of a round's rows.

        Reveals:
            Nothing: these values were released before.
        """
        rows = torch.as_tensor(plan.rows, device=self._aggregates.device)
        return to_device(self._aggregates[rows], self._device)

    def return_gradient(self, plan: RoundPlan, gradient: CutRows) -> None:
        """Drop the gradient: a frozen encoder does not learn.

        Reveals:
            Nothing.
        """


def release_once(
    exchange: Exchange, kept: CachedRows, *, observe: Observer
) -> Float[Tensor, "rows positions width"]:
    """Release every row that is not kept yet, and return all aggregates, in the order of row ids.

    A round is announced when the one :data:`securevfl.federation.run_plan.ROUNDS_AHEAD` before it
    is kept, so that a crash loses none but those under way, which every secondary can answer again.

    Args:
        exchange: Rounds with the secondaries.
        kept: What was released before, of all rows 0 to n - 1: training, validation and test
            alike.
        observe: Called with every round.

    Reveals:
        To the primary: one noisy average for every row. To the secondaries: nothing new.
    """
    if not kept.parts:
        raise ProtocolError("there are no rows to release")
    missing = kept.missing()
    plans = (
        RoundPlan(
            round_number=exchange.rounds.next(),
            rows=kept.parts[number],
            active=exchange.ranks,
            purpose="release",
        )
        for number in missing
    )
    for number, (_, aggregate) in zip(missing, exchange.release_each(plans), strict=True):
        kept.keep(number, aggregate.cpu())
        observe(RowsReleased(done=number + 1, of=len(kept.parts)))
    return kept.all()


class SimulatedExchange(RoundExchange):
    """Rounds with secondaries of the same process, on CPU or GPU."""

    def __init__(
        self,
        secondaries: Mapping[int, Secondary],
        cut: CutLayer,
        *,
        end_epoch: Mapping[int, Callable[[EpochMark], None]] = MappingProxyType({}),
        links: int = 0,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
        blocks: int | None = None,
    ) -> None:
        """Make it.

        Args:
            secondaries: By rank.
            cut: The format of what crosses it.
            end_epoch: Saves what an epoch's mark says, by rank; nothing where there is none.
            links: K, links of a row, by which small secondaries are computed together; with 0 each
                works alone.
            ledger: The primary's own; see :class:`RoundExchange`.
            recorder: The primary's; see :class:`RoundExchange`.
            blocks: Number of blocks that a top model expects; see :class:`RoundExchange`.
        """
        self.secondaries = dict(secondaries)
        if links:
            stacks = Stacks(self.secondaries, links=links)
            for rank, secondary in self.secondaries.items():
                secondary.stacked_in = partial(stacks.share, rank)
        handlers = {
            rank: secondary.handlers(end_epoch.get(rank, save_nothing))
            for rank, secondary in self.secondaries.items()
        }
        device = next(iter(self.secondaries.values())).device
        super().__init__(
            PeersHere(handlers), cut, device=device, ledger=ledger, recorder=recorder, blocks=blocks
        )
