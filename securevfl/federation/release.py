"""What leaves a secondary: charged, clipped, quantised, noised. The one file where these meet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from securevfl.core.errors import PrivacyError
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
        release_once: bool,
    ) -> None:
        """Make it.

        Args:
            aggregation: How representations are clipped and encoded.
            noise: Draws this party's noise share in units of the ring; None adds none.
            ledger: Books every release before it is made.
            release_once: Whether a row is released once, as a frozen encoder promises.
        """
        self.aggregation = aggregation
        self.noise = noise
        self.ledger = ledger
        self.release_once = release_once
        self._released: set[int] = set()

    def close(self) -> None:
        """Stop drawing noise ahead; later releases would have none ready."""
        if isinstance(self.noise, NoiseBuffer):
            self.noise.close()

    def release(
        self, plan: RoundPlan, represent: Callable[[], Tensor], *, learns: bool
    ) -> Released:
        """Charge, then compute, clip, round towards zero, add noise as integers, and encode.

        Args:
            plan: The round.
            represent: Computes the representation, shape (B, L, H); called once it is paid for.
            learns: Whether the clip belongs on the autograd graph.

        Raises:
            PrivacyError: If a row would be released a second time where the promise is once, or the
                representation is not finite.
            BudgetExceededError: If the budget forbids it; nothing is booked or computed then.
            EncodingRangeError: If a clipped norm is over C, or a number leaves the ring.

        Reveals:
            Nothing by itself; what is made of the words is said at :class:`mpc.sum_to.SumTo`.
        """
        epsilon = self._charge(plan)
        representation = represent()
        with torch.set_grad_enabled(learns):
            clipped = self.aggregation.clip(representation)
        require_finite("the representation", clipped, round_number=plan.round_number)
        words = self.aggregation.cut.encode(self.units(clipped))
        return Released(words=words, clipped=clipped, epsilon=epsilon)

    def _charge(self, plan: RoundPlan) -> float:
        """Book the release of a round; return the epsilon spent so far."""
        rows = set(plan.rows.tolist())
        if len(rows) != len(plan.rows):
            raise PrivacyError(f"round {plan.round_number}: a row is listed twice in one batch")
        if self.release_once and rows & self._released:
            raise PrivacyError(
                f"round {plan.round_number}: {len(rows & self._released)} rows were released "
                f"before, and a frozen encoder releases each row once"
            )
        epsilon = self.ledger.charge(
            round_number=plan.round_number, rows=plan.rows, purpose=plan.purpose
        )
        self._released |= rows
        return epsilon

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
    # NaN wins over every number here, and this is a tenth of the time of testing each element.
    extremes = torch.stack(torch.aminmax(value.detach()))
    if not bool(torch.isfinite(extremes).all()):
        raise PrivacyError(
            f"round {round_number}: {name} is not finite; training has diverged, "
            f"lower training.learning_rate"
        )
