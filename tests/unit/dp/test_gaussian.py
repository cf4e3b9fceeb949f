"""The Gaussian curve, its inverses and its composition."""

import math

import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import (
    composed_multiplier,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)


def test_epsilon_holds_at_its_own_delta() -> None:
    """The upper end of the bisection satisfies the curve itself."""
    for z in (0.1, 0.7, 3.0, 50.0):
        epsilon = gaussian_epsilon(delta=1e-6, noise_multiplier=z)

        assert gaussian_delta(epsilon=epsilon, noise_multiplier=z) <= 1e-6


def test_noise_is_enough_and_hardly_more() -> None:
    """One part in a million less noise would not do."""
    for epsilon in (0.1, 1.0, 8.0, 300.0):
        z = gaussian_noise_multiplier(epsilon=epsilon, delta=1e-5)

        assert gaussian_delta(epsilon=epsilon, noise_multiplier=z) <= 1e-5
        assert gaussian_delta(epsilon=epsilon, noise_multiplier=z * (1 - 1e-6)) > 1e-5


def test_four_releases_cost_as_one_with_half_the_noise() -> None:
    """Mu adds in squares."""
    assert composed_multiplier(4.0, 4.0, 4.0, 4.0) == 2.0
    assert composed_multiplier(3.0) == 3.0


def test_much_noise_needs_no_epsilon() -> None:
    """When total variation is below delta, epsilon is zero, not a small negative number."""
    assert gaussian_epsilon(delta=0.5, noise_multiplier=10.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_an_impossible_multiplier_is_refused(bad: float) -> None:
    """NaN, infinity, zero and negative noise never give a number."""
    with pytest.raises(ConfigError, match="noise_multiplier must be finite and > 0"):
        gaussian_epsilon(delta=1e-5, noise_multiplier=bad)


@pytest.mark.parametrize("bad", [math.nan, 0.0, 1.0, 2.0, -1e-5])
def test_an_impossible_delta_is_refused(bad: float) -> None:
    """Delta lies strictly between 0 and 1."""
    with pytest.raises(ConfigError, match=r"delta must lie in \(0, 1\)"):
        gaussian_epsilon(delta=bad, noise_multiplier=1.0)


def test_noise_too_small_for_float64_is_refused() -> None:
    """An epsilon beyond 1e12 is no guarantee and is not printed as one."""
    with pytest.raises(ConfigError, match="nothing below 1e12"):
        gaussian_epsilon(delta=1e-5, noise_multiplier=1e-9)


def test_composing_nothing_is_refused() -> None:
    """There is no multiplier of no release."""
    with pytest.raises(ConfigError, match="at least one release"):
        composed_multiplier()


def test_composition_reaches_every_size_of_noise() -> None:
    """Squares that would leave float64's range do not."""
    assert composed_multiplier(1e200, 1e200, 1e200, 1e200) == 5e199
    assert composed_multiplier(1e-200, 1e200) == 1e-200


def test_a_curve_beyond_float64_is_still_above_zero() -> None:
    """Where even the logarithm of delta is infinite, the answer is the smallest number there is."""
    assert 0 < gaussian_delta(epsilon=1e200, noise_multiplier=1e100) < 1e-300
