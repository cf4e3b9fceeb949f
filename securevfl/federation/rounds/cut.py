"""The cut between bottom and top model: format of what crosses it, and its average.

B = rows of a batch, L = positions, H = width of one row's aggregate.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from securevfl.core.devices import reads
from securevfl.core.errors import ProtocolError
from securevfl.dp.clipping import clip_records, clip_rows, finite_or_zero
from securevfl.mpc import codec
from securevfl.mpc.codec import RingFormat, Words

CutRows = Float[Tensor, "batch positions width"]
"""Rows as they cross the cut: B rows, L positions, H numbers each."""

# Of 2^40 rows, which no run has, some honest one is over its bound with probability below 2^-63:
# each of two events has at most exp(-t).
_TAIL: Final = 105 * math.log(2)
# The sum of a row's squares is rounded in float64.
_ROUNDED: Final = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class CutLayer:
    """How a secondary's units become words of the sum, and the sum becomes the average.

    Both ends of every exchange, in one process or between processes, hold an equal one.
    """

    ring: RingFormat
    """The fixed-point format that all parties share."""

    slots: int
    """How many slots one released row is the sum of: K where rows are pooled, else 1."""

    shape: tuple[int, ...]
    """Shape of one row, (L, H)."""

    clip_norm: float
    """``C``: largest L2 norm of one slot at one secondary, in the units of the representation."""

    noise_share_std: float = 0.0
    """``tau``: standard deviation of one secondary's noise, in the same units; 0 for none."""

    noise_tail: float = 0.0
    """Largest absolute noise of one secondary in a number, where it is Laplace noise, which has
    ends; in the same units."""

    grid_step: float = 0.0
    """Value of a grid unit, where rows are whole ones behind Laplace noise; else 0."""

    disjoint: bool = False
    """True if each secondary writes into coordinates of its own."""

    def words(self, rows: int) -> int:
        """Return how many 64-bit words carry so many rows."""
        return self.ring.words(rows * math.prod(self.shape))

    def zeros(self, rows: int) -> Words:
        """Return the words of a party that adds nothing, as the primary's are."""
        return torch.zeros(self.words(rows), dtype=torch.int64)

    def encode(self, units: Int32[Tensor, "batch *shape"]) -> Words:
        """Return a secondary's units as words; they may take the units' place in memory.

        Raises:
            EncodingRangeError: If a number leaves the format's range; nothing was encoded.
        """
        return codec.encode(units, self.ring, reuse=True)

    def decode(
        self, total: Words, *, rows: int, active: Sequence[str], round_number: int
    ) -> Float32[Tensor, "batch *shape"]:
        """Return the average of the active secondaries' rows from the sum of their words.

        Args:
            total: The sum.
            rows: How many rows it has.
            active: Names of the secondaries that it is of.
            round_number: The round.

        Raises:
            ProtocolError: If the sum is none that so many contributions can make, or a row of it
                is longer than :meth:`longest_sum`.
        """
        elements, parties = rows * math.prod(self.shape), len(active)
        units = codec.decode_sum(total, self.ring, elements=elements, parties_active=parties)
        limit = self.longest_sum(parties)

        def check(square: Tensor) -> None:
            if not float(square) <= (limit * _ROUNDED) ** 2:
                scale = self.ring.granularity / self.slots
                length, most = float(square) ** 0.5 * scale, limit * scale
                who = f"{active[0]!r}" if parties == 1 else "some secondary"
                raise ProtocolError(
                    f"round {round_number}: {who} sent a longer vector than privacy.clip_norm and "
                    f"the noise allow: a row of the sum has length {length:.4g}, over {most:.4g}"
                )

        if elements:
            reads().add(codec.largest_square(units.view(rows, -1)), check)
        average = codec.to_float(units, self.ring, divisor=parties * self.slots)
        return average.view(rows, *self.shape)

    def longest_sum(self, active: int) -> float:
        """Return the length, in ring units, that no row of an honest sum is over.

        A row of the sum is ``v + X``. v is the sum of k clipped terms, each of norm at most
        ``c = K C / gamma``: of norm at most k c, and sqrt(k) c where they have no coordinate in
        common. X has W numbers, each the sum of k discrete Gaussians, which is sub-Gaussian with
        variance ``s^2 = k (K tau / gamma)^2``. With probability at least ``1 - 2 exp(-t)``

            ``v . X <= |v| s sqrt(2 t)``  and  ``|X|^2 <= s^2 (W + 2 sqrt(W t) + 2 t)``,

        so that ``|v + X|^2`` is at most ``|v|^2`` with twice the first and the second. Laplace
        noise adds at most the ends of its k shares.

        Args:
            active: k, how many secondaries the sum is of.

        References:
            [CKS20] Canonne, Kamath and Steinke, The discrete Gaussian for differential privacy
            (arXiv:2004.00010). [HKZ12] Hsu, Kakade and Zhang, A tail inequality for
            quadratic forms of subgaussian random vectors (arXiv:1110.2842), Theorem 1.
        """
        units = self.slots / self.ring.granularity
        clipped = (math.sqrt(active) if self.disjoint else active) * self.clip_norm * units
        std = math.sqrt(active) * self.noise_share_std * units
        numbers = math.prod(self.shape)
        along = clipped * std * math.sqrt(2 * _TAIL)
        noise = std**2 * (numbers + 2 * math.sqrt(numbers * _TAIL) + 2 * _TAIL)
        ends = active * math.sqrt(numbers) * self.noise_tail / self.ring.granularity
        return math.sqrt(clipped**2 + 2 * along + noise) + ends


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
