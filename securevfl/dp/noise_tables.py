"""The tables behind exact discrete Gaussian samples, and the decisions that need 256 bits.

How a sample is made of them is told in :mod:`securevfl.dp.ring_noise`: x = block * z + y, where z
is picked by :attr:`NoiseTables.cumulative` and the candidate accepted with probability
``exp(-(x^2 - m_z^2) / (2 s^2))``, m_z being the number nearest to zero in block z.
"""

import bisect
import math
from decimal import Decimal, localcontext
from typing import Final

import numpy as np
import numpy.typing as npt

# 32 to 64 blocks per standard deviation: more make more undecided cells, fewer more rejections.
_LOG2_BLOCKS: Final = 5

# P(|x| > 20 s) < 2^-288, below the tables' own precision.
_TAIL: Final = 20

_PICK_BITS: Final = 64
_EXACT_BITS: Final = 256
_EXACT_DIGITS: Final = 90

EXTENSION_BITS: Final = _EXACT_BITS - _PICK_BITS
"""Random bits that extend a 64-bit uniform number to the tables' full precision."""

# Float32 errs by less than 8e-5 in ``1 - t`` over the whole table (t is a difference of numbers of
# at most 200, each off by a few 2^-24 of itself), one 16-bit step of the coin included.
_FAST_MARGIN: Final = 1e-4


class NoiseTables:
    """What one standard deviation needs, computed once, with exact decimals.

    Args:
        std_units: s, the standard deviation in ring units, taken as the exact float64.

    Attributes:
        block: k, a power of two near s / 32.
        reach: Blocks -reach to reach are in the tables.
        cumulative: First 64 bits of ``P(Z <= z)``, for z from -reach on.
        settled: For each 16-bit cell of the uniform number that picks z: the place of z in
            ``cumulative``, or -1 where the cell does not settle it.
        start: For each cell: the first x of the block.
        scaled_bound: For each cell ``2^16 (1 + m_z^2 / (2 s^2))`` less a margin for float32: a
            candidate whose 16-bit coin is below ``scaled_bound - 2^16 x^2 / (2 s^2)`` is accepted,
            whatever bits may follow; minus infinity where the cell does not settle z.
        scaled_inverse_two_variance: ``2^16 / (2 s^2)`` in float32.
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
        self.settled = np.where(unsettled, -1, index).astype(np.int32)
        z = index - self.reach
        bound = 1 - _FAST_MARGIN + self.nearest_to_zero(z) ** 2 / (2 * std_units**2)
        bound[unsettled] = -np.inf
        self.start = (self.block * z).astype(np.int32)
        # Scaling by a power of two changes no rounding.
        self.scaled_bound = (bound * 2**16).astype(np.float32)
        self.scaled_inverse_two_variance = np.float32(2**16 / (2 * std_units**2))

    def nearest_to_zero(self, z: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return m_z, the number of block z that is nearest to zero."""
        nearest: npt.NDArray[np.int64] = np.where(z >= 0, self.block * z, self.block * (z + 1) - 1)
        return nearest

    def is_tie(
        self, pick: npt.NDArray[np.uint64], index: npt.NDArray[np.intp]
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
        blocks = np.arange(-self.reach, self.reach + 1)
        weights = [
            (-(Decimal(int(nearest)) ** 2) / self._two_variance).exp()
            for nearest in self.nearest_to_zero(blocks)
        ]
        total = sum(weights)
        partial = Decimal(0)
        cumulative = []
        for weight in weights:
            partial += weight
            cumulative.append(int(partial / total * 2**_EXACT_BITS))
        return cumulative
