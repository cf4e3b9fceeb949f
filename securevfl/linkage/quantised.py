"""Numeric keys as whole numbers of 16 bits, as cryptographic linkage needs them.

All dimensions share one step, so that the distance of quantised keys is the Euclidean one, rounded.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.core.errors import ConfigError, DataError

LARGEST_UNIT: Final = 2**16 - 1
"""Quantised keys lie in 0 to this."""

# Squared distances then stay below 2^53, and float64 holds them exactly.
_MOST_DIMENSIONS: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRange:
    """The range of each key dimension that the parties agreed on."""

    low: tuple[float, ...]
    """Smallest value of each dimension."""

    high: tuple[float, ...]
    """Largest value of each dimension, above ``low``."""

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or not 1 <= len(self.low) <= _MOST_DIMENSIONS:
            raise ConfigError("low and high must have one value for each key dimension")
        for low, high in zip(self.low, self.high, strict=True):
            if not -np.inf < low < high < np.inf:
                raise ConfigError(f"low and high must be finite and ascend: {low}, {high}")

    @property
    def step(self) -> float:
        """Width of a unit, in the keys' unit: the widest dimension takes all 16 bits."""
        widths = np.subtract(self.high, self.low)
        return float(widths.max()) / LARGEST_UNIT

    def quantise(
        self, keys: Float64[np.ndarray, "rows key_dim"], *, whose: str = "a party"
    ) -> Int64[np.ndarray, "rows key_dim"]:
        """Round keys to units; distances change by at most sqrt(key_dim) steps.

        Raises:
            DataError: If keys have another dimension, or one leaves its range (NaN does).
        """
        if keys.shape[1] != len(self.low):
            raise DataError(
                f"keys of {whose}: have {keys.shape[1]} dimensions, the agreed range "
                f"{len(self.low)}"
            )
        outside = ~((keys >= self.low) & (keys <= self.high))
        if outside.any():
            row, axis = (int(found[0]) for found in np.nonzero(outside))
            raise DataError(
                f"keys of {whose}: row {row + 1}, dimension {axis + 1} is {keys[row, axis]}, "
                f"outside the agreed range [{self.low[axis]}, {self.high[axis]}]; "
                f"agree on a wider one"
            )
        units = np.rint((keys - np.array(self.low)) / self.step)
        return np.minimum(units, LARGEST_UNIT).astype(np.int64)
