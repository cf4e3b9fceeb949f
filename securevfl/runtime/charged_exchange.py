"""The primary books every release in its own ledger before it asks for it."""

from collections.abc import Callable

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
        self.booked_before: Int64[np.ndarray, " batch"] | None = None
        """Rows that were booked and asked for when the run was cut, and that are asked for once
        more: what comes back is the same release."""

    def release(self, plan: RoundPlan) -> Tensor:
        """Charge, then release.

        Reveals:
            What the inner exchange reveals.
        """
        if self.booked_before is not None and np.array_equal(plan.rows, self.booked_before):
            self.booked_before = None
            return self.inner.release(plan)
        epsilon = self.ledger.charge(
            round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
        )
        self.heard(epsilon)
        return self.inner.release(plan)
