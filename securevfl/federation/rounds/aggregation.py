"""SplitAvg's arithmetic as a value: how representations are clipped, encoded and averaged.

B = rows of a batch, L = positions, K = links of a row, H = width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from securevfl.dp.clipping import clip_records, clip_rows, finite_or_zero
from securevfl.federation.rounds.cut import CutLayer, CutRows
from securevfl.mpc import codec


class Aggregation(ABC):
    """What a secondary makes of its representation before noise, and how far one record moves it.

    The accounting knows an aggregation by :attr:`pooled` alone: how far one record can move a row
    of the sum is :func:`securevfl.dp.sensitivity.row_change`.
    """

    pooled: ClassVar[bool]
    """True if a row is the mean over K slots of vectors that are each clipped, and each a function
    of one record alone."""

    def __init__(self, cut: CutLayer) -> None:
        """Make it for a format of what crosses the cut."""
        self.cut = cut

    @property
    def clip_norm(self) -> float:
        """``C``, in the units of the representation."""
        return self.cut.clip_norm

    _clipped_over: ClassVar[tuple[int, ...]]
    """Dimensions that the clip takes together."""

    def finite(self, representation: CutRows) -> tuple[CutRows, Int64[Tensor, ""]]:
        """Set to zero what the clip takes together and is not finite; return how many were.

        One record then moves no more than the clip allows: zero is inside every ball.
        """
        return finite_or_zero(representation, dim=self._clipped_over)

    @abstractmethod
    def clip(self, representation: CutRows) -> CutRows:
        """Clip to length C what one record must not move further; on the autograd graph."""

    @abstractmethod
    def term(self, clipped: CutRows) -> Float[Tensor, "batch pooled width"]:
        """Return this party's term of the average, on the autograd graph."""

    @abstractmethod
    def units(self, clipped: CutRows, *, bounded: bool) -> Int32[Tensor, "batch pooled width"]:
        """Return the term in whole units of the ring, rounded towards zero, without noise.

        Args:
            clipped: What :meth:`clip` returned.
            bounded: Whether to check in exact integers that no norm is over C: the promise of a
                noised release rests on it.

        Raises:
            EncodingRangeError: If a norm is over C, or a number leaves the ring.
        """


class MeanOfRows(Aggregation):
    """Each row is clipped as a whole; the aggregate is the mean over secondaries.

    References:
        [FeT] section 6.1 and Algorithm 1, lines 8 to 12.
    """

    pooled = False
    _clipped_over = (1, 2)

    def clip(self, representation: CutRows) -> CutRows:
        """Clip each row over all its positions."""
        return clip_rows(representation, self.clip_norm)

    def term(self, clipped: CutRows) -> CutRows:
        """Return the rows as they are."""
        return clipped

    def units(self, clipped: CutRows, *, bounded: bool) -> Int32[Tensor, "batch positions width"]:
        """Return the rows in whole units."""
        units = codec.quantise(clipped.detach(), self.cut.ring)
        if bounded:
            codec.require_row_norms(units, self.cut.ring, clip_norm=self.clip_norm)
        return units


class MeanOfPooledRecords(Aggregation):
    """Each record's vector is clipped; a row is the mean over its K slots, then over secondaries.

    What crosses the cut is the *sum* over the slots, and the primary divides by K: each record is
    rounded by itself, so that rounding cannot carry one record's absence into more than its own
    slot, and nothing of the precision is lost to the division.
    """

    pooled = True
    _clipped_over = (2,)

    def clip(
        self, representation: Float[Tensor, "batch links width"]
    ) -> Float[Tensor, "batch links width"]:
        """Clip each record's vector."""
        return clip_records(representation, self.clip_norm)

    def term(self, clipped: Float[Tensor, "batch links width"]) -> Float[Tensor, "batch one width"]:
        """Return the mean over the slots."""
        return clipped.mean(dim=1, keepdim=True)

    def units(
        self, clipped: Float[Tensor, "batch links width"], *, bounded: bool
    ) -> Int32[Tensor, "batch one width"]:
        """Return the sum over the slots in whole units."""
        units = codec.quantise(clipped.detach(), self.cut.ring)
        if bounded:
            codec.require_row_norms(units.flatten(0, 1), self.cut.ring, clip_norm=self.clip_norm)
        return self._within_slots(units.sum(dim=1, keepdim=True))

    def _within_slots(
        self, sums: Int64[Tensor, "batch one width"]
    ) -> Int32[Tensor, "batch one width"]:
        """Draw sums of more than K records back to the ball of radius K C.

        Where rows choose their records no sum is outside it. Where records choose, a row may have
        any number of them; drawing back brings no two sums further apart.
        """
        limit = self.cut.slots * self.clip_norm * 2.0**self.cut.ring.precision_bits
        exact = sums.double()
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        # A little inside, so that rounding in the quotient cannot leave the ball.
        shrink = (limit * (1 - 1e-12) / norm.clamp_min(1.0)).clamp_max(1.0)
        return torch.where(norm > limit, exact * shrink, exact).to(torch.int32)


AGGREGATIONS: Final[Mapping[str, type[Aggregation]]] = {
    "rows": MeanOfRows,
    "pooled": MeanOfPooledRecords,
}
"""Every aggregation by the name that a family asks for it; a new one is a class and a line."""
