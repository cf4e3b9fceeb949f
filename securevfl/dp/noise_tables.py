"""Tables behind exact discrete Gaussian samples, and the decisions that need 256 bits."""

import bisect
import math
from decimal import Decimal, localcontext
from typing import Final

import numpy as np
import numpy.typing as npt

# 64 to 128 blocks per standard deviation: more make more undecided cells and larger tables, fewer
# more coins that do not settle a candidate.
_LOG2_BLOCKS: Final = 6


# P(|x| > 20 s) < 2^-288, below the tables' own precision.
_TAIL: Final = 20
_PICK_BITS: Final = 64
_EXACT_BITS: Final = 256
_EXACT_DIGITS: Final = 90
EXTENSION_BITS: Final = _EXACT_BITS - _PICK_BITS
"""Random bits that extend a 64-bit uniform number to the tables' full precision."""


class NoiseTables:
    """Sampling tables of one standard deviation, computed with exact decimals.

    Args:
        std_units: s, the standard deviation in ring units, taken as the exact float64.

    Attributes:
        block: k, a power of two near s / 64.
        reach: Blocks -reach to reach are in the tables.
        cumulative: First 64 bits of ``P(Z <= z)``, for z from -reach on.
        cells: For each 16-bit cell of the uniform number that picks z, ``z * 2^16 + sure``, so that
            one look-up finds both: z is the first block that the cell can pick, and a candidate
            whose 16-bit coin is below ``sure`` is accepted, wherever it lies in the block and
            with any bits that follow. ``sure`` is 0 where the cell does not settle z.
    """

    def __init__(self, std_units: float) -> None:
        self.block = 1 << max(0, math.floor(math.log2(std_units)) - _LOG2_BLOCKS)
        self.reach = math.ceil(_TAIL * std_units / self.block) + 1
        with localcontext() as context:
            context.prec = _EXACT_DIGITS
            self._two_variance = 2 * Decimal(std_units) ** 2
            self._exact_cumulative = self._sum_weights()
        # A probability of exactly 1 would need one bit more than there are.
        top = 2**_PICK_BITS - 1
        self.cumulative = np.array(
            [min(bits >> EXTENSION_BITS, top) for bits in self._exact_cumulative], np.uint64
        )
        edges = np.arange(2**16, dtype=np.uint64) << np.uint64(48)
        index = np.searchsorted(self.cumulative, edges, side="left")
        unsettled = self.cumulative[index] - edges < np.uint64(2**48)
        z = index - self.reach
        nearest = self.nearest_to_zero(self.block * z)
        # The ends of a block add up to this.
        farthest = 2 * self.block * z + self.block - 1 - nearest
        least = np.exp(-((farthest - nearest) * (farthest + nearest)) / (2 * std_units**2))
        # A coin c is surely below it if (c + 1) / 2^16 is; one step less, for float64's rounding.
        sure = np.maximum(np.floor(least * 2**16) - 1, 0)
        self.cells = (z << 16 | np.where(unsettled, 0, sure).astype(np.int64)).astype(np.int32)

    def nearest_to_zero(self, x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return m_z for each x: the number in its block that is nearest to zero."""
        nearest: npt.NDArray[np.int64] = np.where(x >= 0, x & -self.block, x | self.block - 1)
        return nearest

    def find(
        self, cell: npt.NDArray[np.uint16], pick: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return the places in ``cumulative`` of the blocks that 64 bits pick.

        Args:
            cell: The first 16 of them.
            pick: All of them.
        """
        index = (self.cells[cell] >> 16) + np.int64(self.reach)
        # Most cells that do not settle it hold one boundary, and a search takes five times this.
        index += self.cumulative[index] <= pick
        beyond = np.flatnonzero(self.cumulative[index] <= pick)
        index[beyond] = np.searchsorted(self.cumulative, pick[beyond], side="right")
        return index

    def is_tie(
        self, pick: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Say where 64 bits equal a boundary's first 64, so that more bits must decide."""
        tie: npt.NDArray[np.bool_] = self.cumulative[np.maximum(index - 1, 0)] == pick
        return tie

    def exact_index(self, pick: int, extension: int) -> int:
        """Return the index of the block that a uniform number of 256 bits picks.

        Args:
            pick: Its first 64 bits.
            extension: The others.
        """
        uniform = pick << EXTENSION_BITS | extension
        last = len(self._exact_cumulative) - 1
        return min(bisect.bisect_right(self._exact_cumulative, uniform), last)

    def exact_toss(self, x: int, nearest: int, toss: int, extension: int) -> bool:
        """Say whether a uniform number of 256 bits is below ``exp(-(x^2 - m_z^2) / (2 s^2))``.

        Args:
            x: The candidate.
            nearest: m_z of its block.
            toss: The first 64 bits of the uniform number.
            extension: The others.
        """
        with localcontext() as context:
            context.prec = _EXACT_DIGITS
            exponent = Decimal(x * x - nearest * nearest) / self._two_variance
            threshold = (-exponent).exp() * 2**_EXACT_BITS
            return Decimal(toss << EXTENSION_BITS | extension) < threshold

    def _sum_weights(self) -> list[int]:
        """Return ``floor(2^256 P(Z <= z))`` for z from -reach to reach."""
        weights = [*reversed(self._falling(1, self.reach)), *self._falling(0, self.reach + 1)]
        total = sum(weights)
        partial = Decimal(0)
        cumulative = []
        for weight in weights:
            partial += weight
            cumulative.append(int(partial / total * 2**_EXACT_BITS))
        return cumulative

    def _falling(self, first: int, count: int) -> list[Decimal]:
        """Return the weights of ``first``, ``first + k`` and so on.

        Squares of equal steps have equal second differences, so each weight is the one before it
        times a factor, and each factor the one before it times another: three exponentials in all.
        Their errors grow to some 10^-83 over thousands of steps, far below the tables' 2^-256.
        """
        step = self.block
        weight = (-(Decimal(first) ** 2) / self._two_variance).exp()
        factor = (-Decimal(step * step + 2 * first * step) / self._two_variance).exp()
        change = (-Decimal(2 * step * step) / self._two_variance).exp()
        weights = []
        for _ in range(count):
            weights.append(weight)
            weight *= factor
            factor *= change
        return weights
