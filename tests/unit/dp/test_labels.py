"""Labels that secondaries may see: exact probabilities, ranges, and what is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError
from securevfl.dp.labels import keep_probability, randomised_labels, slots

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
