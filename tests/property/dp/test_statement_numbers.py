"""The plain numbers of the sentence to sign are those of the promise, whatever they are."""

import math
import re

from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.special import ndtr

from securevfl.dp.gaussian import gaussian_delta
from securevfl.dp.statement import WEAK_EPSILON, bounded_statement, odds_in_words

SCALES = {"": 1.0, "million": 1e6, "billion": 1e9, "trillion": 1e12}
epsilons = st.one_of(st.floats(0, 60), st.floats(-9, 6).map(lambda power: 10.0**power))
deltas = st.floats(-300, -1e-3).map(lambda power: 10.0**power)


def log_of(text: str) -> float:
    """Return the logarithm of a number as people read it."""
    if text.startswith("10^"):
        return float(text[3:].replace(",", "")) * math.log(10)
    number, _, name = text.replace(",", "").partition(" ")
    return math.log(float(number)) + math.log(SCALES[name])


def said(epsilon: float, delta: float = 1e-5) -> str:
    return bounded_statement(
        unit="secondary-record",
        encoder="frozen",
        epsilon=epsilon,
        delta=delta,
        parties=2,
        colluding=0,
        links_per_record=1,
    ).text


@given(epsilon=epsilons)
@example(0.0)
@example(2.2977)
@example(13.8155)
@example(34.538776)
@example(709.9)
@example(284_000.0)
def test_odds_are_e_to_the_epsilon(epsilon: float) -> None:
    """To within 6 %, and where powers of ten stand for it never too small."""
    text = odds_in_words(epsilon)
    error = log_of(text) - epsilon

    if text.startswith("10^"):
        assert epsilon > math.log(9e14)
        assert -1e-9 * epsilon <= error <= math.log(10) + 1e-9
    else:
        assert abs(error) <= 0.06
        assert len(text) <= 15
    if 0 < epsilon < 1:
        # A factor near 1 is still seen to differ from it, by half of what it does at least.
        epsilon = max(epsilon, 1e-6)
        assert 0.5 * epsilon <= math.expm1(log_of(text)) <= 2 * math.expm1(epsilon)


@given(epsilon=epsilons, more=st.floats(1, 2))
def test_a_larger_epsilon_never_reads_as_smaller_odds(epsilon: float, more: float) -> None:
    assert log_of(odds_in_words(epsilon * more)) >= log_of(odds_in_words(epsilon)) - 1e-12


@given(epsilon=epsilons, delta=deltas)
@example(8.0, 1e-6)
@example(7.999_999_999, 1e-5)
def test_what_is_shown_is_never_less_than_what_was_spent(epsilon: float, delta: float) -> None:
    """Epsilon is rounded up, by a thousandth at most; delta reads as no rarer than it is."""
    text = said(epsilon, delta)
    ((odds, shown),) = re.findall(r"at most a factor of (.+?) \(epsilon = (.+?)\)", text)
    (times,) = re.findall(r"probability of 1 in (\S+) \(delta", text)
    seen = float(shown.replace(",", ""))

    assert epsilon <= seen * (1 + 1e-15)
    assert seen <= epsilon * 1.001 + 1e-300
    assert odds == odds_in_words(seen)
    assert -math.log(delta) - math.log(10) <= log_of(times) <= -math.log(delta) + 1e-9
    assert ("too weak" in text) == (epsilon > WEAK_EPSILON)


@given(epsilon=st.floats(0.05, 12), z=st.floats(0.3, 20))
def test_odds_themselves_pass_the_factor_more_often_than_delta(epsilon: float, z: float) -> None:
    """Why the text says "can do no better than if": Gaussian noise, worked by hand.

    The loss of a Gaussian release is normal with mean 1/(2 z^2) and deviation 1/z. It is above
    epsilon with more than the probability delta, so "odds change by at most e^epsilon, except with
    probability delta" would be false.
    """
    assume(epsilon * z < 30)  # beyond, float64 has no number for either
    passed = float(ndtr(1 / (2 * z) - epsilon * z))
    delta = gaussian_delta(epsilon=epsilon, noise_multiplier=z)

    assert passed >= delta * (1 - 1e-9)
