"""The sampler against its own formula and against an independent exact sampler.

Each test states its false-alarm probability, 1e-9; negative controls are in the same file.
"""

import math
import random

import numpy as np
import pytest
from helpers.slow_discrete_gaussian import SlowDiscreteGaussian
from scipy import stats

from securevfl.dp import ring_noise
from securevfl.dp.class_sums import noised_rows
from securevfl.dp.ring_noise import ExactDiscreteGaussian, NoiseTables

FALSE_ALARM = 1e-9

pytestmark = pytest.mark.statistical


def draw(std: float, n: int) -> np.ndarray:
    return ExactDiscreteGaussian(std).sample((n,)).numpy().astype(np.int64)


def cells(std: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return integers and their probabilities, where at least 20 of n samples are expected."""
    x = np.arange(-int(8 * std), int(8 * std) + 1)
    weight = np.exp(-(x.astype(float) ** 2) / (2 * std**2))
    probability = weight / weight.sum()
    keep = probability * n >= 20
    return x[keep], probability[keep]


def p_value(samples: np.ndarray, std: float) -> float:
    """Chi-square test against the discrete Gaussian, each integer a cell, both tails one."""
    n = len(samples)
    x, probability = cells(std, n)
    counts = np.bincount(np.clip(samples, x[0] - 1, x[-1] + 1) - x[0] + 1, minlength=len(x) + 2)
    tails = counts[0] + counts[-1]
    rest = 1 - probability.sum()
    observed = np.append(counts[1:-1], tails)
    expected = n * np.append(probability, rest)
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(x)))


@pytest.mark.parametrize("std", [64.0, 100.7, 333.3])
def test_every_integer_is_as_frequent_as_the_formula_says(std: float) -> None:
    """Four million samples in single integers; fails by chance once in 1e9."""
    assert p_value(draw(std, 4_000_000), std) > FALSE_ALARM


def test_the_test_rejects_near_misses() -> None:
    """Negative controls: 1 % more noise, truncation for rounding, a doubled zero."""
    std, n = 64.0, 4_000_000
    samples = draw(std, n)
    truncated = (np.random.default_rng(1).standard_normal(n) * std).astype(np.int64)
    doubled_zero = np.where((samples == 1) & (np.arange(n) % 8 == 0), 0, samples)

    assert p_value(draw(std * 1.01, n), std) < FALSE_ALARM
    assert p_value(truncated, std) < FALSE_ALARM
    assert p_value(doubled_zero, std) < FALSE_ALARM


@pytest.mark.parametrize(
    ("band", "n"),
    [(ring_noise._EXACT_BAND, 1_000_000), (2.0, 40_000)],
    ids=["64 bits decide all", "256 bits decide all"],
)
def test_the_rare_routes_have_the_same_distribution(
    monkeypatch: pytest.MonkeyPatch, band: float, n: int
) -> None:
    """What 16 bits settle, decided the long way instead; fails by chance once in 1e9."""

    def never_sure(std: float) -> NoiseTables:
        tables = NoiseTables(std)
        tables.cells &= ~0xFFFF
        return tables

    monkeypatch.setattr(ring_noise, "_tables_for", never_sure)
    monkeypatch.setattr(ring_noise, "_EXACT_BAND", band)

    assert p_value(draw(100.7, n), 100.7) > FALSE_ALARM


def test_an_independent_exact_sampler_agrees() -> None:
    """Two-sample chi-square against [CKS20] in fractions; fails by chance once in 1e9."""
    std, n = 80.5, 20_000
    slow = SlowDiscreteGaussian(std, random.Random(os_seed()))
    theirs = np.array([slow.sample() for _ in range(n)])
    ours = draw(std, n)
    edges = np.quantile(np.concatenate([theirs, ours]), np.linspace(0, 1, 41)[1:-1])

    table = [np.bincount(np.searchsorted(edges, s), minlength=40) for s in (theirs, ours)]
    assert stats.chi2_contingency(table).pvalue > FALSE_ALARM


def os_seed() -> int:
    """A fresh seed each run; the oracle has no say in security."""
    return random.SystemRandom().getrandbits(64)


@pytest.mark.parametrize("std", [12_345.6, 2.0**20 + 0.5, 2.0**26])
def test_large_standard_deviations_have_gaussian_quantiles(std: float) -> None:
    """Chi-square in 200 cells of equal probability; fails by chance once in 1e9.

    At these sizes the discrete and the continuous distribution differ by less than one in s.
    """
    n, bins = 2_000_000, 200
    edges = stats.norm.ppf(np.linspace(0, 1, bins + 1)[1:-1]) * std
    samples = draw(std, n) + np.random.default_rng(2).random(n) - 0.5

    counts = np.bincount(np.searchsorted(edges, samples), minlength=bins)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_low_bits_are_uniform_and_samples_unrelated() -> None:
    """The last 8 bits at s = 12,345.6, and the correlation of neighbours; once in 1e9 each."""
    samples = draw(12_345.6, 2_000_000)
    z = float(np.corrcoef(samples[:-1], samples[1:])[0, 1]) * len(samples) ** 0.5

    assert stats.chisquare(np.bincount(samples & 255, minlength=256)).pvalue > FALSE_ALARM
    assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)


def test_the_tails_are_there() -> None:
    """Beyond five standard deviations lie as many of 30 million samples as should: 17 expected.

    The Poisson bounds fail by chance at most once in 1e9. The mean number is that of the exact
    sum over integers.
    """
    std, n = 64.0, 30_000_000
    x = np.arange(int(5 * std) + 1, int(12 * std))
    total = np.exp(-(np.arange(-1000, 1001.0) ** 2) / (2 * std**2)).sum()
    expected = n * 2 * np.exp(-(x.astype(float) ** 2) / (2 * std**2)).sum() / total

    count = int((np.abs(draw(std, n)) > 5 * std).sum())
    assert stats.poisson.ppf(FALSE_ALARM / 2, expected) <= count
    assert count <= stats.poisson.isf(FALSE_ALARM / 2, expected)


def said_rows(count: int, std: float, n: int) -> np.ndarray:
    """Return n answers of a secondary, minus the true number; the ends of the table are far."""
    return np.array([noised_rows(count, rows=2 * count, std=std) for _ in range(n)]) - count


def rounded_p_value(samples: np.ndarray, std: float) -> float:
    """Chi-square test against Gaussian noise that is rounded to whole rows, both tails one cell.

    The discrete Gaussian in a thousandth of a row and less has the same cells, far below chance.
    """
    n, edge = len(samples), math.ceil(3.5 * std)
    probability = np.diff(stats.norm.cdf((np.arange(-edge, edge + 2) - 0.5) / std))
    counts = np.bincount(np.clip(samples, -edge - 1, edge + 1) + edge + 1, minlength=2 * edge + 3)
    observed = np.append(counts[1:-1], counts[0] + counts[-1])
    expected = n * np.append(probability, 1 - probability.sum())
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize("std", [1.7, 12.0, 90.0])
def test_a_number_of_rows_has_the_noise_that_is_charged(std: float) -> None:
    """3,000 answers against the formula; fails by chance once in 1e9. Half the noise is seen."""
    said = said_rows(5_000, std, 3_000)
    assert rounded_p_value(said, std) > FALSE_ALARM
    assert rounded_p_value(said_rows(5_000, std / 2, 3_000), std) < FALSE_ALARM
    assert rounded_p_value(said * 0, std) < FALSE_ALARM


def test_a_number_of_rows_stays_within_the_table() -> None:
    """Certainly: what noise leads out of it is its end."""
    said = {noised_rows(1, rows=2, std=1000.0) for _ in range(200)}
    assert said <= {0, 1, 2}
    assert {noised_rows(count, rows=2, std=0.0) for count in (0, 1, 2)} == {0, 1, 2}
