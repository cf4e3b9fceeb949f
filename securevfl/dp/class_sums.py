"""Sums of records by the class of the row that they are linked to, with Gaussian noise.

Every record ``x`` is scaled down to the ball of radius R, written as ``u = (R/2, x)`` and rounded
towards zero into integer units (:mod:`securevfl.dp.moments`); the noise is integers too, so all
sums are exact.

A row's vector ``r`` is the sum of its records' ``u``, scaled down to the length that one record may
have, ``sqrt(5)/2 R``. ``S`` has a line for each class, and a last one for rows that are not used
for training: the sum of its rows' vectors.

- One record, added or removed, moves the vector of each of its m rows by at most its own length
  (scaling two vectors down to a ball never moves them further apart), so it moves S by at most
  ``m sqrt(5)/2 R``, plus rounding.
- One row's label, exchanged for another, takes the row's vector from one line of S to another: S
  moves by at most sqrt(2) times ``sqrt(5)/2 R``, for any records of the row.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from securevfl.core import checks
from securevfl.core.errors import PrivacyError
from securevfl.dp.moments import FINEST_BITS, LARGEST_STD_UNITS, integer_records
from securevfl.dp.ring_noise import MIN_STD_UNITS, ExactDiscreteGaussian

RADIUS: Final = 0.8
"""Radius of the ball to which records are scaled down, over the square root of their features:
every feature lies in [-1, 1], and few records are longer."""

_COARSEST_SUM_BITS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SumFormat:
    """Format of class sums: units, and sensitivity to one record and to one label."""

    features: int
    """d, features of a record."""
    bins: int
    """Lines of the sums: classes, and one for rows without a class."""
    links_per_record: int
    """m, most rows that one record may be linked to."""
    bits: int
    """Fractional bits of a unit."""

    @staticmethod
    def choose(
        *, features: int, bins: int, links_per_record: int, noise_multiplier: float | None
    ) -> "SumFormat":
        """Return the finest format in which the noise can be drawn.

        Args:
            features: d.
            bins: Lines of the sums.
            links_per_record: m.
            noise_multiplier: Noise over the change that one record makes; None adds no noise.

        Raises:
            PrivacyError: If there is no such format: the noise leaves nothing to fit to.
        """
        for bits in range(FINEST_BITS, _COARSEST_SUM_BITS - 1, -1):
            sum_format = SumFormat(
                features=features, bins=bins, links_per_record=links_per_record, bits=bits
            )
            if noise_multiplier is None:
                return sum_format
            std = noise_multiplier * sum_format.change_of_record
            if MIN_STD_UNITS <= std <= LARGEST_STD_UNITS:
                return sum_format
        raise PrivacyError(
            f"encoder.share: noise of {noise_multiplier:.3g} times what a record can change leaves "
            f"nothing of class sums; raise the share, or epsilon"
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the sums: bins, d + 1."""
        return self.bins, self.features + 1

    @property
    def radius(self) -> float:
        """R, the length to which longer records are scaled down."""
        return RADIUS * math.sqrt(self.features)

    @property
    def longest(self) -> float:
        """Largest L2 norm of a row's vector, in units."""
        return math.sqrt(1.25) * self.radius * 2.0**self.bits

    @property
    def change_of_record(self) -> float:
        """L2 sensitivity of the sums to one record, added or removed, in units."""
        # Scaled vectors are rounded towards zero, each number by less than a unit.
        rounding = math.sqrt(self.features + 1)
        return self.links_per_record * (self.longest + rounding)

    @property
    def change_of_label(self) -> float:
        """L2 sensitivity of the sums to one row's label, exchanged for another, in units."""
        return math.sqrt(2) * self.longest

    def row_vectors(
        self,
        records: Float[np.ndarray, "records features"],
        links: Int64[np.ndarray, "rows slots"],
    ) -> Int64[np.ndarray, "rows numbers"]:
        """Return each row's vector; zero where a row has no record.

        Args:
            records: Scaled features of a secondary's records, each a function of its record alone.
            links: Record numbers of each of the primary's rows, -1 for empty slots.

        Raises:
            PrivacyError: If a record is linked to more than m rows.
        """
        used = np.bincount(links[links >= 0], minlength=len(records))
        if len(used) and used.max() > self.links_per_record:
            raise PrivacyError(
                f"a record is linked to {used.max()} rows, and may be to {self.links_per_record}"
            )
        # A record that is not finite counts as no record: an error would reveal that there is one.
        finite = np.isfinite(records).all(axis=1, keepdims=True)
        known = np.where(finite, records, np.zeros_like(records))
        units = integer_records(known, radius=self.radius, bits=self.bits) * finite
        totals = np.zeros((len(links), self.features + 1))
        for slot in links.T:
            there = slot >= 0
            totals[there] += units[slot[there]]
        norm = np.linalg.norm(totals, axis=1, keepdims=True)
        # A vector of one record is not longer than that, and stays as it is to the unit.
        short = norm <= self.longest
        drawn_back = np.trunc(totals * (self.longest / np.where(short, self.longest, norm)))
        return np.where(short, totals, drawn_back).astype(np.int64)

    def noise(self, std: float) -> Int64[np.ndarray, "bins numbers"]:
        """Return exact discrete Gaussian noise of standard deviation ``std``, both in units.

        Raises:
            ConfigError: If ``std`` is neither 0 (no noise) nor one that can be drawn.
        """
        checks.non_negative(std=std)
        if std == 0:
            return np.zeros(self.shape, dtype=np.int64)
        return ExactDiscreteGaussian(std).sample(self.shape).to(torch.int64).numpy()

    def by_bins(
        self,
        vectors: Int64[np.ndarray, "rows numbers"],
        bins: Int64[np.ndarray, " rows"],
    ) -> Int64[np.ndarray, "bins numbers"]:
        """Return the sum of rows' vectors, bin by bin."""
        sums = np.zeros(self.shape, dtype=np.int64)
        np.add.at(sums, bins, vectors)
        return sums

    def means(
        self, sums: Float64[np.ndarray, "bins numbers"]
    ) -> tuple[Float64[np.ndarray, " bins"], Float64[np.ndarray, "bins features"]]:
        """Return estimated row counts and mean vectors of the bins.

        Args:
            sums: Noised or unbiased class sums, in units.

        Returns:
            Counts, at least 1, and means in the scale of the records.
        """
        first = np.trunc(self.radius / 2 * 2.0**self.bits)
        counts = np.maximum(sums[:, 0] / first, 1.0)
        return counts, sums[:, 1:] / (counts[:, None] * 2.0**self.bits)
