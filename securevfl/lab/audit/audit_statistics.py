"""Statistics of an audit: tests on revealed averages, their thresholds and power.

Every test fails a right mechanism with probability at most ``FALSE_FAILURE``. Its power is the
probability of failing the mistake that it is there for, stated in ``AGAINST``. ``k`` is the number
of secondaries, ``C`` the clip norm.

Rows come in three kinds, in turn: zero (world 0), of norm 10 C along a unit direction u (world 1,
which clipping must bring to C), and mixed ones, part of which clipping must leave alone. Whoever
holds the averages knows which is which; the score of a row H is ``<H, u> / C``. The noise left when
the expected rows are taken away should be independent N(0, noise^2), in units of C, over all rows,
coordinates and rounds.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float, Int64
from scipy import special, stats

from securevfl.core.errors import ConfigError
from securevfl.lab.audit.audit_size import (
    AGAINST,
    WORLDS,
    AuditSize,
    correlation_bound,
    correlation_power,
    counting_power,
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
"""Place of the mixed rows, part of which is too short to be clipped."""

# Where the score of world 0, 0, and that of world 1, 1, are told apart with the fewest errors.
_THRESHOLD: Final = 0.5

# Larger than any noise: what is not a number must fail, and must be printable.
_BEYOND: Final = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditTest:
    """One test's outcome."""

    name: str
    """Property that must hold."""

    statistic: float
    """Observed value."""

    threshold: float
    """Bound on the statistic."""

    passes_if: Literal["at least", "at most"]
    """Side of the threshold on which the statistic must be."""

    power: float
    """Probability of failing a mechanism with the mistake in ``against``."""

    against: str
    """The mistake that the power is stated for."""

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """``pass`` or ``fail``; a statistic that is not a number fails."""
        if self.passes_if == "at least":
            return "pass" if self.statistic >= self.threshold else "fail"
        return "pass" if self.statistic <= self.threshold else "fail"

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name, and the verdict."""
        return {**asdict(self), "verdict": self.verdict}


def audit_tests(
    residual: Float[np.ndarray, "rounds rows width"],
    scores: Float[np.ndarray, "rounds rows"],
    size: AuditSize,
    *,
    mixed_score: float,
) -> list[AuditTest]:
    """Run every test of an audit.

    Args:
        residual: Released minus noiseless averages, over the clip norm.
        scores: ``<H, u> / C`` of every released row.
        size: Promised noise and number of releases.
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
    """Return a lower confidence bound on mu, the distance between the two worlds.

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
    return max(float(np.max(np.abs(_lagged_products(row, row)[lags]) / bound)) for row in noise)


def coordinate_correlation(noise: Float[np.ndarray, "rounds rows width"]) -> float:
    """Return the largest correlation of a row's coordinates over its bound, at any distance."""
    width = noise.shape[2]
    if width == 1:
        return 0.0
    columns = noise.reshape(-1, width).T
    lags = np.arange(1, width)
    bound = correlation_bound((width - lags) * columns.shape[1], tests=width - 1)
    return float(np.max(np.abs(_lagged_products(columns, columns)[lags]) / bound))


def round_correlation(noise: Float[np.ndarray, "rounds rows width"]) -> float:
    """Return the largest correlation of two rounds over its bound, at any shift of their rows."""
    rounds, rows, width = noise.shape
    pairs = [(later, other) for later in range(rounds) for other in range(later)]
    overlap = (rows - np.arange(rows)) * width
    bound = correlation_bound(overlap, tests=len(pairs) * (2 * rows - 1))
    return max(
        float(np.max(np.abs(_lagged_products(noise[left], noise[other])) / bound))
        for first, second in pairs
        for left, other in ((first, second), (second, first))
    )


def _lagged_products(
    first: Float[np.ndarray, "rows width"], other: Float[np.ndarray, "rows width"]
) -> Float[np.ndarray, " rows"]:
    """Return ``sum_i <one_i, other_(i + lag)>`` for every lag from 0, by Fourier transform."""
    rows = len(first)
    # Twice as long, so that rows at the end do not meet those at the start again.
    padded = 2 * rows
    spectrum = np.fft.rfft(first, padded, axis=0).conj() * np.fft.rfft(other, padded, axis=0)
    return np.fft.irfft(spectrum.sum(axis=1), padded)[:rows]


def _off(scores: Float[np.ndarray, "rounds rows"], kind: int, expected: float) -> float:
    mean = float(np.mean(scores[:, kind::WORLDS]))
    return abs(mean - expected) if math.isfinite(mean) else _BEYOND


