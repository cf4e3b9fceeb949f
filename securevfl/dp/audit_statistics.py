"""Is what was released noised and clipped as promised? Tests on the revealed averages alone.

Rows come in three kinds, in turn: zero (world 0), of norm 10 C along a unit direction u (world 1,
which clipping must bring to C), and mixed ones, part of which clipping must leave alone. Whoever
holds the averages knows which is which; the score of a row H is ``<H, u> / C``. The noise left when
the expected rows are taken away should be independent N(0, noise^2), in units of C, over all rows,
coordinates and rounds.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float
from scipy import special, stats

from securevfl.core.errors import ConfigError
from securevfl.dp.audit_power import (
    AGAINST,
    WORLDS,
    AuditSize,
    correlation_bound,
    error_bound,
    mean_bound,
    powers,
    shape_bound,
    variance_bounds,
)

ZERO: Final = 0
"""Place of world 0 among the kinds of rows: row i is of kind ``i mod 3``."""

LONG: Final = 1
"""Place of world 1."""

MIXED: Final = 2
"""Place of the mixed rows: they, or one of their records, are too short to be clipped."""

# Where the score of world 0, 0, and that of world 1, 1, are told apart with the fewest errors.
_THRESHOLD: Final = 0.5

# Larger than any noise: what is not a number must fail, and must be printable.
_BEYOND: Final = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditTest:
    """One test's outcome."""

    name: str
    """What must hold."""

    statistic: float
    """What was observed."""

    threshold: float
    """Where passing ends."""

    passes_if: Literal["at least", "at most"]
    """On which side of the threshold the statistic must be."""

    power: float
    """Probability of failing a mechanism with the mistake in ``against``."""

    against: str
    """The mistake that the power is stated for."""

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """Whether the mechanism passes; what is not a number fails."""
        if self.passes_if == "at least":
            return "pass" if self.statistic >= self.threshold else "fail"
        return "pass" if self.statistic <= self.threshold else "fail"

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain figures and words."""
        return {
            "name": self.name,
            "statistic": self.statistic,
            "threshold": self.threshold,
            "passes_if": self.passes_if,
            "power": self.power,
            "against": self.against,
            "verdict": self.verdict,
        }


def audit_tests(
    residual: Float[np.ndarray, "rounds rows width"],
    scores: Float[np.ndarray, "rounds rows"],
    size: AuditSize,
    *,
    mixed_score: float,
) -> list[AuditTest]:
    """Run every test of an audit.

    Args:
        residual: Released averages minus what they would be without noise, over the clip norm.
        scores: ``<H, u> / C`` of every released row.
        size: What was promised, and how much of it is looked at.
        mixed_score: Score of the mixed rows if each is clipped as promised.

    Raises:
        ConfigError: If the arrays are not of that size.
    """
    shape = (size.rounds, size.rows_per_round, size.width)
    if residual.shape != shape or scores.shape != shape[:2]:
        raise ConfigError(
            f"an audit of this size takes residuals of shape {shape}, "
            f"got {residual.shape} and scores of shape {scores.shape}"
        )
    noise = np.nan_to_num(residual / size.noise, nan=_BEYOND, posinf=_BEYOND, neginf=-_BEYOND)
    low, high = variance_bounds(size.coordinates)
    ratio = float(np.mean(noise**2))
    floor = ("noise_not_too_small", ratio, low, "at least")
    ceilings = {
        "noise_not_too_large": (ratio, high),
        "noise_is_gaussian": (normal_distance(noise), shape_bound(size)),
        "worlds_not_too_distinguishable": (
            distinguishability(scores[:, ZERO::WORLDS], scores[:, LONG::WORLDS]),
            1 / size.noise,
        ),
        "zero_rows_stay_zero": (_off(scores, ZERO, 0.0), mean_bound(size)),
        "long_rows_clipped_to_C": (_off(scores, LONG, 1.0), mean_bound(size)),
        "each_clipped_by_itself": (_off(scores, MIXED, mixed_score), mean_bound(size)),
        "rows_have_own_noise": (row_correlation(noise), 1.0),
        "coordinates_have_own_noise": (coordinate_correlation(noise), 1.0),
        "rounds_have_own_noise": (round_correlation(noise), 1.0),
    }
    power = powers(size)
    return [
        AuditTest(
            name=name,
            statistic=float(statistic),
            threshold=float(threshold),
            passes_if="at least" if side == "at least" else "at most",
            power=power[name],
            against=AGAINST[name],
        )
        for name, statistic, threshold, side in [
            floor,
            *((name, *values, "at most") for name, values in ceilings.items()),
        ]
    ]


def distinguishability(
    zero_scores: Float[np.ndarray, "*zero"], long_scores: Float[np.ndarray, "*long"]
) -> float:
    """Return a lower confidence bound on mu: how far the two worlds can be told apart.

    A mu-Gaussian-DP mechanism keeps ``Phi^-1(1 - a) - Phi^-1(b) <= mu`` for the error
    probabilities a and b of any test between the worlds. Here the test is whether a score is over
    1/2, and both probabilities are replaced by upper confidence bounds, which together hold with
    probability 1 - ``FALSE_FAILURE``.

    References:
        [DRS19] section 2.2 (arXiv:1905.02383v3): the trade-off function
        ``G_mu(a) = Phi(Phi^-1(1 - a) - mu)``; [CP34] for the bounds.
    """
    false_alarms = int((zero_scores > _THRESHOLD).sum())
    misses = int((~(long_scores > _THRESHOLD)).sum())
    bounds = [
        float(error_bound(false_alarms, zero_scores.size)),
        float(error_bound(misses, long_scores.size)),
    ]
    return max(0.0, float(sum(stats.norm.isf(bound) for bound in bounds)))


def normal_distance(noise: Float[np.ndarray, "*shape"]) -> float:
    """Return the largest distance of the distribution function from the standard normal one."""
    expected = special.ndtr(np.sort(noise, axis=None))
    place = np.arange(len(expected) + 1) / len(expected)
    return float(max((expected - place[:-1]).max(), (place[1:] - expected).max()))


def row_correlation(noise: Float[np.ndarray, "rounds rows width"]) -> float:
    """Return the largest correlation of rows of one round over its bound, at any distance."""
    rounds, rows, width = noise.shape
    lags = np.arange(1, rows)
    bound = correlation_bound((rows - lags) * width, tests=rounds * (rows - 1))
    return max(float(np.max(np.abs(_lagged(one, one)[lags]) / bound)) for one in noise)


def coordinate_correlation(noise: Float[np.ndarray, "rounds rows width"]) -> float:
    """Return the largest correlation of a row's coordinates over its bound, at any distance."""
    width = noise.shape[2]
    if width == 1:
        return 0.0
    columns = noise.reshape(-1, width).T
    lags = np.arange(1, width)
    bound = correlation_bound((width - lags) * columns.shape[1], tests=width - 1)
    return float(np.max(np.abs(_lagged(columns, columns)[lags]) / bound))


