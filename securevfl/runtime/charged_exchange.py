"""The primary books every release in its own ledger before it asks for it."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from securevfl.federation.exchange_around import ExchangeAround
from securevfl.federation.ledger import Ledger
from securevfl.federation.rounds import Exchange, RoundPlan


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
