"""How the primary gets averages: over the star, around another exchange, or from its own folder."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.devices import read_together, to_device
from securevfl.core.errors import ConfigError, PrivacyError, ProtocolError
from securevfl.core.progress import Observer, RowsReleased
from securevfl.federation.messages import Gradient, RoundPlan
from securevfl.federation.rounds.cut import CutLayer, CutRows
from securevfl.federation.run_plan import ROUNDS_AHEAD, RoundCounter
from securevfl.federation.session.peers import Peers, PeersHere
from securevfl.federation.state_folder import DamagedError, StateFolder
from securevfl.ledger.ledger import Ledger

# What every exchange does.


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
    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield independent rounds with their averages, in order.

        Up to :attr:`Peers.ahead` rounds may be under way at once. A plan is taken from ``plans``
        when its round is about to be announced, and no round is announced before the caller is
        done with the average of that many rounds before it.

        Reveals:
            What :meth:`release` reveals, for each.
        """

    def release(self, plan: RoundPlan) -> CutRows:
        """Return the average of the active secondaries' clipped, noised representations.

        Reveals:
            To the primary: that average. To the secondaries: the row ids of the batch.
        """
        ((_, average),) = self.release_each(iter((plan,)))
        return average

    def return_gradient(self, plan: RoundPlan, gradient: CutRows) -> None:
        """Hand the gradient of the loss with respect to the aggregate to the active secondaries.

        Reveals:
            To every active secondary: one and the same tensor, from which labels may be inferred.
        """
        sent = gradient.detach().cpu().numpy()
        self.peers.tell(Gradient(round_number=plan.round_number, gradient=sent), plan.active)


class RoundExchange(Exchange):
    """Rounds with secondaries, in this process or in others."""

    def __init__(
        self,
        peers: Peers,
        cut: CutLayer,
        *,
        device: torch.device,
        rounds: RoundCounter | None = None,
    ) -> None:
        """Make it.

        Args:
            peers: The secondaries.
            cut: The format of what crosses the cut.
            device: Where the primary computes.
            rounds: Continues a session's round numbers; None begins them.
        """
        super().__init__(RoundCounter() if rounds is None else rounds, peers, peers.ranks)
        self.cut = cut
        self.device = device

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Announce rounds ahead, and yield each one's average in turn.

        Reveals:
            What :meth:`Exchange.release_each` says.
        """
        under_way: deque[RoundPlan] = deque()
        for plan in plans:
            average = None
            # Secondaries of this process, if any, and the primary wait for their device once.
            with read_together():
                self.peers.tell(plan, plan.active)
                under_way.append(plan)
                if len(under_way) == self.peers.ahead:
                    average = self.average(under_way[0])
            if average is not None:
                yield under_way.popleft(), average
        for plan in under_way:
            yield plan, self.average(plan)

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


class ExchangeAround(Exchange):
    """An exchange around another one: releases differ, all else is the same."""

    def __init__(self, inner: Exchange) -> None:
        super().__init__(inner.rounds, inner.peers, inner.ranks)
        self.inner = inner


# Averages in blocks where secondaries are absent: their coordinates are zero.


class PresentBlocks(ExchangeAround):
    """An exchange for a top model that knows averages over all secondaries, a block for each.

    An average over fewer divides each one's numbers by fewer. The number of all of them makes the
    blocks as large as in training; what else lies in an absent one's block is the others' noise.
    """

    def __init__(self, inner: Exchange, *, blocks: int) -> None:
        """Make it.

        Args:
            inner: Reaches those that are there, whose ranks count from 1.
            blocks: How many secondaries there are in all.
        """
        super().__init__(inner)
        self.blocks = blocks

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield the sums of those that are there over the number of all.

        Reveals:
            What the inner exchange reveals.
        """
        for plan, average in self.inner.release_each(plans):
            absent = set(range(1, self.blocks + 1)) - set(plan.active)
            present = average * (len(plan.active) / self.blocks)
            numbers = [rank - 1 for rank in absent]
            yield plan, without_blocks(present, numbers, blocks=self.blocks)


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


# The primary books every release in its own ledger before it asks for it.