# Sums that are compared with one another.
_COMPARED: Final = 8
# Chance of either count of labels to be beyond what the power is stated for.
_UNLIKELY: Final = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SumsView:
    """One side's view of class sums."""

    noise: float
    """Promised deviation over the change to hide, in [0.25, 8]."""

    residual: Float[np.ndarray, "sums bins numbers"]
    """Seen minus noiseless sums, over the same change."""

    scores: Float[np.ndarray, "sums changes"]
    """Score of every possible change: 0 on average if it was not made, 1 if it was."""

    made: Bool[np.ndarray, " changes"]
    """True for each change that was made."""


def sums_tests(seen: SumsView, *, what: str) -> list[AuditTest]:
    """Test the noise of class sums, and the detection of one changed record.

    Args:
        seen: One side's view.
        what: ``record`` or ``label``; names the tests.
    """
    noise = seen.residual / seen.noise
    count = noise.size
    low, _ = variance_bounds(count)
    compared = noise[:_COMPARED]
    pairs, lines = compared[0].size, compared.shape[1]
    tests = len(compared) * (len(compared) - 1) // 2 * (2 * lines - 1)
    scores = [seen.scores[:, seen.made == made] for made in (False, True)]
    trials = min(world_scores.size for world_scores in scores)
    return [
        AuditTest(
            name=f"{what}_noise_not_too_small",
            statistic=float(np.mean(noise**2)),
            threshold=low,
            passes_if="at least",
            power=float(stats.chi2.cdf(4 * low * count, count)),
            against=f"half the noise on what a {what} changes",
        ),
        AuditTest(
            name=f"{what}s_not_too_distinguishable",
            statistic=distinguishability(*scores),
            threshold=1 / seen.noise,
            passes_if="at most",
            power=counting_power(seen.noise, trials),
            against=f"half the noise on what a {what} changes",
        ),
        AuditTest(
            name=f"{what}_sums_have_own_noise",
            statistic=round_correlation(compared),
            threshold=1.0,
            passes_if="at most",
            power=correlation_power(pairs, shared=pairs, parties=1, tests=tests),
            against="one sum's noise is added to the next one again",
        ),
    ]


def labels_needed(epsilon: float, *, classes: int) -> int:
    """Return the rows of each of two labels that detect twice the epsilon nearly surely.

    Args:
        epsilon: Promised epsilon of one label by randomised response.
        classes: Number of classes, K.
    """
    rows = 64
    while not _caught(epsilon, classes, rows):
        rows *= 2
    return rows


def drawn_tests(
    first: Int64[np.ndarray, " rows"],
    second: Int64[np.ndarray, " rows"],
    again: Int64[np.ndarray, " both"],
    *,
    epsilon: float,
    classes: int,
) -> list[AuditTest]:
    """Test labels by randomised response.

    Args:
        first: Drawn labels of rows of class 0.
        second: Drawn labels of an equal number of rows of class 1.
        again: Drawn labels of both after the run is resumed, class 0 first.
        epsilon: Promised epsilon.
        classes: Number of classes, K.
    """
    rows = len(first)
    lower = 1 - float(error_bound(int((first != 0).sum()), rows))
    upper = float(error_bound(int((second == 0).sum()), rows))
    agree = _kept_probability(epsilon, classes) ** 2 + (
        1 - _kept_probability(epsilon, classes)
    ) ** 2 / (classes - 1)
    return [
        AuditTest(
            name="drawn_not_too_distinguishable",
            statistic=max(0.0, math.log(max(lower, 1e-300) / upper)),
            threshold=epsilon,
            passes_if="at most",
            power=1 - 2 * _UNLIKELY if _caught(epsilon, classes, rows) else 0.0,
            against="labels are kept as often as twice their epsilon allows",
        ),
        AuditTest(
            name="drawn_told_again_alike",
            statistic=float((np.concatenate([first, second]) != again).sum()),
            threshold=0.0,
            passes_if="at most",
            power=1 - agree ** (2 * rows),
            against="labels are drawn again when a run is resumed",
        ),
    ]


def _kept_probability(epsilon: float, classes: int) -> float:
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _caught(epsilon: float, classes: int, rows: int) -> bool:
    """Return whether `rows` rows detect twice the epsilon, except with probability 2 _UNLIKELY."""
    kept = _kept_probability(2 * epsilon, classes)
    turned = int(stats.binom.isf(_UNLIKELY, rows, 1 - kept))
    taken = int(stats.binom.isf(_UNLIKELY, rows, (1 - kept) / (classes - 1)))
    lower, upper = 1 - float(error_bound(turned, rows)), float(error_bound(taken, rows))
    return lower > upper * math.exp(epsilon)
