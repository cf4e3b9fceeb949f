"""How the primary gets averages: over the star, around another exchange, or from its own folder."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.errors import ConfigError, PrivacyError, ProtocolError
from securevfl.core.progress import Observer, RowsReleased
from securevfl.federation.checkpoint import DamagedError, StateFolder
from securevfl.federation.run_plan import ROUNDS_AHEAD, RoundCounter, RoundPlan, noting
from securevfl.federation.session.peers import Peers, PeersHere
from securevfl.ledger.ledger import Ledger

# What every exchange does.


@runtime_checkable
class Exchange(Protocol):
    """How the primary reaches the secondaries: simulated, between processes, or from a cache."""

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        ...

    @property
    def peers(self) -> Peers:
        """All secondaries, for messages outside rounds."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        ...

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' clipped, noised representations.

        Reveals:
            To the primary: that average. To the secondaries: the row ids of the batch.
        """
        ...

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of independent rounds, in their order.

        Up to :data:`ROUNDS_AHEAD` rounds may be under way at once. A plan is taken from ``plans``
        when its round is about to be announced, and no round is announced before the caller is
        done with the average of that many rounds before it.

        Reveals:
            What :meth:`release` reveals, for each.
        """
        ...

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Hand the gradient of the loss with respect to the aggregate to the active secondaries.

        Reveals:
            To every active secondary: one and the same tensor, from which labels may be inferred.
        """
        ...


# An exchange around another one: what it does not change, it passes on.


class ExchangeWrapper(ABC):
    """Passes everything on but releases, which are what its subclasses are for."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        return self.inner.rounds

    @property
    def peers(self) -> Peers:
        """All secondaries that the inner exchange reaches."""
        return self.inner.peers

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries that the inner exchange reaches."""
        return self.inner.ranks

    @abstractmethod
    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' representations.

        Reveals:
            What the inner exchange reveals.
        """

    @abstractmethod
    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of independent rounds.

        Reveals:
            What the inner exchange reveals.
        """

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Pass the gradient on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.return_gradient(plan, gradient)


# Averages in blocks where secondaries are absent: their coordinates are zero.


class PresentBlocks(ExchangeWrapper):
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

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the sum of those that are there over the number of all.

        Reveals:
            What the inner exchange reveals.
        """
        return self._present(self.inner.release(plan), plan)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of independent rounds.

        Reveals:
            What the inner exchange reveals.
        """
        under_way: deque[RoundPlan] = deque()
        for average in self.inner.release_each(noting(plans, under_way)):
            yield self._present(average, under_way.popleft())

    def _present(self, average: Tensor, plan: RoundPlan) -> Tensor:
        average = average * (len(plan.active) / self.blocks)
        absent = set(range(1, self.blocks + 1)) - set(plan.active)
        return without_blocks(average, [rank - 1 for rank in absent], blocks=self.blocks)


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


class ChargedExchange(ExchangeWrapper):
    """An exchange that charges each release to the primary's own ledger before asking for it."""

    def __init__(self, inner: Exchange, ledger: Ledger, heard: Callable[[float], None]) -> None:
        super().__init__(inner)
        self.ledger = ledger
        self.heard = heard
        self.booked_before: Sequence[Int64[np.ndarray, " batch"]] = ()
        """Rows of rounds that were booked and asked for when the run was cut, in their order, and
        that are asked for once more: what comes back are the same releases."""

    def release(self, plan: RoundPlan) -> Tensor:
        """Charge, then release.

        Reveals:
            What the inner exchange reveals.
        """
        self._charge(plan)
        return self.inner.release(plan)

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[Tensor]:
        """Charge each round before it is announced, then release.

        Reveals:
            What the inner exchange reveals.
        """
        return self.inner.release_each(self._charged(plans))

    def _charged(self, plans: Iterator[RoundPlan]) -> Iterator[RoundPlan]:
        for plan in plans:
            self._charge(plan)
            yield plan

    def _charge(self, plan: RoundPlan) -> None:
        if self.booked_before and np.array_equal(plan.rows, self.booked_before[0]):
            self.booked_before = self.booked_before[1:]
            return
        epsilon = self.ledger.charge(
            round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
        )
        self.heard(epsilon)


