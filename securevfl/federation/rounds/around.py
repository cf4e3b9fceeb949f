"""Exchanges around another one: charged first, or with absent secondaries' blocks at zero."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.federation.exchange import EpochMark, Exchange, RoundCounter, RoundPlan, noting
from securevfl.ledger.ledger import Ledger
from securevfl.transport.message import MessageKind, TypedMessage

# An exchange around another one: what it does not change, it passes on.


class ExchangeAround(ABC):
    """Passes everything on but releases, which are what its subclasses are for."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        return self.inner.rounds

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
        """Yield the averages of rounds of which none depends on another.

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

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pass the request on.

        Reveals:
            What the inner exchange reveals.
        """
        return self.inner.average_positions(own)

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:
        """Pass the message on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.tell(message, answer=answer)

    def end_epoch(self, mark: EpochMark) -> None:
        """Pass the mark on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.end_epoch(mark)


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

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the sum of those that are there over the number of all.

        Reveals:
            What the inner exchange reveals.
        """
        return self._present(self.inner.release(plan), plan)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the same of rounds of which none depends on another.

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


class ChargedExchange(ExchangeAround):
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
