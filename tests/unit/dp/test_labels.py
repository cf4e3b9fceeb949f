"""Labels that secondaries may see: exact probabilities, ranges, and what is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from helpers.discrete_gaussian import discrete_gaussian_epsilon
from hypothesis import given
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.labels import (
    keep_probability,
    noised_labels,
    randomised_labels,
    slots,
    unbiased_indicators,
)

EPSILONS = st.floats(1e-6, 60.0)
CLASSES = st.integers(2, 1000)


def log_of(ratio: Fraction) -> float:
    return math.log(ratio.numerator) - math.log(ratio.denominator)


@given(EPSILONS, CLASSES)
def test_no_class_is_too_likely(epsilon: float, classes: int) -> None:
    """By the slots themselves: they add up, and the ratio is e^epsilon, never above."""
    kept, other = slots(epsilon, classes)
    assert kept + (classes - 1) * other == 2**63
    assert kept > other > 0
    found = log_of(Fraction(kept, other))
    assert found <= epsilon + 1e-14
    if epsilon < 20:  # beyond that, one slot is a step that can be seen
        assert found >= epsilon * (1 - 1e-5) - 1e-12


def test_an_epsilon_of_whole_odds() -> None:
    """With two classes, ln 3 is 3 to 1."""
    kept, other = slots(math.log(3), 2)
    assert abs(kept - 3 * 2**61) <= 2**10  # of the logarithm's own rounding
    assert Fraction(kept, other) <= Fraction(3) * (1 + Fraction(1, 2**52))
    assert keep_probability(math.log(3), 2) == pytest.approx(0.75, rel=1e-12)


def test_rows_without_a_class_stay_so_and_others_stay_classes() -> None:
    """K is left alone; every other bin becomes a class; the argument is not written to."""
    bins = np.array([0, 1, 2, 3, 3, 0] * 200)
    before = bins.copy()
    drawn = randomised_labels(bins, classes=3, epsilon=0.1)
    assert drawn.dtype == np.int64
    assert (bins == before).all()
    assert ((drawn == 3) == (bins == 3)).all()
    assert set(drawn) == {0, 1, 2, 3}  # misses a class with probability below 1e-100
    assert len(randomised_labels(bins[:0], classes=3, epsilon=1.0)) == 0


@pytest.mark.parametrize("bins", [[-1, 0], [0, 4]])
def test_what_is_no_class_is_refused(bins: list[int]) -> None:
    """Never quietly taken modulo K."""
    with pytest.raises(ConfigError, match="must be classes from 0 to 2, or 3 for none"):
        randomised_labels(np.array(bins), classes=3, epsilon=1.0)


@pytest.mark.parametrize(
    ("epsilon", "classes"), [(0.0, 2), (-1.0, 2), (math.inf, 2), (math.nan, 2), (1.0, 1)]
)
def test_settings_out_of_range_are_refused(epsilon: float, classes: int) -> None:
    """Before anything is drawn."""
    with pytest.raises(ConfigError):
        randomised_labels(np.array([0]), classes=classes, epsilon=epsilon)


@given(st.floats(0.01, 20.0), st.integers(2, 40))
def test_indicators_are_right_on_average(epsilon: float, classes: int) -> None:
    """Weighted by the probabilities of what is drawn, they are the true class's indicator."""
    kept = keep_probability(epsilon, classes)
    chances = np.full(classes, (1 - kept) / (classes - 1))
    chances[0] = kept
    each = unbiased_indicators(np.arange(classes), classes=classes, epsilon=epsilon)
    assert each.sum(axis=1) == pytest.approx(np.ones(classes), abs=1e-6)
    assert chances @ each == pytest.approx(np.eye(classes)[0], abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_noise_on_numbers_keeps_epsilon_by_its_own_sums(epsilon: float) -> None:
    """The range is 2^16 steps, and noise of that multiplier keeps epsilon on them."""
    steps = 2**16
    found = discrete_gaussian_epsilon(
        shift=steps,
        ring_std=gaussian_noise_multiplier(epsilon=epsilon, delta=1e-5) * steps,
        delta=1e-5,
    )
    assert found == pytest.approx(epsilon, rel=1e-6)


def test_numbers_are_cut_to_their_range_and_noise_is_as_wide_as_it_says() -> None:
    """A label far outside is as one at the edge: what is drawn lies around the edge.

    20,000 draws: their mean lies within 6.3 standard errors, and their deviation within 6.3 of its
    own, but for 1e-9.
    """
    noise = gaussian_noise_multiplier(epsilon=4.0, delta=1e-5) * 10.0
    drawn = noised_labels(np.full(20_000, 1e6), lower=-5.0, upper=5.0, epsilon=4.0, delta=1e-5)
    assert abs(drawn.mean() - 5.0) < 6.3 * noise / math.sqrt(20_000)
    assert abs(drawn.std() / noise - 1) < 6.3 / math.sqrt(40_000)
    # Whole steps of the range, so that nothing shows in the last digits of a float.
    steps = (drawn + 5.0) / 10.0 * 2**16
    assert (steps == np.rint(steps)).all()


@pytest.mark.parametrize(("lower", "upper"), [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf)])
def test_a_range_that_is_none_is_refused(lower: float, upper: float) -> None:
    """Its width is what one label can move."""
    with pytest.raises(ConfigError, match="the range must go up"):
        noised_labels(np.zeros(3), lower=lower, upper=upper, epsilon=1.0, delta=1e-5)
