"""Size of an audit: thresholds of its tests, and the power of each against its mistake."""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from securevfl.core import checks
from securevfl.core.errors import ConfigError

FALSE_FAILURE: Final = 3.5e-11
"""Largest probability that one test fails a right mechanism; 28 of them are a report's 1e-9."""

WORLDS: Final = 3
"""Kinds of rows in a round; see :mod:`securevfl.lab.audit.audit_statistics`."""

MEAN_ERROR: Final = math.sqrt(2) - 1
"""Error of a mean, over C, if half a row's norm (or half a batch) is overlooked."""

AGAINST: Final = {
    "noise_not_too_small": "one of the secondaries adds no noise",
    "noise_not_too_large": "two of the secondaries add the same noise",
    "noise_is_gaussian": "Laplace noise of the same variance",
    "worlds_not_too_distinguishable": "half the noise",
    "zero_rows_stay_zero": "a shift by 0.41 C",
    "long_rows_clipped_to_C": "norms of 1.41 C, as when zero rows share a batch's norm",
    "each_clipped_by_itself": "0.41 C off, as when all are scaled by the longest one",
    "rows_have_own_noise": "one of the secondaries adds one row's noise to all rows of a round",
    "coordinates_have_own_noise": "one of the secondaries adds one number to a whole row",
    "rounds_have_own_noise": "one of the secondaries adds its noise again in the next round",
}
"""Mistake that each test's power is stated for, by test."""

_WANTED_POWER: Final = 0.99
# Beyond these the two worlds are told apart so rarely, or so often, that counting becomes a long
# affair: below, one error in 40 and, with half the noise, one in 30,000.
_SMALLEST_NOISE: Final = 0.25
_LARGEST_NOISE: Final = 8.0
# sup |F - Phi| for a Laplace distribution F of variance 1 is 0.06202.
_LAPLACE_DISTANCE: Final = 0.062


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSize:
    """The numbers that thresholds and powers depend on."""

    noise: float
    """Standard deviation that the released average promises, over the clip norm."""

    parties: int
    """``k``: secondaries."""

    rounds: int
    """Number of releases, >= 2."""

    rows: int
    """Rows of each kind in one round."""

    width: int
    """Coordinates of one row."""

    step: float
    """One ring unit of the released average, over its promised standard deviation."""

    def __post_init__(self) -> None:
        counts = {"parties": self.parties, "rows": self.rows, "width": self.width}
        checks.whole(rounds=self.rounds, **counts)
        checks.at_least(1, **counts)
        checks.at_least(2, rounds=self.rounds)
        checks.non_negative(step=self.step)
        if not _SMALLEST_NOISE <= self.noise <= _LARGEST_NOISE:
            raise ConfigError(
                f"noise_multiplier must lie in [{_SMALLEST_NOISE:g}, {_LARGEST_NOISE:g}] for an "
                f"audit, got {self.noise!r}: beyond it too many rows would have to be counted"
            )

    @property
    def rows_per_round(self) -> int:
        """All rows of one round."""
        return WORLDS * self.rows

    @property
    def rows_per_world(self) -> int:
        """Rows of one kind in all rounds."""
        return self.rows * self.rounds

    @property
    def coordinates(self) -> int:
        """Numbers that are released in all rounds."""
        return self.rows_per_round * self.rounds * self.width