class ChargedExchange(ExchangeAround):
    """An exchange that charges each release to the primary's own ledger before asking for it."""

    def __init__(self, inner: Exchange, ledger: Ledger, on_charge: Callable[[float], None]) -> None:
        super().__init__(inner)
        self.ledger = ledger
        self.heard = on_charge
        self.booked_before: Sequence[Int64[np.ndarray, " batch"]] = ()
        """Rows of rounds that were booked and asked for when the run was cut, in their order, and
        that are asked for once more: what comes back are the same releases."""

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Charge each round before it is announced, then release.

        Reveals:
            What the inner exchange reveals.
        """
        return self.inner.release_each(self._charge_rounds(plans))

    def _charge_rounds(self, plans: Iterator[RoundPlan]) -> Iterator[RoundPlan]:
        for plan in plans:
            if self.booked_before and np.array_equal(plan.rows, self.booked_before[0]):
                self.booked_before = self.booked_before[1:]
            else:
                epsilon = self.ledger.charge(
                    round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
                )
                self.heard(epsilon)
            yield plan


# What the primary of a frozen run keeps: every round's rows, from the moment it has them.


@dataclass(eq=False)
class CachedRows:
    """The rounds of one release pass in the primary's folder, a file each."""

    files: StateFolder
    """The primary's; they name the run."""
    parts: Sequence[npt.NDArray[np.int64]]
    """Row ids of every round of the pass, in order."""
    _: KW_ONLY
    shape: tuple[int, ...]
    """Shape of one row of the cut, (L, H); a round of any other counts as damaged."""

    def __post_init__(self) -> None:
        """Find out what is kept.

        Raises:
            ConfigError: If what is kept is of other rows, as if the table had changed.
        """
        self._kept: dict[int, Tensor] = {}
        for number, part in enumerate(self.parts):
            aggregate = self._read(number, part)
            if aggregate is not None:
                self._kept[number] = aggregate
        if self.files.holds(_name(len(self.parts))):
            raise self._other_table()

    def missing(self) -> list[int]:
        """Return the rounds that are not kept, in order, counted from 0."""
        return [number for number in range(len(self.parts)) if number not in self._kept]

    def keep(self, number: int, aggregate: CutRows) -> None:
        """Keep a round's rows; they are on the disk when this returns.

        Raises:
            StorageError: If the disk takes no more.
        """
        rows = torch.from_numpy(self.parts[number])
        self.files.write(_name(number), {"rows": rows, "aggregate": aggregate})
        self._kept[number] = aggregate

    def asked_again(self, booked: Int64[np.ndarray, " rows"]) -> list[Int64[np.ndarray, " batch"]]:
        """Return the rows of each round that was released and never kept, in order.

        Args:
            booked: Rows that the primary's ledger has booked in this run.

        Raises:
            PrivacyError: If others are among them than the last rounds that were announced: no
                secondary releases those again.
        """
        missing = self.missing()
        lost = [number for number in missing if np.isin(self.parts[number], booked).any()]
        if not lost:
            return []
        last = lost == missing[: len(lost)] and lost[0] > max(self._kept, default=-1)
        if not last or len(lost) > ROUNDS_AHEAD:
            raise PrivacyError(
                f"{self.files.path / _name(lost[0])}: is missing or damaged, and the rows that it "
                f"held cannot be released again; restore it from a copy, or start another run with "
                f"another --out, which is charged to the table's total"
            )
        return [self.parts[number] for number in lost]

    def require_all(self) -> None:
        """Refuse a pass that is not whole; nothing is asked for.

        Raises:
            ConfigError: Naming the file that is damaged, or how many rows there are so far.
        """
        missing = self.missing()
        for number in missing:
            if self.files.holds(_name(number)):
                raise ConfigError(
                    f"{self.files.path / _name(number)}: is damaged; restore it from a copy"
                )
        if missing:
            there = sum(len(self.parts[number]) for number in self._kept)
            raise ConfigError(
                f"{self.files.path / 'released'}: holds {there} of the "
                f"{sum(map(len, self.parts))} rows; go on with the run (--resume) until all are "
                f"released"
            )

    def all(self) -> Float[Tensor, "rows positions width"]:
        """Return the aggregates of all rows, once every round is kept."""
        return torch.cat([self._kept[number] for number in range(len(self.parts))])

    def _read(self, number: int, part: Int64[np.ndarray, " batch"]) -> Tensor | None:
        try:
            state = self.files.read(_name(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if not torch.equal(rows, torch.from_numpy(part)):
            raise self._other_table()
        if aggregate.shape != (len(part), *self.shape) or not aggregate.isfinite().all():
            return None
        return aggregate

    def _other_table(self) -> ConfigError:
        rows = sum(map(len, self.parts))
        return ConfigError(
            f"{self.files.path / 'released'}: other rows were released than the {rows} that the "
            f"table has now; restore the table, or choose another --out"
        )


def _name(number: int) -> str:
    return f"released/{number + 1}.pt"


# Each row released once, then reused, as a frozen encoder allows; docs/privacy.md, section 4.


class ReleasedRows(Exchange):
    """An exchange that answers from stored releases: nothing is sent between parties."""

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

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield the stored aggregates of each round's rows.

        Reveals:
            Nothing: these values were released before.
        """
        for plan in plans:
            yield plan, self.average(plan)

    def average(self, plan: RoundPlan) -> CutRows:
        """Return the stored aggregates of a round's rows."""
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
        exchange: Where the secondaries are.
        kept: What was released before, of all rows 0 to n - 1: training, validation and test
            alike.
        observe: Hears of every round.

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
