"""How points become bits: several secret directions, each as one number.

The codes of two coordinates add up like city blocks, so the nearest code need not be the nearest
point. Distances along many directions add up to the distance as the crow flies, nearly: with eight
directions in the plane, their sum varies by 2 % with the direction of a difference; with the two of
longitude and latitude by 41 %.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from securevfl.core import checks
from securevfl.core.errors import ConfigError

_WORD_BYTES: Final = 8
_MOST_DIMENSIONS: Final = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PointCode:
    """How points of an agreed box, all dimensions in one unit, become bits."""

    low: tuple[float, ...]
    """Smallest value of each dimension, agreed between the parties."""

    high: tuple[float, ...]
    """Largest value of each dimension, above ``low``."""

    bits: int = 2048
    """Length of the code, a multiple of 8 times ``directions``."""

    directions: int = 8
    """Directions that share the bits: more of them know distances better, each one coarser."""

    concentration: float = 0.25
    """Bits that are set, as a share of all: more of them see further, fewer tell finer."""

    def __post_init__(self) -> None:
        checks.at_least(1, directions=self.directions)
        checks.at_least(8, bits=self.bits)
        checks.open_unit(concentration=self.concentration)
        if self.bits % (8 * self.directions):
            raise ConfigError(
                f"bits must be a multiple of 8 x {self.directions} directions, got {self.bits}"
            )
        if len(self.low) != len(self.high) or not 1 <= len(self.low) <= _MOST_DIMENSIONS:
            raise ConfigError(
                f"low and high must have one value for each of 1 to {_MOST_DIMENSIONS} dimensions"
            )
        for low, high in zip(self.low, self.high, strict=True):
            if not -np.inf < low < high < np.inf:
                raise ConfigError(f"low and high must be finite and ascend: {low}, {high}")

    @property
    def radius(self) -> float:
        """Half of the box's diagonal: no point is farther from the middle, in any direction."""
        return math.dist(self.low, self.high) / 2

    def along_directions(
        self, points: Float64[np.ndarray, "rows key_dim"], key: bytes
    ) -> Float64[np.ndarray, "rows directions"]:
        """Return how far points lie from the middle of the box in each secret direction."""
        middle = (np.array(self.low) + np.array(self.high)) / 2
        # Summed dimension by dimension: the same to the last bit on every machine.
        along = np.zeros((len(points), self.directions))
        for axis, parts in enumerate(secret_directions(len(self.low), self.directions, key)):
            along += (points[:, axis, None] - middle[axis]) * parts
        return along


def secret_directions(
    key_dim: int, count: int, key: bytes
) -> Float64[np.ndarray, "key_dim directions"]:
    """Return unit vectors that only the holders of a key know.

    In the plane they are evenly spread over half a turn from a secret angle on; in more dimensions
    they come in frames of ``key_dim`` at right angles to one another, each turned at random.
    """
    if key_dim == 1:
        return np.ones((1, count))
    if key_dim == 2:
        angles = math.pi * (np.arange(count) + _uniform(1, key)[0]) / count
        return np.stack([np.cos(angles), np.sin(angles)])
    frames = -(-count // key_dim)
    uniform = _uniform(2 * frames * key_dim**2, key).reshape(2, frames, key_dim, key_dim)
    # Box and Muller's normal numbers; 1 - u is never 0.
    normal = np.sqrt(-2 * np.log(1 - uniform[0])) * np.cos(2 * math.pi * uniform[1])
    turned = [np.linalg.qr(frame)[0] for frame in normal]
    return np.concatenate(turned, axis=1)[:, :count]


def _uniform(count: int, key: bytes) -> Float64[np.ndarray, " count"]:
    """Return pseudo-random numbers in [0, 1) of 53 bits."""
    blocks = [
        hashlib.blake2b(counter.to_bytes(_WORD_BYTES, "big"), key=key).digest()
        for counter in range(-(-count // _WORD_BYTES))
    ]
    words = np.frombuffer(b"".join(blocks), dtype=">u8")[:count]
    return (words >> np.uint64(11)).astype(np.float64) / 2**53
