"""Sums of records by the class of the row that they are linked to, with Gaussian noise.

Every record ``x`` is scaled down to the ball of radius R, written as ``u = (R/2, x)`` and rounded
towards zero into integer units (:mod:`securevfl.dp.class_sums`); the noise is integers too, so all
sums are exact.

A row's vector ``r`` is the sum of its records' ``u``, scaled down to the length that one record may
have, ``sqrt(5)/2 R``. ``S`` has a line for each class, and a last one for rows that are not used
for training: the sum of its rows' vectors.

- One record, added or removed, moves the vector of each of its m rows by at most its own length
  (scaling two vectors down to a ball never moves them further apart), so it moves S by at most
  ``m sqrt(5)/2 R``, plus rounding.
- One row's label, exchanged for another, takes the row's vector from one line of S to another: S
  moves by at most sqrt(2) times ``sqrt(5)/2 R``, for any records of the row.
- Where classes are ranks, such a label moves up to k rows round a cycle of k lines: each line loses
  one vector and gets another. A vector's first number is at least half the length of the rest, so
  two are at most ``2 R`` apart, and S moves by at most ``sqrt(k) 2 R``.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64

from securevfl.core import checks
from securevfl.core.errors import PrivacyError
from securevfl.dp.ring_noise import MIN_STD_UNITS, ExactDiscreteGaussian

FINEST_BITS: Final = 12
# Noise that needs coarser units than a 16th would leave nothing of values in [-1, 1].
_COARSEST_BITS: Final = 4
LARGEST_STD_UNITS: Final = 2.0**26
# Sums of integers below this are exact in float64, in any order.
_EXACT: Final = 2.0**53
# Keeps a scaled record inside the ball in spite of rounding.
_INSIDE: Final = 1 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """Noised moments of a table."""

    count: float
    """Records, at least 1."""

    mean: Float64[np.ndarray, " features"]
    """Mean of the records."""

    covariance: Float64[np.ndarray, "features features"]
    """Covariance of the records; symmetric, but not positive definite under much noise."""

    spread: float
    """Approximate largest eigenvalue of the noise in ``covariance``."""


def integer_records(
    records: Float[np.ndarray, "records features"], *, radius: float, bits: int
) -> Float64[np.ndarray, "records features_plus_1"]:
    """Return ``u`` of every record in units of ``2^-bits``: whole numbers, kept as float64.

    Args:
        records: Scaled features; longer records are scaled down to ``radius``.
        radius: R, > 0.
        bits: Fractional bits of a unit.
    """
    values = records.astype(np.float64)
    norm = np.linalg.norm(values, axis=1, keepdims=True)
    values *= radius * _INSIDE / np.maximum(norm, radius * _INSIDE)
    values = np.concatenate([np.full((len(values), 1), radius / 2), values], axis=1)
    return np.trunc(values * 2.0**bits)


def largest_length(*, radius: float, bits: int) -> float:
    """Return the bound on ``||u||^2`` in squared units, by which one record can change S."""
    return 1.25 * radius**2 * 4.0**bits


def noised_moments(
    records: Float[np.ndarray, "records features"],
    *,
    radius: float,
    noise_multiplier: float | None,
) -> Moments:
    """Return the moments of a table, behind noise unless ``noise_multiplier`` is None.

    Args:
        records: Scaled features, finite; a function of each record alone.
        radius: R, to which longer records are scaled down, > 0.
        noise_multiplier: Noise over the change that one record makes, > 0; None adds none.

    Raises:
        PrivacyError: If the noise is too large for statistics of such records.

    Reveals:
        As much as one Gaussian release with that multiplier, of the unit "one record of this
        table, added or removed"; the caller says to whom.

    References:
        [DTTZ14] Dwork, Talwar, Thakurta and Zhang, Analyze Gauss, Algorithm 1, where each entry of
        the upper triangle gets the same noise; the length above needs less off the diagonal.
    """
    checks.positive(radius=radius)
    bits = _unit_bits(noise_multiplier, radius=radius)
    units = integer_records(records, radius=radius, bits=bits)
    longest = largest_length(radius=radius, bits=bits)
    squares = np.einsum("ij,ij->i", units, units)
    if len(units) and not squares.max() <= longest:
        raise PrivacyError("a record is not finite, or longer than the radius that bounds it")
    if len(units) * longest >= _EXACT:
        raise PrivacyError(f"too many records ({len(units)}) for exact sums of their squares")
    second = units.T @ units
    noise_std = 0.0
    if noise_multiplier is not None:
        checks.positive(noise_multiplier=noise_multiplier)
        noise_std = noise_multiplier * longest
        second += symmetric_noise(len(second), std=noise_std)
    first = np.trunc(radius / 2 * 2.0**bits)
    count = max(float(second[0, 0] / first**2), 1.0)
    mean = second[0, 1:] / (first * count * 2.0**bits)
    covariance = second[1:, 1:] / (count * 4.0**bits) - np.outer(mean, mean)
    # The semicircle's edge: entries of deviation std / sqrt(2) off the diagonal.
    spread = noise_std * math.sqrt(2 * len(mean)) / (count * 4.0**bits)
    return Moments(count=count, mean=mean, covariance=covariance, spread=spread)


def symmetric_noise(size: int, *, std: float) -> Float64[np.ndarray, "size size"]:
    """Return a symmetric matrix of whole numbers: ``std`` on the diagonal, less elsewhere."""
    diagonal = ExactDiscreteGaussian(std).sample((size,))
    upper = ExactDiscreteGaussian(std / math.sqrt(2)).sample((size * (size - 1) // 2,))
    noise = np.zeros((size, size))
    noise[np.triu_indices(size, 1)] = upper.to(torch.float64).numpy()
    noise += noise.T
    noise[np.diag_indices(size)] = diagonal.to(torch.float64).numpy()
    return noise


def _unit_bits(noise_multiplier: float | None, *, radius: float) -> int:
    """Return the finest unit in which the noise can be drawn."""
    if noise_multiplier is None:
        return FINEST_BITS
    for bits in range(FINEST_BITS, _COARSEST_BITS - 1, -1):
        std = noise_multiplier * largest_length(radius=radius, bits=bits)
        if MIN_STD_UNITS * math.sqrt(2) <= std <= LARGEST_STD_UNITS:
            return bits
    raise PrivacyError(
        f"encoder.share: noise of {noise_multiplier:.3g} times what a record of length "
        f"{radius:.3g} can change leaves nothing to fit to; raise the share, or epsilon"
    )


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

    def change_of_label(self, rows_moved: int = 1) -> float:
        """Return the L2 sensitivity of the sums to one label, exchanged for another, in units.

        Args:
            rows_moved: Rows that it takes to another class, at most; several go round a cycle.
        """
        if rows_moved == 1:
            return math.sqrt(2) * self.longest
        # Of the largest slope of a sum of rounded records; rounding a sum that is drawn back takes
        # the first numbers of two vectors apart by less than a unit.
        rest = self.radius * 2.0**self.bits
        first = math.trunc(rest / 2)
        apart = 2 * self.longest * rest / math.hypot(first, rest) + 1
        return math.sqrt(rows_moved) * min(apart, 2 * self.longest)

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


def cell_counts(
    values: Float64[np.ndarray, "records columns"], edges: Float64[np.ndarray, " edges"]
) -> Int64[np.ndarray, "columns cells"]:
    """Return how many records each cell of each column has; see :func:`noised_ranks`."""
    finite = values[np.isfinite(values).all(axis=1)]
    cells = len(edges) - 1
    places = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, cells - 1)
    counts = [np.bincount(column, minlength=cells) for column in places.T]
    return np.array(counts, dtype=np.int64).reshape(values.shape[1], cells)


def noised_ranks(
    values: Float64[np.ndarray, "records columns"],
    edges: Float64[np.ndarray, " edges"],
    *,
    noise_multiplier: float | None,
) -> Float64[np.ndarray, "columns cells"]:
    """Return the rank of each cell of each column, from noised counts of records by cell.

    A cell's rank is the share of records below it, and half of the share in it: so many equal
    values have the rank of their middle. Noised shares are made to rise: each becomes the middle
    of the largest before it and the least after it.

    Args:
        values: One line for each record, a function of that record alone. A line that is not
            finite counts as no record; a value beyond the edges counts in the cell nearest to it.
        edges: Ascending, independent of the records.
        noise_multiplier: Noise over the change that one record makes; None adds none.

    Raises:
        PrivacyError: If the noise is too large to be drawn.

    Reveals:
        As much as one Gaussian release with that multiplier, of the unit "one record of this
        table, added or removed"; the caller says to whom.
    """
    counts = cell_counts(values, edges)
    columns, bits = len(counts), 0
    if noise_multiplier is not None and columns:
        checks.positive(noise_multiplier=noise_multiplier)
        std = noise_multiplier * math.sqrt(columns)
        bits = max(0, math.ceil(math.log2(MIN_STD_UNITS / std)))
        if std > LARGEST_STD_UNITS:
            raise PrivacyError(
                f"encoder.share: noise of {noise_multiplier:.3g} times what a record can change "
                f"leaves nothing of {columns} columns' distributions; raise the share, or epsilon"
            )
        drawn = ExactDiscreteGaussian(std * 2.0**bits).sample(counts.shape)
        counts = (counts << bits) + drawn.to(torch.int64).numpy()
    ranks = np.zeros(counts.shape)
    for column, total in enumerate(counts.sum(axis=1)):
        below = np.cumsum(counts[column]) / max(int(total), 1 << bits)
        shares = np.clip([0.0, *below[:-1], 1.0], 0.0, 1.0)
        largest, least = np.maximum.accumulate(shares), np.minimum.accumulate(shares[::-1])[::-1]
        shares = (largest + least) / 2
        ranks[column] = (shares[:-1] + shares[1:]) / 2
    return ranks


_ROWS_STD_UNITS: Final = 2.0**16


def noised_rows(count: int, *, rows: int, std: float) -> int:
    """Return a number of rows behind noise, rounded to a whole one within the table.

    Noise is drawn in parts of a row, so fine that the accounting of integers holds, and that no
    rounding of halves is seen.

    Args:
        count: The number, from 0 to ``rows``.
        rows: Of the table.
        std: Standard deviation of the noise, in rows; 0 adds none.

    Reveals:
        As much as one Gaussian release of deviation ``std``; the caller says to whom.
    """
    noised = count
    if std > 0:
        bits = max(0, math.ceil(math.log2(_ROWS_STD_UNITS / std)))
        noise = int(ExactDiscreteGaussian(std * 2.0**bits).sample((1,)))
        noised = ((count << bits) + noise + (1 << bits >> 1)) >> bits
    return min(max(noised, 0), rows)
