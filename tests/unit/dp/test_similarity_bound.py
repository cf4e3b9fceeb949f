"""FedSim's tau, its inverse, and the paper's misprint."""

import math

import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp.sensitivity import (
    reachable_floor,
    recovery_bound,
    similarity_epsilon,
    similarity_noise_std,
)

SCALE = 21178.86


def test_the_papers_example_and_its_misprint() -> None:
    """5.0720e-5 at sigma 0.4; the 1.94e-5 that a later version prints belongs to 4.0."""
    assert recovery_bound(noise_std=0.4, key_scale=SCALE) == pytest.approx(5.0720e-5, rel=1e-4)
    assert recovery_bound(noise_std=4.0, key_scale=SCALE) == pytest.approx(1.94e-5, rel=2e-3)


def test_the_inverse_inverts() -> None:
    """From noise to bound and back."""
    for sigma in (0.05, 0.4, 4.0, 200.0):
        bound = recovery_bound(noise_std=sigma, key_scale=SCALE)

        assert similarity_noise_std(bound=bound, key_scale=SCALE) == pytest.approx(sigma, rel=1e-8)


@pytest.mark.parametrize("bound", [1e-5, 0.0, 1.0, -0.1, math.nan])
def test_an_unreachable_bound_is_refused(bound: float) -> None:
    """The published code crashes here; the floor is named instead."""
    with pytest.raises(ConfigError, match="bound must"):
        similarity_noise_std(bound=bound, key_scale=SCALE)


def test_the_floor_itself_is_out_of_reach() -> None:
    """Unlimited noise only tends to it."""
    floor = reachable_floor(key_scale=2.0)

    with pytest.raises(ConfigError, match="must be above"):
        similarity_noise_std(bound=floor, key_scale=2.0)
    assert recovery_bound(noise_std=1e6, key_scale=2.0) == pytest.approx(floor, rel=1e-9)


def test_as_differential_privacy_the_noise_is_next_to_nothing() -> None:
    """The paper's house example: 2.96e9 at sigma 0.4; Delta written out once more."""
    rows, mean, sigma = 14_105, -46237.78, 0.4
    epsilon = similarity_epsilon(noise_std=sigma, key_scale=SCALE, key_mean=mean, rows=rows)
    delta = rows * max(abs(1 + mean), abs(-1 + mean)) / SCALE
    assert epsilon == pytest.approx(delta**2 / (2 * sigma**2))
    assert epsilon == pytest.approx(2.96e9, rel=2e-3)
    with pytest.raises(ConfigError, match="mean_distance"):
        similarity_epsilon(noise_std=sigma, key_scale=SCALE, key_mean=1.0, rows=rows)
