"""What leaves a secondary: charged, clipped, quantised, noised. The one file where these meet."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from securevfl.core.errors import PrivacyError
from securevfl.dp.clipping import clip_records, clip_rows
from securevfl.dp.ring_noise import NoiseBuffer, RingNoise
from securevfl.federation.rounds import RoundPlan
from securevfl.mpc.codec import quantise, require_row_norms
from securevfl.mpc.ring_format import RingFormat


@runtime_checkable
class Charge(Protocol):
    """Anything that books a release before it is made; see :class:`federation.ledger.Ledger`."""

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Book a release and return the epsilon spent so far."""
        ...


class Contribution:
    """One secondary's protected share of every aggregate.

    Order within a release: the ledger is charged first, so that nothing can leave unbooked; then
    rows are clipped, rounded towards zero into the ring, and noise is added as integers.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        pooled: bool,
        slots: int,
        ring: RingFormat,
        noise: RingNoise | None,
        ledger: Charge,
        release_once: bool,
    ) -> None:
        self.clip_norm = clip_norm
        self.pooled = pooled
        self.slots = slots
        self.ring = ring
        self.noise = noise
        self.ledger = ledger
        self.release_once = release_once
        self._released: set[int] = set()

    def close(self) -> None:
        """Stop drawing noise ahead; later releases would have none ready."""
        if isinstance(self.noise, NoiseBuffer):
            self.noise.close()

    def charge(self, plan: RoundPlan) -> float:
        """Book the release of a round; return the epsilon spent so far.

        Raises:
            PrivacyError: If a row would be released a second time where the promise is once.
            BudgetExceededError: If the budget forbids it; nothing is booked then.
        """
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

    def clip(
        self, representation: Float[Tensor, "batch positions width"]
    ) -> Float[Tensor, "batch positions width"]:
        """Clip to C: every row, or every record where its row's K slots are pooled."""
        if self.pooled:
            return clip_records(representation, self.clip_norm)
        return clip_rows(representation, self.clip_norm)

    def term(
        self, clipped: Float[Tensor, "batch positions width"]
    ) -> Float[Tensor, "batch pooled width"]:
        """Return this party's term of the average, on the autograd graph."""
        return clipped.mean(dim=1, keepdim=True) if self.pooled else clipped

    def units(
        self, clipped: Float[Tensor, "batch positions width"]
    ) -> Int32[Tensor, "batch pooled width"]:
        """Return the term in ring units, with this party's noise share.

        Pooled rows are the *sum* of their K slots here, and the primary divides by K: each record
        is rounded by itself, so that rounding cannot carry one record's absence into more than its
        own slot, and nothing of the precision is lost to the division.
        """
        units = quantise(clipped.detach(), self.ring)
        if self.noise is not None:
            # The promise rests on this bound; without noise there is none.
            rows = units.flatten(0, 1) if self.pooled else units
            require_row_norms(rows, self.ring, clip_norm=self.clip_norm)
        if self.pooled:
            units = self._within_slots(units.sum(dim=1, keepdim=True))
        if self.noise is not None:
            units += self.noise.sample(units.shape, device=units.device)
        return units

    def _within_slots(
        self, sums: Int64[Tensor, "batch one width"]
    ) -> Int32[Tensor, "batch one width"]:
        """Draw sums of more than K records back to the ball of radius K C.

        Where rows choose their records no sum is outside it. Where records choose, a row may have
        any number of them; drawing back brings no two sums further apart.
        """
        limit = self.slots * self.clip_norm * 2.0**self.ring.precision_bits
        exact = sums.double()
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        # A little inside, so that rounding in the quotient cannot leave the ball.
        shrink = (limit * (1 - 1e-12) / norm.clamp_min(1.0)).clamp_max(1.0)
        return torch.where(norm > limit, exact * shrink, exact).to(torch.int32)


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
