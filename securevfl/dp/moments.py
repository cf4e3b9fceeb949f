"""Moments of a table: count, mean and covariance with Gaussian noise.

Every record ``x`` is scaled down to the ball of radius R, written as ``u = (R/2, x)`` and rounded
towards zero into integer units; the noise is integers too, so all sums are exact.

``S = sum_records u u^T`` holds count, sum and second moments. One record adds or removes ``u u^T``.
With the entries above the diagonal counted sqrt(2) times, the symmetric matrix becomes a vector of
length

    ||u u^T||_F = ||u||^2 <= 5/4 R^2.

Noise of one standard deviation on that vector is 1/sqrt(2) of it on each entry off the diagonal.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float64

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
