"""The audit's statistics: sizes, bounds and correlations against independent computations."""

import math

import numpy as np
import pytest
from scipy import special, stats

from securevfl.core.errors import ConfigError
from securevfl.lab.audit.audit_statistics import (
    AGAINST,
    FALSE_FAILURE,
    AuditSize,
    audit_tests,
    coordinate_correlation,
    correlation_bound,
    distinguishability,
    error_bound,
    normal_distance,
    powers,
    round_correlation,
    row_correlation,
    rows_needed,
    variance_bounds,
    worlds_needed,
)

SIZE = AuditSize(noise=1.0, parties=4, rounds=4, rows=114, width=32, step=1e-4)
SHAPE = (4, 3 * 114, 32)


def right_noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def scores_of(noise: np.ndarray) -> np.ndarray:
    """Scores along the first axis; the mixed rows' score is 0.5."""
    scores = noise[:, :, 0].copy()
    scores[:, 1::3] += 1
    scores[:, 2::3] += 0.5
    return scores


@pytest.mark.parametrize(("noise", "rows"), [(0.5, 361), (1.0, 692), (2.0, 2303), (4.0, 8787)])
def test_the_worlds_get_as_many_rows_as_are_needed(noise: float, rows: int) -> None:
    """Found without this code, by bounds from quantiles of F and a sum over all pairs of counts."""
    assert worlds_needed(noise) == rows


def test_103_coordinates_catch_a_factor_of_two() -> None:
    """The figure of docs/audit.md: half the standard deviation is seen with probability 0.99."""
    low, _ = variance_bounds(103)

    assert stats.chi2.cdf(low * 103 * 4, 103) >= 0.99
    assert stats.chi2.cdf(low * 103, 103) == pytest.approx(FALSE_FAILURE)


@pytest.mark.parametrize("parties", [1, 2, 4, 12])
def test_every_power_is_as_wanted(parties: int) -> None:
    """However many parties share the blame, the audit grows until it sees one."""
    rows = rows_needed(noise=1.0, parties=parties, rounds=4, width=32)
    size = AuditSize(noise=1.0, parties=parties, rounds=4, rows=rows, width=32, step=2.0**-6)

    assert min(powers(size).values()) >= 0.99
    assert set(powers(size)) == set(AGAINST)


def test_error_bounds_are_those_of_clopper_and_pearson() -> None:
    """Against scipy's own interval, and 1 where everything was an error."""
    for errors in (0, 3, 100):
        interval = stats.binomtest(errors, 231).proportion_ci(1 - FALSE_FAILURE, "exact")
        assert float(error_bound(errors, 231)) == pytest.approx(interval.high)
    assert float(error_bound(231, 231)) == 1.0


def test_correlation_bounds_hold_in_simulation() -> None:
    """At a level that can be simulated: 1 in 100 at most, for neighbours in a chain of 50."""
    t = math.log(100)
    x = np.random.default_rng(0).standard_normal((20_000, 51))
    sums = (x[:, 1:] * x[:, :-1]).sum(axis=1)
    scale = float(correlation_bound(50, tests=1))
    level = math.log(2 / FALSE_FAILURE)

    assert scale == pytest.approx(math.sqrt(2 * level * 50) + 2 * level)
    assert (sums > math.sqrt(2 * t * 50) + 2 * t).mean() < 0.01


def test_powers_against_reused_noise_match_simulation() -> None:
    """A party of four that repeats one row's noise in a round of 30 rows: 400 trials."""
    size = AuditSize(noise=1.0, parties=4, rounds=2, rows=28, width=32, step=0.0)
    random = np.random.default_rng(1)
    shape = (2, 84, 32)
    caught = 0
    for _ in range(400):
        noise = random.standard_normal(shape) * math.sqrt(3 / 4)
        # Fresh in the second round, so that one round alone decides.
        noise[0] += random.standard_normal((1, 32)) / 2
        noise[1] += random.standard_normal((84, 32)) / 2
        caught += row_correlation(noise) > 1

    assert 0.3 < powers(size)["rows_have_own_noise"] < 0.99
    # Any distance of rows may show it, so the power stated for one of them is on the low side.
    assert caught / 400 > powers(size)["rows_have_own_noise"] - 0.1


def test_correlations_are_those_of_plain_loops() -> None:
    """Fourier transforms give what sums over pairs give."""
    noise = np.random.default_rng(2).standard_normal((3, 5, 4))

    rows = max(
        abs(sum(one[i] @ one[i + lag] for i in range(5 - lag)))
        / correlation_bound((5 - lag) * 4, tests=12)
        for one in noise
        for lag in range(1, 5)
    )
    coordinates = max(
        abs(sum(noise[..., i].ravel() @ noise[..., i + lag].ravel() for i in range(4 - lag)))
        / correlation_bound((4 - lag) * 15, tests=3)
        for lag in range(1, 4)
    )
    rounds = max(
        abs(sum(noise[a][i] @ noise[b][i + lag] for i in range(5) if 0 <= i + lag < 5))
        / correlation_bound((5 - abs(lag)) * 4, tests=27)
        for a, b in ((0, 1), (0, 2), (1, 2))
        for lag in range(-4, 5)
    )

    assert row_correlation(noise) == pytest.approx(float(rows))
    assert coordinate_correlation(noise) == pytest.approx(float(coordinates))
    assert round_correlation(noise) == pytest.approx(float(rounds))


def test_the_worlds_are_as_distinguishable_as_the_noise_says() -> None:
    """A lower bound on mu: below it with right noise, near it with very many rows."""
    random = np.random.default_rng(3)
    zero, long = random.standard_normal((2, 1_000_000)) * 0.5

    assert 1.97 < distinguishability(zero, long + 1) <= 2.0
    assert distinguishability(zero[:10], long[:10] + 1) == 0.0


def test_the_distance_from_normal_is_that_of_scipy() -> None:
    """Against the statistic of Kolmogorov's test; Laplace is as far as the power assumes."""
    noise = np.random.default_rng(4).standard_normal(5000)
    x = np.linspace(-6, 6, 200_001)
    laplace = stats.laplace.cdf(x, scale=math.sqrt(0.5))

    assert normal_distance(noise) == pytest.approx(stats.kstest(noise, "norm").statistic)
    assert 0.062 < np.abs(laplace - special.ndtr(x)).max() < 0.0621


def test_right_noise_passes_and_what_is_not_a_number_fails() -> None:
    """One NaN or infinity among all released numbers is enough; fixed seed."""
    noise = right_noise()
    scores = scores_of(noise)

    assert {t.verdict for t in audit_tests(noise, scores, SIZE, mixed_score=0.5)} == {"pass"}
    for value in (math.nan, math.inf):
        broken = noise.copy()
        broken[1, 1, 1] = value
        outcomes = audit_tests(broken, scores, SIZE, mixed_score=0.5)
        assert "fail" in {t.verdict for t in outcomes}
        assert all(math.isfinite(t.statistic) for t in outcomes)


def test_arrays_of_another_size_are_refused() -> None:
    """Fewer rounds than the thresholds were made for would pass too easily."""
    noise = right_noise()

    with pytest.raises(ConfigError, match="an audit of this size"):
        audit_tests(noise[:3], scores_of(noise)[:3], SIZE, mixed_score=0.5)


@pytest.mark.parametrize("noise", [0.1, 9.0, math.nan])
def test_noise_beyond_what_counting_can_audit_is_refused(noise: float) -> None:
    """The message names the option and its range."""
    with pytest.raises(ConfigError, match=r"noise_multiplier must lie in \[0.25, 8\]"):
        rows_needed(noise=noise, parties=4, rounds=4, width=32)
