"""The primary books every release in its own ledger before it asks for it."""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from securevfl.federation.ledger import Ledger
from securevfl.federation.rounds import EpochMark, Exchange, RoundCounter, RoundPlan
from securevfl.transport.message import MessageKind, TypedMessage


class ChargedExchange:
    """An exchange that charges each release to the primary's own ledger before asking for it."""

    def __init__(self, inner: Exchange, ledger: Ledger, heard: Callable[[float], None]) -> None:
        self.inner = inner
        self.ledger = ledger
        self.heard = heard
        self.booked_before: Int64[np.ndarray, " batch"] | None = None
        """Rows that were booked and asked for when the run was cut, and that are asked for once
        more: what comes back is the same release."""

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        return self.inner.rounds

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return self.inner.ranks

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

    def return_gradient(self, plan: RoundPlan, gradient: Tensor) -> None:
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