def rows_needed(*, noise: float, parties: int, rounds: int, width: int) -> int:
    """Return the rows of each kind that a round needs for every power to reach 0.99."""
    size = AuditSize(noise=noise, parties=parties, rounds=rounds, rows=1, width=width, step=2.0**-6)
    # For the two worlds a count alone is sought, so that steps can be small: powers are costly.
    size = replace(size, rows=-(-worlds_needed(noise) // rounds))
    while min(powers(size).values()) < _WANTED_POWER:
        size = replace(size, rows=math.ceil(1.25 * size.rows))
    return size.rows


def worlds_needed(noise: float) -> int:
    """Return the rows of each world that detect half the noise with probability 0.9999."""

    def enough(rows: int) -> bool:
        return counting_power(noise, rows) >= 1 - 1e-4

    low, high = 1, 64
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def variance_bounds(coordinates: int) -> tuple[float, float]:
    """Return the interval for the observed over the promised variance."""
    return (
        float(stats.chi2.ppf(FALSE_FAILURE, coordinates)) / coordinates,
        float(stats.chi2.isf(FALSE_FAILURE, coordinates)) / coordinates,
    )


def shape_bound(size: AuditSize) -> float:
    """Return the allowed distance of the observed distribution function from the normal one.

    References:
        [M90] P. Massart, "The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality", Ann.
        Probab. 18, 1990: ``P(sup |F_n - F| > x) <= 2 exp(-2 n x^2)``. The rest allows for the
        ring's steps.
    """
    steps = 2 * size.step / math.sqrt(2 * math.pi)
    return math.sqrt(math.log(2 / FALSE_FAILURE) / (2 * size.coordinates)) + steps


def mean_bound(size: AuditSize) -> float:
    """Return the allowed distance of one world's mean score from its expectation, over C."""
    return float(stats.norm.isf(FALSE_FAILURE / 2)) * _mean_std(size)


def correlation_bound(pairs: npt.NDArray[np.int64] | int, *, tests: int) -> npt.NDArray[np.float64]:
    r"""Return an upper bound on a sum of ``pairs`` products of fresh standard normals.

    The sum is ``x^T A x`` with a matrix A of zero diagonal, each pair standing in it twice as 1/2,
    and each number in two pairs at most: ``||A||_F^2 = pairs / 2`` and ``||A|| <= 1``. Then
    ``P(x^T A x > 2 ||A||_F sqrt(t) + 2 ||A|| t) <= e^-t``.

    Args:
        pairs: Products in the sum.
        tests: Number of sums that are tested together, each with both signs.

    References:
        [LM00] Lemma 1 (Laurent and Massart, Ann. Statist. 28, 2000), whose proof covers
        coefficients of either sign.
    """
    t = math.log(2 * tests / FALSE_FAILURE)
    return np.asarray(np.sqrt(2 * t * np.asarray(pairs, np.float64)) + 2 * t)


def error_bound(errors: npt.NDArray[np.int64] | int, rows: int) -> npt.NDArray[np.float64]:
    """Return an upper confidence bound on an error probability, by Clopper and Pearson.

    Half of ``FALSE_FAILURE`` is left for the other world's bound.

    References:
        [CP34] C. Clopper and E. Pearson, Biometrika 26, 1934.
    """
    errors = np.asarray(errors)
    bound = stats.beta.isf(FALSE_FAILURE / 2, errors + 1, np.maximum(rows - errors, 1))
    return np.where(errors < rows, bound, 1.0)


def powers(size: AuditSize) -> dict[str, float]:
    """Return each test's power against the mistake named in ``AGAINST``.

    Exact for noise_not_too_small, noise_not_too_large and the worlds; a lower bound for the shape;
    a normal approximation for means and correlations.
    """
    n, k = size.coordinates, size.parties
    low, high = variance_bounds(n)
    # A single secondary without noise would be seen by anyone: half the noise stands for it.
    missing = (k - 1) / k if k > 1 else 0.25
    doubled = (k + 2) / k if k > 1 else 2.0
    shape = max(0.0, _LAPLACE_DISTANCE - shape_bound(size))
    mean = float(stats.norm.cdf((MEAN_ERROR - mean_bound(size)) / _mean_std(size)))
    b, d, rounds = size.rows_per_round, size.width, size.rounds
    return {
        "noise_not_too_small": float(stats.chi2.cdf(low * n / missing, n)),
        "noise_not_too_large": float(stats.chi2.sf(high * n / doubled, n)),
        "noise_is_gaussian": max(0.0, 1 - 2 * math.exp(-2 * n * shape**2)),
        "worlds_not_too_distinguishable": counting_power(size.noise, size.rows_per_world),
        "zero_rows_stay_zero": mean,
        "long_rows_clipped_to_C": mean,
        "each_clipped_by_itself": mean,
        "rows_have_own_noise": correlation_power(
            (b - 1) * d, shared=d, parties=k, tests=rounds * (b - 1)
        ),
        "coordinates_have_own_noise": correlation_power(
            (d - 1) * b * rounds, shared=b * rounds, parties=k, tests=d - 1
        ),
        "rounds_have_own_noise": correlation_power(
            b * d, shared=b * d, parties=k, tests=rounds * (rounds - 1) // 2 * (2 * b - 1)
        ),
    }


def _mean_std(size: AuditSize) -> float:
    return size.noise / math.sqrt(size.rows_per_world)


def counting_power(noise: float, rows: int) -> float:
    """Return the probability that half the noise is detected, over all counts of errors.

    Args:
        noise: Promised deviation, over the distance between the two worlds.
        rows: Number of rows of each world.
    """
    errors = np.arange(rows + 1)
    quantile = stats.norm.isf(error_bound(errors, rows))
    wrong = stats.norm.sf(1 / noise)
    probability = stats.binom.pmf(errors, rows, wrong)
    cumulative = np.append(0.0, stats.binom.cdf(errors, rows, wrong))
    # For each count of errors in one world, fewer than `first_proof` in the other prove a large mu.
    first_proof = np.searchsorted(-quantile, quantile - 1 / noise, side="left")
    return min(1.0, float(probability @ cumulative[first_proof]))


def correlation_power(pairs: int, *, shared: int, parties: int, tests: int) -> float:
    """Return the power against one of k parties whose ``shared`` numbers are in all pairs.

    Args:
        pairs: Products in a sum.
        shared: Numbers that are used again.
        parties: k.
        tests: Number of sums that are tested together, each with both signs.
    """
    rho = 1 / parties
    mean = pairs * rho
    variance = pairs * (1 + rho**2) + 4 * pairs * rho * (1 - rho) + 2 * mean**2 / shared
    bound = float(correlation_bound(pairs, tests=max(tests, 1)))
    return float(stats.norm.cdf((mean - bound) / math.sqrt(variance)))
