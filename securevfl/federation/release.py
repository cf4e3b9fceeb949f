"""What leaves a secondary: charged, clipped, quantised, noised. The one file where these meet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from securevfl.core.errors import PrivacyError
from securevfl.dp.clipping import is_finite
from securevfl.dp.ring_noise import NoiseBuffer, RingNoise
from securevfl.federation.aggregation import Aggregation
from securevfl.federation.rounds import RoundPlan


@runtime_checkable
class Charge(Protocol):
    """Anything that books a release before it is made; see :class:`federation.ledger.Ledger`."""

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Book a release and return the epsilon spent so far."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Released:
    """One secondary's part of one round."""

    words: Int64[Tensor, " words"]
    """What enters the secure sum."""

    clipped: Float[Tensor, "batch positions width"]
    """What it was made of, on the autograd graph if the round teaches; it stays here."""

    epsilon: float
    """What is spent, this release included."""


class Contribution:
    """One secondary's protected share of every aggregate."""

    def __init__(
        self,
        aggregation: Aggregation,
        *,
        noise: RingNoise | None,
        ledger: Charge,
    ) -> None:
        """Make it.

        Args:
            aggregation: How representations are clipped and encoded.
            noise: Draws this party's noise share in units of the ring; None adds none.
            ledger: Books every release before it is made.
        """
        self.aggregation = aggregation
        self.noise = noise
        self.ledger = ledger
        self.not_finite = 0
        """Rows, or records of pooled rows, that counted as zero since they were not finite."""

    def close(self) -> None:
        """Stop drawing noise ahead; later releases would have none ready."""
        if isinstance(self.noise, NoiseBuffer):
            self.noise.close()

    def release(
        self, plan: RoundPlan, represent: Callable[[], Tensor], *, learns: bool
    ) -> Released:
        """Charge, then compute, clip, round towards zero, add noise as integers, and encode.

        Where noise makes a promise, what is not finite counts as zero: a run that stopped at it
        would tell everybody that such a record is there. Without noise nothing is promised, and
        the run stops: training has diverged.

        Args:
            plan: The round.
            represent: Computes the representation, shape (B, L, H); called once it is paid for.
            learns: Whether the clip belongs on the autograd graph.

        Raises:
            PrivacyError: If the representation is not finite, and nothing is promised.
            BudgetExceededError: If the budget forbids it; nothing is booked or computed then.
            EncodingRangeError: If a clipped norm is over C, or a number leaves the ring.

        Reveals:
            Nothing by itself; what is made of the words is said at :class:`mpc.sum_to.SumTo`.
        """
        epsilon = self.ledger.charge(
            round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
        )
        representation = represent()
        with torch.set_grad_enabled(learns):
            if self.noise is None:
                require_finite("the representation", representation, round_number=plan.round_number)
            else:
                representation, lost = self.aggregation.finite(representation)
                self.not_finite += lost
            clipped = self.aggregation.clip(representation)
        words = self.aggregation.cut.encode(self.units(clipped))
        return Released(words=words, clipped=clipped, epsilon=epsilon)

    def units(
        self, clipped: Float[Tensor, "batch positions width"]
    ) -> Int32[Tensor, "batch pooled width"]:
        """Return this party's term in ring units, with its noise share."""
        # The promise of noise rests on the bound on norms; without noise there is none.
        units = self.aggregation.units(clipped, bounded=self.noise is not None)
        if self.noise is not None:
            units += self.noise.sample(units.shape, device=units.device)
        return units


def require_finite(name: str, value: torch.Tensor, *, round_number: int) -> None:
    """Stop a run that has diverged, saying where.

    Raises:
        PrivacyError: If ``value`` has NaN or infinity; nothing was sent.
    """
    if not is_finite(value):
        raise PrivacyError(
            f"round {round_number}: {name} is not finite; training has diverged, "
            f"lower training.learning_rate"
        )
