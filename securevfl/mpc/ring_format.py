"""How reals become elements of the ring Z_2^64: precision, lanes, and the range that must hold."""

import math
from dataclasses import dataclass
from typing import Final

from securevfl.core import checks
from securevfl.core.errors import ConfigError, EncodingRangeError

# Bits of one lane, by the number of lanes in a 64-bit word.
_LANE_BITS: Final = {2: 32, 3: 21, 4: 16}
# [KLS21] Theorem 1 (arXiv:2102.06387): sums of discrete Gaussians are as good as discrete
# Gaussian from here on (docs/privacy.md, section 3).
MIN_NOISE_STD_UNITS: Final = 64.0
# Noise beyond 12 standard deviations has probability at most 2 exp(-72) = 1.1e-31 an element; with
# 1e11 elements over all parties and rounds, a run is refused by chance once in 1e20.
NOISE_TAIL: Final = 12.0
# Two and three lanes start at 16 bits. More are tried only for noise too small for 64 units at 16,
# fewer only for noise too large for the lane.
_BITS: Final = (16, *range(15, 9, -1), *range(17, 21))
_FOUR_LANE_BITS: Final = 10
# Where noise dwarfs a coarser step it is taken only if C is at least so many units, so that
# rounding towards zero costs no more than it does at the unit clip norm.
_MIN_CLIP_UNITS: Final = 1024
COARSEST_STEP: Final = 2.0 ** -min(*_BITS, _FOUR_LANE_BITS)
"""The largest granularity that any format has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingFormat:
    """The fixed-point format that all parties of a federation share."""

    precision_bits: int
    """p: one unit is 2^-p."""

    lanes: int
    """Numbers in one 64-bit word: 2 of 32 bits, 3 of 21 or 4 of 16."""

    parties: int
    """k: most contributions that one sum may have."""

    bound_units: int
    """Largest absolute value, in units, of one party's number with its noise."""

    def __post_init__(self) -> None:
        for name in ("precision_bits", "lanes", "parties", "bound_units"):
            checks.whole(**{name: getattr(self, name)})
        checks.at_least(1, parties=self.parties, bound_units=self.bound_units)
        if not 0 <= self.precision_bits <= 20:
            raise ConfigError(f"precision_bits must lie in [0, 20], got {self.precision_bits}")
        if self.lanes not in _LANE_BITS:
            raise ConfigError(f"lanes must be 2, 3 or 4, got {self.lanes}")
        if self.bound_units > self.largest_bound(lanes=self.lanes, parties=self.parties):
            raise EncodingRangeError(
                f"bound_units {self.bound_units} of {self.parties} parties overflows a lane of "
                f"{self.lane_bits} bits; at most "
                f"{self.largest_bound(lanes=self.lanes, parties=self.parties)} fits"
            )

    @staticmethod
    def largest_bound(*, lanes: int, parties: int) -> int:
        """Return the largest ``bound_units`` with ``parties * 2 * bound < 2^(lane bits)``."""
        return ((1 << _LANE_BITS[lanes]) - 1) // (2 * parties)

    @classmethod
    def choose(
        cls,
        *,
        clip_norm: float,
        noise_share_std: float,
        parties: int,
        tail: float = NOISE_TAIL,
    ) -> "RingFormat":
        """Return the smallest format that holds every party's clipped and noised numbers.

        With noise that dwarfs a coarser step (at least 64 units of it, and C at least 1024 units),
        four lanes, or three at the finest step that fits, else two. Without noise the step is the
        whole error: p=16, in three lanes where the sums fit, else in two.

        Args:
            clip_norm: C, the largest absolute value before noise, > 0.
            noise_share_std: Standard deviation of one party's noise, in the units of the
                representation; 0 for none.
            parties: Most contributions to one sum.
            tail: Standard deviations of noise that must fit; see ``NOISE_TAIL``.

        Raises:
            EncodingRangeError: If no format fits, naming the bound.
        """
        checks.positive(clip_norm=clip_norm, tail=tail)
        checks.non_negative(noise_share_std=noise_share_std)
        checks.whole(parties=parties)
        checks.at_least(1, parties=parties)
        resolving = [
            bits
            for bits in _BITS
            if noise_share_std == 0 or noise_share_std * 2**bits >= MIN_NOISE_STD_UNITS
        ]
        if not resolving:
            finest = MIN_NOISE_STD_UNITS * 2.0 ** -max(_BITS)
            raise EncodingRangeError(
                f"noise of standard deviation {noise_share_std:g} a party is below {finest:g}, the "
                f"least that the fixed-point ring can carry; raise the noise or switch it off"
            )
        narrow = [(4, _FOUR_LANE_BITS), *((3, bits) for bits in _BITS)]
        candidates = [
            (lanes, bits)
            for lanes, bits in narrow
            if bits in resolving and clip_norm * 2**bits >= _MIN_CLIP_UNITS
        ]
        if noise_share_std == 0:
            candidates = [(3, _BITS[0])]
        candidates += [(2, bits) for bits in resolving]
        for lanes, bits in candidates:
            bound = _bound_units(clip_norm, noise_share_std * tail, bits)
            if bound <= cls.largest_bound(lanes=lanes, parties=parties):
                return cls(precision_bits=bits, lanes=lanes, parties=parties, bound_units=bound)
        largest = cls.largest_bound(lanes=2, parties=parties) * 2.0 ** -min(resolving)
        raise EncodingRangeError(
            f"clip_norm {clip_norm:g} with {tail:g} standard deviations of {noise_share_std:g} "
            f"noise is over the bound {largest:g} that {parties} parties leave in a 32-bit lane "
            f"at 2^-{min(resolving)}; lower privacy.clip_norm or change the noise"
        )

    @property
    def granularity(self) -> float:
        """Real value of one unit, gamma = 2^-p."""
        return 2.0**-self.precision_bits

    @property
    def lane_bits(self) -> int:
        """Bits of one lane."""
        return _LANE_BITS[self.lanes]

    def words(self, elements: int) -> int:
        """Return how many 64-bit words carry ``elements`` numbers."""
        return -(-elements // self.lanes)


def _bound_units(clip_norm: float, noise: float, precision_bits: int) -> int:
    # One unit more, because a bound computed in floats may itself be rounded down.
    return math.ceil((clip_norm + noise) * 2.0**precision_bits) + 1
