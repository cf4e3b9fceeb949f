"""Which accountant answers, and what it refuses."""

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from securevfl.core.errors import ConfigError
from securevfl.dp.accountant import epsilon_of, pld_epsilon, simplified
from securevfl.dp.events import (
    EntitySampledRelease,
    GaussianRelease,
    Neighbouring,
    SampledRelease,
)
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.rdp import rdp_epsilon, renyi_divergence


def sampled(count: int = 100, **changes: float) -> SampledRelease:
    return SampledRelease(
        **{"sampling_rate": 0.1, "noise_multiplier": 2.0, "count": count, **changes}
    )


def test_gaussians_are_exact_at_any_delta() -> None:
    """Releases without sampling merge into one with a closed form, far below PLD's limit."""
    releases = [GaussianRelease(noise_multiplier=4.0, count=4), sampled(5, sampling_rate=1.0)]

    merged = simplified(releases)

    assert len(merged) == 1
    z = merged[0].noise_multiplier
    assert z == pytest.approx((4 / 16 + 5 / 4) ** -0.5, rel=1e-12)
    assert epsilon_of(releases, delta=1e-30) == gaussian_epsilon(delta=1e-30, noise_multiplier=z)


def test_nothing_released_costs_nothing() -> None:
    """A plan of zero rounds has epsilon zero by every method."""
    for method in ("auto", "pld", "rdp"):
        assert epsilon_of([sampled(0)], delta=1e-5, method=method) == 0.0


def test_renyi_is_above_the_exact_figure_and_close() -> None:
    """Two accountants that share no code agree in order."""
    exact = pld_epsilon([sampled()], delta=1e-5)
    renyi = rdp_epsilon([sampled()], delta=1e-5)

    assert exact < renyi < 1.15 * exact


def test_small_delta_goes_to_renyi_then_is_refused() -> None:
    """PLD from 1e-7 up, Renyi from 1e-8 up, nothing below for sampled releases."""
    assert epsilon_of([sampled()], delta=5e-8) == rdp_epsilon([sampled()], delta=5e-8)
    with pytest.raises(ConfigError, match="too small for sampled releases"):
        epsilon_of([sampled()], delta=5e-9)
    with pytest.raises(ConfigError, match="too small for sampled releases"):
        epsilon_of([sampled()], delta=1e-12, method="pld")


def test_float64_limits_are_refused_not_hidden() -> None:
    """A million rounds at delta 1e-9 cannot be told from rounding."""
    with pytest.raises(ConfigError, match="use Renyi accounting or a larger delta"):
        pld_epsilon([sampled(1_000_000)], delta=1e-9)


def test_more_rounds_noise_and_sampling_cost_what_they_should() -> None:
    """Epsilon rises with rounds and rate, and falls with noise."""
    base = pld_epsilon([sampled()], delta=1e-5)

    assert pld_epsilon([sampled(101)], delta=1e-5) > base
    assert pld_epsilon([sampled(sampling_rate=0.11)], delta=1e-5) > base
    assert pld_epsilon([sampled(noise_multiplier=2.1)], delta=1e-5) < base


def test_independent_sampling_costs_less_than_drawing_the_entity_everywhere() -> None:
    """The binomial mixture lies between one party's curve at z k and the full change at rate q."""
    mixture = EntitySampledRelease(parties=4, sampling_rate=0.1, noise_multiplier=2.0, count=100)

    assert pld_epsilon([mixture], delta=1e-5) < pld_epsilon([sampled()], delta=1e-5)
    one = EntitySampledRelease(parties=1, sampling_rate=0.1, noise_multiplier=2.0, count=100)
    assert pld_epsilon([one], delta=1e-5) == pytest.approx(
        pld_epsilon([sampled()], delta=1e-5), rel=1e-3
    )


def test_exchange_costs_at_least_as_much_as_removal() -> None:
    """The library's trap: under replace-one the shift doubles."""
    exchanged = SampledRelease(
        sampling_rate=0.1,
        noise_multiplier=2.0,
        count=100,
        neighbouring=Neighbouring.REPLACE_ONE,
    )

    assert pld_epsilon([exchanged], delta=1e-5) > 1.2 * pld_epsilon([sampled()], delta=1e-5)
    with pytest.raises(ConfigError, match="replace-one"):
        rdp_epsilon([exchanged], delta=1e-5)


def test_next_to_no_noise_has_a_large_finite_epsilon() -> None:
    """Below z = 0.02 sampling is forgotten: above the truth, and not an error of integration."""
    epsilon = epsilon_of([sampled(1, noise_multiplier=0.01)], delta=1e-5)

    assert epsilon == gaussian_epsilon(delta=1e-5, noise_multiplier=0.01)


@pytest.mark.parametrize(("q", "z"), [(0.01, 0.7), (0.1, 2.0), (0.45, 5.0), (0.001, 4.0)])
def test_renyi_agrees_with_the_library_at_whole_orders(q: float, z: float) -> None:
    """Two computations that share no code: our integral, dp-accounting's finite sum."""
    orders = [2, 3, 8, 32]
    library = RdpAccountant(orders)
    library.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)), 7)

    for order, theirs in zip(orders, library.rdp, strict=True):
        ours = renyi_divergence(sampled(7, sampling_rate=q, noise_multiplier=z), order=order)
        assert ours == pytest.approx(theirs, rel=1e-7)


def test_renyi_has_no_gap_at_large_rates_and_broken_orders() -> None:
    """Where the library's series diverges, the integral lies between the whole orders around it."""
    at = [
        renyi_divergence(sampled(1, sampling_rate=0.7, noise_multiplier=2.0), order=order)
        for order in (2.0, 2.5, 3.0)
    ]

    assert at[0] < at[1] < at[2]


@pytest.mark.parametrize("order", [1.0, 0.5, float("nan"), float("inf")])
def test_an_impossible_order_is_refused(order: float) -> None:
    """Renyi orders are above 1 and finite."""
    with pytest.raises(ConfigError, match="order must be"):
        renyi_divergence(sampled(), order=order)
