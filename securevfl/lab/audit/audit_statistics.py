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
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, Int64
from scipy import special, stats

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import gaussian_noise_multiplier

FALSE_FAILURE: Final = 3.2e-11
"""Largest probability that one test fails a right mechanism; a report's 30 are within its 1e-9."""

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


ZERO: Final = 0
"""Place of world 0 among the kinds of rows: row i is of kind ``i mod 3``."""

LONG: Final = 1
"""Place of world 1."""

MIXED: Final = 2
"""Place of the mixed rows; some are too short to be clipped."""

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


Release = Literal["sequence", "pooled"]
"""``sequence``: a row of L x H numbers, clipped whole, of a trained encoder, whose rows may be
released again. ``pooled``: the mean of K records, each clipped, of a frozen one."""

RELEASES: Final[tuple[Release, ...]] = ("sequence", "pooled")

ClassMeans = Literal["class_sums", "label_sums", "drawn_labels", "symbols"]
"""``class_sums``: of a secondary's records, as a primary sees them. ``label_sums``: the same as
that secondary sees them. ``drawn_labels``: by randomised response. ``symbols``: of scores."""

Audited = Release | ClassMeans | Literal["one_run"]
"""Audited releases; ``one_run`` is a whole training."""

DELTA: Final = 1e-5

ROUNDS_EVENT: Final = "rounds"
"""Event that the primary's process reports once all rounds are released."""

_LEAST_LABELS: Final = 0.5
_MOST_LABELS: Final = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSettings:
    """Settings of an audit."""

    secondaries: int = 4
    """k, parties that average; the primary comes on top."""

    noise_multiplier: float = 1.0
    """Standard deviation of the noise on the released average, over the clip norm; on class sums,
    over the change by one record."""

    clip_norm: float = 1.0
    """C."""

    rounds: int = 4
    """Releases of each kind, >= 2."""

    label_epsilon: float = 2.0
    """Epsilon of class means for a row's label, against each secondary, at delta 1e-5; 0.5 to 8."""

    timeout_s: float = 300.0
    """Seconds after which the processes are ended."""

    def __post_init__(self) -> None:
        checks.whole(secondaries=self.secondaries, rounds=self.rounds)
        checks.at_least(1, secondaries=self.secondaries)
        checks.at_least(2, rounds=self.rounds)
        checks.positive(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            timeout_s=self.timeout_s,
        )
        if not _LEAST_LABELS <= self.label_epsilon <= _MOST_LABELS:
            raise ConfigError(
                f"label_epsilon must lie in [{_LEAST_LABELS:g}, {_MOST_LABELS:g}] for an audit, "
                f"got {self.label_epsilon!r}: beyond it too many labels would have to be counted"
            )
        # Which noise can be audited at all is checked there.
        AuditSize(noise=self.noise_multiplier, parties=1, rounds=2, rows=1, width=1, step=0.0)

    @property
    def names(self) -> list[str]:
        """All parties, by rank."""
        return ["primary", *(f"secondary-{rank}" for rank in range(1, self.secondaries + 1))]

    @property
    def label_noise(self) -> float:
        """Noise on returned class sums, over the change by one label."""
        return gaussian_noise_multiplier(epsilon=self.label_epsilon, delta=DELTA)
