"""What crosses the cut between bottom models and the top model: whole numbers, and their average.

B = rows of a batch, L = positions, H = width of one row's aggregate.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from securevfl.mpc.codec import decode_sum, encode, to_float
from securevfl.mpc.ring_format import RingFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a secondary's units become words of the sum, and the sum becomes the average.

    Both ends of every exchange, in one process or between processes, hold an equal one.
    """

    ring: RingFormat
    """The fixed-point format that all parties share."""

    slots: int
    """How many slots one released row is the sum of: K where rows are pooled, else 1."""

    shape: tuple[int, ...]
    """Shape of one row, (L, H)."""

    def words(self, rows: int) -> int:
        """Return how many 64-bit words carry so many rows."""
        return self.ring.words(rows * math.prod(self.shape))

    def zeros(self, rows: int) -> Int64[Tensor, " words"]:
        """Return the words of a party that adds nothing, as the primary's are."""
        return torch.zeros(self.words(rows), dtype=torch.int64)

    def encode(self, units: Int32[Tensor, "batch *shape"]) -> Int64[Tensor, " words"]:
        """Return a secondary's units as words; they may take the units' place in memory.

        Raises:
            EncodingRangeError: If a number leaves the format's range; nothing was encoded.
        """
        return encode(units, self.ring, reuse=True)

    def decode(
        self, total: Int64[Tensor, " words"], *, rows: int, active: int
    ) -> Float32[Tensor, "batch *shape"]:
        """Return the average of so many active secondaries' rows from the sum of their words.

        Raises:
            ProtocolError: If the sum is none that so many contributions can make.
        """
        elements = rows * math.prod(self.shape)
        units = decode_sum(total, self.ring, elements=elements, parties_active=active)
        average = to_float(units, self.ring, divisor=active * self.slots)
        return average.view(rows, *self.shape)
