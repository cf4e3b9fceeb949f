"""Which accountant answers, and what it refuses."""

import math
from dataclasses import replace

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.desk.accountants import sampled_gaussian_epsilon
from securevfl.dp.accountant import epsilon_of, pld_epsilon, simplify_releases
from securevfl.dp.events import EntitySampledRelease, GaussianRelease, Neighbouring, SampledRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.renyi import epsilon_of_divergence, rdp_epsilon, renyi_divergence
from securevfl.dp.shift_mixture import checked_epsilon, least_epsilon


def sampled(count: int = 100, **changes: float) -> SampledRelease:
    return SampledRelease(
        **{"sampling_rate": 0.1, "noise_multiplier": 2.0, "count": count, **changes}
    )


def test_gaussians_are_exact_at_any_delta() -> None:
    """Releases without sampling merge into one with a closed form, far below PLD's limit."""
    releases = [GaussianRelease(noise_multiplier=4.0, count=4), sampled(5, sampling_rate=1.0)]

    merged = simplify_releases(releases)

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


def test_small_delta_takes_the_better_accountant_then_is_refused() -> None:
    """Nothing below 1e-8 for sampled releases."""
    assert 0 < epsilon_of([sampled()], delta=5e-8) < rdp_epsilon([sampled()], delta=5e-8)
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


# True epsilons by contour integration (tests/vectors/make_accounting.py), at deltas below 1e-7.
@pytest.mark.parametrize(
    ("q", "z", "count", "parties", "delta", "true"),
    [
        (0.002, 1.0, 10_000, 1, 1e-08, 1.44186793),
        (0.001, 1.0, 1_000_000, 1, 5e-08, 7.47614805),
        (0.0003, 1.0, 100_000, 1, 9e-08, 0.574450454),
        (0.001, 4.0, 1_000_000, 1, 5e-08, 1.23735609),
        (0.002, 2.0, 1_000_000, 1, 5e-08, 5.89575472),
        (0.0003, 0.6, 100_000, 1, 9e-08, 2.97245318),
        (0.001, 2.0, 100_000, 1, 9e-08, 0.783818436),
        (0.002, 2.0, 10_000, 1, 9e-08, 0.487077493),
        (0.0003, 8.0, 1_000_000, 1, 5e-08, 0.165052929),
        (0.002, 1.0, 100_000, 1, 1e-08, 4.76912775),
        (0.0003, 1.0, 100_000, 1, 1.5e-08, 0.620067122),
        (0.002, 1.0, 100_000, 1, 9e-08, 4.41901628),
        (0.003, 8.0, 100_000, 8, 5e-08, 0.552192842),
        (0.003, 8.0, 10_000, 4, 5e-08, 0.164487734),
        (0.0001, 4.0, 1_000_000, 4, 9e-08, 0.104211867),
        (0.0003, 1.0, 1_000_000, 8, 9e-08, 1.44878661),
        (0.001, 4.0, 100_000, 8, 1e-08, 0.385500857),
        (0.001, 4.0, 1_000_000, 8, 2e-08, 1.26063657),
        (0.0003, 8.0, 1_000_000, 4, 9e-08, 0.159698838),
        (0.0003, 1.0, 1_000_000, 2, 1.5e-08, 1.6568754),
        (0.003, 1.0, 10_000, 8, 2e-08, 1.54103495),
        (0.0003, 1.0, 10_000, 4, 1.5e-08, 0.140560783),
        (0.0001, 1.0, 100_000, 8, 1e-08, 0.148519373),
        (0.003, 8.0, 100_000, 2, 9e-08, 0.538741234),
    ],
)
def test_renyi_s_cost_at_small_deltas_is_at_least_the_truth(
    q: float, z: float, count: int, parties: int, delta: float, true: float
) -> None:
    """Far out, the loss is so large that its power and its density are infinity and 0."""
    release = EntitySampledRelease(
        parties=parties, sampling_rate=q, noise_multiplier=z, count=count
    )

    assert true <= rdp_epsilon([release], delta=delta) <= 2 * true


# True epsilons as above, that of 1,000 releases by FFT.
@pytest.mark.parametrize(
    ("q", "z", "count", "parties", "delta", "true"),
    [
        (0.05, 3.0, 1000, 1, 3e-08, 2.91715),
        (0.002, 2.0, 10_000, 1, 9e-08, 0.487077493),
        (0.003, 8.0, 10_000, 4, 5e-08, 0.164487734),
        (0.001, 4.0, 1_000_000, 8, 2e-08, 1.26063657),
    ],
)
def test_plans_at_small_deltas_cost_hardly_more_than_the_truth(
    q: float, z: float, count: int, parties: int, delta: float, true: float
) -> None:
    release = EntitySampledRelease(
        parties=parties, sampling_rate=q, noise_multiplier=z, count=count
    )

    assert true <= epsilon_of([release], delta=delta) <= 1.001 * true


