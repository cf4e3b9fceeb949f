"""Averages in blocks where secondaries are absent: their coordinates are zero."""

from collections import deque
from collections.abc import Collection, Iterator

from jaxtyping import Float
from torch import Tensor

from securevfl.federation.exchange_around import ExchangeAround
from securevfl.federation.rounds import Exchange, RoundPlan, noting


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