# What the primary of a frozen run keeps: every round's rows, from the moment it has them.


class CachedRows:
    """The rounds of one release pass in the primary's folder, a file each."""

    def __init__(
        self,
        files: StateFolder,
        parts: Sequence[npt.NDArray[np.int64]],
        *,
        shape: tuple[int, ...],
    ) -> None:
        """Find out what is kept.

        Args:
            files: The primary's; they name the run.
            parts: Row ids of every round of the pass, in order.
            shape: Of one row of the cut, (L, H); a round of any other counts as damaged.

        Raises:
            ConfigError: If what is kept is of other rows, as if the table had changed.
        """
        self._files = files
        self.parts = parts
        self._shape = shape
        self._kept: dict[int, Tensor] = {}
        for number, part in enumerate(parts):
            aggregate = self._read(number, part)
            if aggregate is not None:
                self._kept[number] = aggregate
        if files.holds(_name(len(parts))):
            raise self._other_table()

    def missing(self) -> list[int]:
        """Return the rounds that are not kept, in order, counted from 0."""
        return [number for number in range(len(self.parts)) if number not in self._kept]

    def keep(self, number: int, aggregate: Float[Tensor, "batch positions width"]) -> None:
        """Keep a round's rows; they are on the disk when this returns.

        Raises:
            StorageError: If the disk takes no more.
        """
        rows = torch.from_numpy(self.parts[number])
        self._files.write(_name(number), {"rows": rows, "aggregate": aggregate})
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
                f"{self._files.path / _name(lost[0])}: is missing or damaged, and the rows that it "
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
            if self._files.holds(_name(number)):
                raise ConfigError(
                    f"{self._files.path / _name(number)}: is damaged; restore it from a copy"
                )
        if missing:
            there = sum(len(self.parts[number]) for number in self._kept)
            raise ConfigError(
                f"{self._files.path / 'released'}: holds {there} of the "
                f"{sum(map(len, self.parts))} rows; go on with the run (--resume) until all are "
                f"released"
            )

    def all(self) -> Float[Tensor, "rows positions width"]:
        """Return the aggregates of all rows, once every round is kept."""
        return torch.cat([self._kept[number] for number in range(len(self.parts))])

    def _read(self, number: int, part: Int64[np.ndarray, " batch"]) -> Tensor | None:
        try:
            state = self._files.read(_name(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if not torch.equal(rows, torch.from_numpy(part)):
            raise self._other_table()
        if aggregate.shape != (len(part), *self._shape) or not aggregate.isfinite().all():
            return None
        return aggregate

    def _other_table(self) -> ConfigError:
        rows = sum(map(len, self.parts))
        return ConfigError(
            f"{self._files.path / 'released'}: other rows were released than the {rows} that the "
            f"table has now; restore the table, or choose another --out"
        )


def _name(number: int) -> str:
    return f"released/{number + 1}.pt"


# Each row released once, then reused, as a frozen encoder allows; docs/privacy.md, section 4.


class ReleasedRows:
    """An exchange that answers from stored releases: nothing is sent between parties."""

    def __init__(
        self,
        aggregates: Float[Tensor, "rows positions width"],
        *,
        ranks: tuple[int, ...],
        rounds: RoundCounter,
        device: torch.device,
    ) -> None:
        """Make it.

        Args:
            aggregates: Of all rows.
            ranks: Of all secondaries.
            rounds: Gives out the session's round numbers.
            device: Where the top model computes.
        """
        self._aggregates = aggregates
        self._ranks = ranks
        self.rounds = rounds
        self._device = device
        self.peers = PeersHere({})
        """No secondary gets messages outside rounds: a frozen encoder does not train."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return self._ranks

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the stored aggregates of the rows.

        Reveals:
            Nothing: these values were released before.
        """
        rows = torch.as_tensor(plan.rows, device=self._aggregates.device)
        return self._aggregates[rows].to(self._device)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the stored aggregates of each round's rows.

        Reveals:
            Nothing: these values were released before.
        """
        return map(self.release, plans)

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
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
    for number, aggregate in zip(missing, exchange.release_each(plans), strict=True):
        kept.keep(number, aggregate.cpu())
        observe(RowsReleased(done=number + 1, of=len(kept.parts)))
    return kept.all()
