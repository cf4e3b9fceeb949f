"""Poisson samples, list lengths, and how links of a sample are made."""

import numpy as np
import pytest
from helpers.linking import round_linker
from scipy.stats import binom

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.sampling import PoissonSampler, list_length

RNG = np.random.default_rng(5)
ROWS = RNG.random((40, 2))
RECORDS = RNG.random((300, 2))


def test_rate_1_takes_every_record() -> None:
    """Q = 1 is no sampling at all."""
    assert PoissonSampler(1000, 1.0).draw().all()


def test_samples_are_fresh_and_not_repeatable() -> None:
    """Two rounds differ, and so do two samplers; a wrong answer has probability 2^-1000."""
    one, other = PoissonSampler(1000, 0.5), PoissonSampler(1000, 0.5)
    first, second = one.draw(), one.draw()

    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other.draw())


def test_an_insecure_seed_repeats() -> None:
    """Seeded samplers agree round by round, and rounds still differ."""
    one, same = (PoissonSampler(1000, 0.5, insecure_seed=3) for _ in range(2))
    first, second = one.draw(), one.draw()

    assert np.array_equal(first, same.draw())
    assert np.array_equal(second, same.draw())
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_rates_outside_their_range_are_refused(rate: float) -> None:
    """Q lies in (0, 1]."""
    with pytest.raises(ConfigError, match=r"sampling_rate must lie in \(0, 1\]"):
        PoissonSampler(10, rate)
    with pytest.raises(ConfigError, match=r"sampling_rate must lie in \(0, 1\]"):
        round_linker(ROWS, RECORDS, 5, rate=rate)


@pytest.mark.parametrize(("k", "rate"), [(1, 0.5), (50, 0.5), (50, 0.1), (20, 0.9), (5, 1.0)])
def test_a_list_is_as_short_as_survival_allows(k: int, rate: float) -> None:
    """K records survive with probability 0.999, and one record fewer would be too few."""
    length = list_length(k, rate=rate, records=10**6)

    assert binom.sf(k - 1, length, rate) >= 0.999
    assert binom.sf(k - 1, length - 1, rate) < 0.999


def test_no_list_is_longer_than_the_table() -> None:
    """A table of 60 records is ranked whole."""
    assert list_length(50, rate=0.1, records=60) == 60


def test_the_method_follows_rate_and_cap() -> None:
    """Low rates search anew, high ones filter a list, a cap needs its pairs."""
    assert round_linker(ROWS, RECORDS, 5, rate=0.1).method == "rebuild"
    assert round_linker(ROWS, RECORDS, 5, rate=0.5).method == "list"
    assert round_linker(ROWS, RECORDS, 5, rate=0.5, cap=3).method == "pairs"


def test_k_beyond_the_table_is_refused() -> None:
    """Before any round, whatever the method."""
    with pytest.raises(DataError, match=r"K = 301 links .* only 300 records"):
        round_linker(ROWS, RECORDS, 301, rate=0.1)


def test_samplers_show_no_sample() -> None:
    """The sample is a secret of the secondary."""
    assert repr(PoissonSampler(10, 0.5)) == "PoissonSampler(10 records)"
