"""A round's sample has the rate that the accounting charges, each record on its own."""

import pytest
from scipy.stats import binom

from securevfl.linkage.sampling import PoissonSampler

FALSE_ALARM = 1e-9
RECORDS = 1_000_000


def plausible(count: int, trials: int, rate: float) -> bool:
    """Two-sided exact binomial test at false-alarm probability 1e-9."""
    low = binom.ppf(FALSE_ALARM / 2, trials, rate)
    high = binom.isf(FALSE_ALARM / 2, trials, rate)
    return bool(low <= count <= high)


@pytest.mark.statistical
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_the_rate_is_the_one_asked_for(rate: float) -> None:
    """Fails by chance 1 in 1e9 each; what it catches is shown by the negative control below."""
    count = int(PoissonSampler(RECORDS, rate).draw().sum())

    assert plausible(count, RECORDS, rate)


@pytest.mark.statistical
def test_rounds_and_neighbours_are_independent() -> None:
    """Two rounds, and two neighbours, share records with probability q^2; fails 1 in 1e9."""
    sampler = PoissonSampler(RECORDS, 0.3)
    first, second = sampler.draw(), sampler.draw()

    assert plausible(int((first & second).sum()), RECORDS, 0.09)
    assert plausible(int((first[::2] & first[1::2]).sum()), RECORDS // 2, 0.09)


@pytest.mark.statistical
def test_the_test_itself_rejects_a_fixed_sample() -> None:
    """Negative control: one sample used in two rounds, and a rate off by 2 %, must not pass."""
    sampler = PoissonSampler(RECORDS, 0.3)
    first = sampler.draw()

    assert not plausible(int((first & first).sum()), RECORDS, 0.09)
    assert not plausible(int(first.sum()), RECORDS, 0.306)
