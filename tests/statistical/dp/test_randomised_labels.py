"""Randomised response draws what it says: frequencies of every class."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from securevfl.dp.labels import keep_probability, randomised_labels

pytestmark = pytest.mark.statistical

ROWS = 200_000
FALSE_ALARM = 1e-9


@pytest.mark.parametrize(("epsilon", "classes"), [(math.log(3), 2), (2.0, 10), (0.1, 3)])
def test_each_class_comes_as_often_as_it_should(epsilon: float, classes: int) -> None:
    """Exact binomial tests of every class; together they err with probability 1e-9 at most."""
    true = 1
    drawn = randomised_labels(np.full(ROWS, true), classes=classes, epsilon=epsilon)
    kept = keep_probability(epsilon, classes)
    for number, count in enumerate(np.bincount(drawn, minlength=classes)):
        chance = kept if number == true else (1 - kept) / (classes - 1)
        assert binomtest(int(count), ROWS, chance).pvalue > FALSE_ALARM / classes


def test_every_call_and_every_row_draws_anew() -> None:
    """Two calls agree in as many rows as independent ones do; so do neighbouring rows."""
    bins, kept = np.zeros(ROWS, dtype=np.int64), keep_probability(1.0, 2)
    one, two = (randomised_labels(bins, classes=2, epsilon=1.0) for _ in range(2))
    alike = kept**2 + (1 - kept) ** 2
    assert binomtest(int((one == two).sum()), ROWS, alike).pvalue > FALSE_ALARM / 2
    pairs = one[::2] == one[1::2]
    assert binomtest(int(pairs.sum()), len(pairs), alike).pvalue > FALSE_ALARM / 2
