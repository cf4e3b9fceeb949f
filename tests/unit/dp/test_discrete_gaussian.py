"""Privacy of noise in ring units."""

import math

import pytest
from helpers.discrete_gaussian import (
    discrete_gaussian_epsilon,
    sum_divergence_log,
    summed_renyi_divergence,
)

from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import gaussian_epsilon


def test_at_the_required_ring_size_a_sum_is_a_discrete_gaussian() -> None:
    """At s = 64, the divergence is below exp(-40000); one party has none at all."""
    assert sum_divergence_log(parties=10, ring_std=64.0) < -40_000
    assert sum_divergence_log(parties=1, ring_std=1.0) == -math.inf


def test_fine_rings_are_as_good_as_the_real_line() -> None:
    """At 64 units the discrete epsilon is the continuous one to five digits."""
    discrete = discrete_gaussian_epsilon(shift=32, ring_std=64.0, delta=1e-5)

    assert discrete == pytest.approx(gaussian_epsilon(delta=1e-5, noise_multiplier=2.0), rel=1e-4)


def test_coarse_noise_costs_more_and_is_counted() -> None:
    """With less than one unit of noise a share, the sum's divergence shows in the Renyi bound."""
    common = {"order": 2.0, "sensitivity": 1.0, "parties": 3, "dimension": 100}
    fine = summed_renyi_divergence(share_std=0.5, granularity=2.0**-16, **common)
    coarse = summed_renyi_divergence(share_std=0.5, granularity=1.0, **common)

    assert fine == pytest.approx(1 / (3 * 0.25), rel=1e-12)
    assert coarse > 10 * fine


def test_much_noise_needs_no_epsilon() -> None:
    """Total variation below delta: epsilon zero."""
    assert discrete_gaussian_epsilon(shift=1, ring_std=1000.0, delta=0.1) == 0.0


def test_what_cannot_be_summed_is_refused() -> None:
    """A table of a billion entries is not made; orders are above 1."""
    with pytest.raises(ConfigError, match="too large to be summed"):
        discrete_gaussian_epsilon(shift=1, ring_std=1e9, delta=1e-5)
    with pytest.raises(ConfigError, match="order must be above 1"):
        summed_renyi_divergence(
            order=1.0, sensitivity=1.0, parties=1, share_std=1.0, granularity=1.0, dimension=1
        )


@pytest.mark.parametrize(("units", "most"), [(64.0, 2e-5), (128.0, 5e-6), (1024.0, 9e-8)])
def test_what_the_ring_costs_is_below_every_digit_that_is_printed(
    units: float, most: float
) -> None:
    """The figures of docs/privacy.md, section 3: on either side, and this close."""
    for delta in (1e-5, 1e-7):
        for z in (0.25, 1.0, 4.0, 64.0):
            shift = int(units / z)
            discrete = discrete_gaussian_epsilon(shift=shift, ring_std=units, delta=delta)
            smooth = gaussian_epsilon(delta=delta, noise_multiplier=units / shift)

            assert discrete == pytest.approx(smooth, rel=most)


@pytest.mark.parametrize("sensitivity", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("dimension", [1, 1000])
def test_a_sum_is_never_better_than_the_gaussian_it_stands_for(
    sensitivity: float, dimension: int
) -> None:
    """Order times half the squared sensitivity over the variance of the sum, or more."""
    divergence = summed_renyi_divergence(
        order=8.0,
        sensitivity=sensitivity,
        parties=4,
        share_std=2.0,
        granularity=2.0**-6,
        dimension=dimension,
    )
    assert divergence >= 8.0 / 2 * sensitivity**2 / (4 * 2.0**2)
