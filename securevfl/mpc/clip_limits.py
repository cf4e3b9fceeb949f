"""How long a secondary's rows and its noise may be, for a check on shares that nothing wraps.

Squares are added up in the ring of 64 bits, where one long number can have a small square: that of
2^32 is 0. So two things are checked of what a secondary has shared, rows and noise apart:

1. The squared length of every row.
2. *Projections* ``p = sum_e rho_e u_e`` of blocks of rows, where rho is -1, 0 or 1 with
   probabilities 1/4, 1/2, 1/4 and is drawn when u is fixed. If some ``|u_e|`` is at least ``2^s``
   in the ring, a projection lies in ``[-2^(s-1), 2^(s-1))`` with probability at most 1/2: of the
   three values that rho_e leaves, those for 0 and for -1 or 1 cannot both. All of
   :data:`PROJECTIONS` do with at most 2^-128. Otherwise a row of W numbers has a squared length
   below ``W 2^(2s)``, which must not be over 2^63.

An honest secondary's rows are never too long. Its projections are, with probability at most
``2 exp(-64)`` each: rho is sub-Gaussian with variance 1/2, so a block of length r is over ``8 r``
with at most that. Its noise is a discrete Gaussian of deviation sigma, which is sub-Gaussian with
the same; a row of W numbers has a squared length over ``sigma^2 (W + 2 sqrt(W t) + 2 t)`` with
probability at most ``exp(-t)`` ([HKZ12]), and a projection of n numbers is over
``11 sigma sqrt(n)`` with at most ``2 exp(-60.5)``. t is such that all rows of a round together are
over with at most 2^-64; what becomes of the rest is in notebook/security.md.

References:
    [HKZ12] D. Hsu, S. Kakade, T. Zhang. A tail inequality for quadratic forms of subgaussian random
    vectors. Electronic Communications in Probability 17, 2012 (arXiv:1110.2842), theorem 1.
"""

import math
from dataclasses import dataclass
from typing import Final

from securevfl.core.errors import EncodingRangeError
from securevfl.mpc.dealt_sums import MOST_WORDS

PROJECTIONS: Final = 128

_FALSE_ALARM: Final = 64 * math.log(2)
_ROW_TAIL: Final = 8.0
_NOISE_TAIL: Final = 11.0
# Clipped floats are within this of C; quantised towards zero they are shorter.
_SLACK: Final = 1 + 2.0**-20


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipLimits:
    """What one round's rows and noise are held to, in units of the ring."""

    row_square: int
    """Largest squared length of a row."""
    noise_square: int
    """The same of a row of noise."""
    row_bits: int
    """s of projections of rows."""
    noise_bits: int
    block: int
    """Rows in a block; the last one has what is left."""

    @classmethod
    def of(
        cls, *, clip_units: float, noise_std_units: float, rows: int, numbers: int, parties: int
    ) -> "ClipLimits":
        """Return the limits of a round.

        Args:
            clip_units: Largest length of a row without noise.
            noise_std_units: Standard deviation of one party's noise; 0 for none.
            rows: Of the round.
            numbers: W, of a row.
            parties: Most secondaries that take part.

        Raises:
            EncodingRangeError: If even the squares of one row could wrap, or no dealer makes as
                many random numbers at once.
        """
        most_rows = MOST_WORDS // (2 * parties * numbers)
        if rows > most_rows:
            raise EncodingRangeError(
                f"privacy.verify_clip: rounds of {rows} rows are too large to be checked at once; "
                f"lower training.batch_size to {most_rows}"
            )
        t = _FALSE_ALARM + math.log(2 * rows * parties)
        spread = numbers + 2 * math.sqrt(numbers * t) + 2 * t
        most_bits = (63 - math.ceil(math.log2(numbers))) // 2
        block = rows
        while True:
            row_bits = _bits(_ROW_TAIL * clip_units * math.sqrt(block))
            noise_bits = _bits(_NOISE_TAIL * noise_std_units * math.sqrt(block * numbers))
            if max(row_bits, noise_bits) <= most_bits:
                return cls(
                    row_square=math.ceil(clip_units**2 * _SLACK),
                    noise_square=math.ceil(noise_std_units**2 * spread),
                    row_bits=row_bits,
                    noise_bits=noise_bits,
                    block=block,
                )
            if block == 1:
                raise EncodingRangeError(
                    f"privacy.verify_clip: squares of {numbers} numbers with noise of "
                    f"{noise_std_units:.3g} units would leave the ring of 64 bits; lower the noise "
                    f"beside privacy.clip_norm, or leave verify_clip out"
                )
            block = -(-block // 2)


def _bits(most: float) -> int:
    """Return s with ``most < 2^(s-1)``."""
    return math.frexp(most)[1] + 1