def round_correlation(noise: Float[np.ndarray, "rounds rows width"]) -> float:
    """Return the largest correlation of two rounds over its bound, at any shift of their rows."""
    rounds, rows, width = noise.shape
    pairs = [(one, other) for one in range(rounds) for other in range(one)]
    overlap = (rows - np.arange(rows)) * width
    bound = correlation_bound(overlap, tests=len(pairs) * (2 * rows - 1))
    return max(
        float(np.max(np.abs(_lagged(noise[one], noise[other])) / bound))
        for first, second in pairs
        for one, other in ((first, second), (second, first))
    )


def _lagged(
    one: Float[np.ndarray, "rows width"], other: Float[np.ndarray, "rows width"]
) -> Float[np.ndarray, " rows"]:
    """Return ``sum_i <one_i, other_(i + lag)>`` for every lag from 0, by Fourier transform."""
    rows = len(one)
    # Twice as long, so that rows at the end do not meet those at the start again.
    padded = 2 * rows
    spectrum = np.fft.rfft(one, padded, axis=0).conj() * np.fft.rfft(other, padded, axis=0)
    return np.fft.irfft(spectrum.sum(axis=1), padded)[:rows]


def _off(scores: Float[np.ndarray, "rounds rows"], kind: int, expected: float) -> float:
    mean = float(np.mean(scores[:, kind::WORLDS]))
    return abs(mean - expected) if math.isfinite(mean) else _BEYOND
