"""Shares of a discrete Laplace noise, drawn by exact tables; see :mod:`securevfl.dp.laplace`."""

import math
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.laplace import MOST_SCALE, reach, share_variance
from securevfl.dp.ring_noise import EXACT_DIGITS, EXTENSION_BITS, PIECE, CumulativeTable, KeyedNoise


class LaplaceShare(KeyedNoise):
    """Draws one secondary's share of a discrete Laplace noise, by exact tables.

    Args:
        scale: Of the whole noise, in grid units, > 0; real-valued, taken as the exact float64.
        honest: h, secondaries whose shares add up to it.
        grid_unit: A grid unit in units of the ring, >= 1.
        insecure_seed: For tests only: makes the samples repeatable, and worthless as noise.

    Raises:
        ConfigError: If ``scale`` is over what a table holds.
    """

    def __init__(
        self, scale: float, honest: int, *, grid_unit: int = 1, insecure_seed: int | None = None
    ) -> None:
        super().__init__(insecure_seed=insecure_seed)
        self._table = polya_table(scale, honest)
        self._grid_unit = grid_unit
        self._variance = share_variance(scale, honest)

    @property
    def std_units(self) -> float:
        """Standard deviation in ring units."""
        return self._grid_unit * math.sqrt(self._variance)

    def _fill(self, out: npt.NDArray[np.int32]) -> None:
        for start in range(0, len(out), PIECE):
            piece = out[start : start + PIECE]
            np.subtract(self._polya(len(piece)), self._polya(len(piece)), out=piece)
            piece *= self._grid_unit

    def _polya(self, count: int) -> npt.NDArray[np.int32]:
        table = self._table
        pick = self._bits.take(8 * count).view(np.uint64)
        index = np.searchsorted(table.cumulative, pick, side="right")
        tie = np.flatnonzero(table.is_tie(pick, index))
        for place, bits in zip(tie.tolist(), pick[tie].tolist(), strict=True):
            index[place] = table.exact_index(bits, self._bits.integer(EXTENSION_BITS))
        return index.astype(np.int32)


@lru_cache(maxsize=4)
def polya_table(scale: float, honest: int) -> CumulativeTable:
    """Return the distribution of ``P(x + 1) = P(x) (x + 1/h) / (x + 1) a`` from 0 on.

    It ends where less than 2^-256 is left.

    Args:
        scale: a is ``exp(-1 / scale)``.
        honest: h.

    Raises:
        ConfigError: If ``scale`` is over what a table holds.
    """
    checks.positive(scale=scale)
    checks.whole_from(1, honest=honest)
    if scale > MOST_SCALE:
        raise ConfigError(f"Laplace noise must have a scale of at most {MOST_SCALE:g} grid units")
    with localcontext() as context:
        context.prec = EXACT_DIGITS
        decay = (-1 / Decimal(scale)).exp()
        weights = [Decimal(1)]
        for x in range(reach(scale)):
            weights.append(weights[-1] * decay * (x * honest + 1) / ((x + 1) * honest))
    return CumulativeTable(weights)