def test_more_releases_than_float64_resolves_are_renyi_s_at_small_deltas() -> None:
    """Where the allowance for rounding would be more than a 20th of delta."""
    many = sampled(2_000_000, sampling_rate=0.001, noise_multiplier=4.0)

    assert epsilon_of([many], delta=1.5e-8) == pytest.approx(rdp_epsilon([many], delta=1.5e-8))
    with pytest.raises(ConfigError, match="use Renyi accounting or a larger delta"):
        pld_epsilon([many], delta=1.5e-8)


@pytest.mark.parametrize("delta", [1e-6, 3e-8])
def test_losses_that_the_library_cannot_invert_are_renyi_s(delta: float) -> None:
    """So much noise at so small a rate: its bisection to 1e-6 never ends in float64."""
    faint = EntitySampledRelease(parties=50, sampling_rate=1e-9, noise_multiplier=1e6, count=1000)

    assert 0 < epsilon_of([faint], delta=delta) <= rdp_epsilon([faint], delta=delta)
    with pytest.raises(ConfigError, match="use Renyi accounting"):
        pld_epsilon([faint], delta=delta)


def test_slow_distributions_are_renyi_s_at_small_deltas() -> None:
    """Losses that reach far and spread little need a grid of millions of points."""
    wide = sampled(2, sampling_rate=1e-6, noise_multiplier=1.0)

    assert epsilon_of([wide], delta=3e-8) == rdp_epsilon([wide], delta=3e-8)


def test_an_epsilon_that_cannot_be_is_refused() -> None:
    """Zero, negative, infinite and no number: none is ever an answer to what one release costs."""
    release = sampled(1_000_000, sampling_rate=0.003, noise_multiplier=4.0)
    alone = least_epsilon(release, delta=5e-8)

    assert 0.004 < alone < pld_epsilon([sampled(1, sampling_rate=0.003)], delta=1e-7)
    for wrong in (0.0, 0.99 * alone, -0.5, float("nan"), -math.inf):
        with pytest.raises(PrivacyError, match="nothing may be released"):
            checked_epsilon(wrong, releases=[release], delta=5e-8)
    with pytest.raises(ConfigError, match="no finite epsilon"):
        checked_epsilon(math.inf, releases=[release], delta=5e-8)
    assert checked_epsilon(alone, releases=[release], delta=5e-8) == alone


def test_zero_is_an_answer_where_it_is_proven() -> None:
    """A unit that is sampled more rarely than delta allows cannot be told at all."""
    rare = sampled(1, sampling_rate=1e-6)

    assert checked_epsilon(-1e-6, releases=[rare], delta=1e-5) == 0.0


@pytest.mark.parametrize("wrong", [float("nan"), -1e-3])
def test_an_impossible_divergence_is_refused(wrong: float) -> None:
    """Divergences are at least zero; comparing with NaN must not let it through."""
    with pytest.raises(PrivacyError, match="impossible"):
        epsilon_of_divergence(divergence=wrong, order=2.0, delta=1e-5)


def test_one_release_costs_at_least_what_its_odds_show() -> None:
    """The floor is the exact curve of one release but for its grid, also for an exchange."""
    exact = sampled_gaussian_epsilon(delta=1e-6, noise_multiplier=2.0, sampling_rate=0.1)
    exchange = replace(sampled(), neighbouring=Neighbouring.REPLACE_ONE)

    for release in (sampled(), exchange):
        assert 0.9 * exact < least_epsilon(release, delta=1e-6) <= exact


def test_more_noise_never_costs_more_beyond_what_grids_can_carry() -> None:
    """Past z = 1e6 noise counts as 1e6, or in full on all records; epsilon does not jump up."""
    costs = [
        epsilon_of([sampled(10**9, sampling_rate=0.5, noise_multiplier=z)], delta=5e-8)
        for z in (0.9e6, 1.1e6, 1.9e6, 2.1e6, 1e8)
    ]

    assert costs == sorted(costs, reverse=True)
    assert costs[-1] > 0


def test_counts_beyond_float64_are_refused() -> None:
    """One line, not an overflow."""
    with pytest.raises(ConfigError, match="count must be below 1e308"):
        sampled(10**400)


def test_a_release_that_is_never_made_costs_nothing() -> None:
    """The floor of no release is zero, of one it is not."""
    release = GaussianRelease(noise_multiplier=1.0, count=1)
    assert least_epsilon(release, delta=1e-5) > 1
    assert least_epsilon(replace(release, count=0), delta=1e-5) == 0
