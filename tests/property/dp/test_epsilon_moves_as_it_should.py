"""Epsilon over the whole accepted range: positive, finite, and moved the right way by each setting.

Sampled releases are accounted for by privacy-loss distributions, below delta = 1e-7 by Renyi
divergences where distributions would be slow, and releases without sampling exactly. Each moves as
it should; from distributions to divergences epsilon jumps up by what these are loose.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vectors.make_accounting import log_delta

from securevfl.core.checks import limits_of
from securevfl.dp.accountant import Method, epsilon_of
from securevfl.dp.calibration import noise_multiplier_for
from securevfl.dp.events import EntitySampledRelease, GaussianRelease, Release, SampledRelease
from securevfl.dp.renyi import rdp_epsilon

# Limits are read once, and types of what is read are checked by draws, which strategies may not do.
for kind in (GaussianRelease, SampledRelease, EntitySampledRelease):
    limits_of(kind)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    """Return numbers whose logarithms are spread evenly, so that every magnitude occurs."""
    return st.floats(math.log(low), math.log(high)).map(
        lambda exponent: min(max(math.exp(exponent), low), high)
    )


def whole(low: int, high: int) -> st.SearchStrategy[int]:
    return logarithmic(low, high).map(round)


SMALL_DELTAS = logarithmic(1e-8, 0.999e-7)
MULTIPLIERS = logarithmic(0.01, 1e8)
COUNTS = whole(1, 10**7)
RATES = logarithmic(1e-9, 1.0)
SAMPLED = st.builds(SampledRelease, sampling_rate=RATES, noise_multiplier=MULTIPLIERS, count=COUNTS)
ENTITY = st.builds(
    EntitySampledRelease,
    parties=st.integers(1, 50),
    sampling_rate=RATES,
    noise_multiplier=MULTIPLIERS,
    count=COUNTS,
)
GAUSSIAN = st.builds(GaussianRelease, noise_multiplier=MULTIPLIERS, count=COUNTS)
# What distributions on a grid take in reasonable time.
PRACTICAL = st.builds(
    SampledRelease,
    sampling_rate=logarithmic(1e-4, 0.5),
    noise_multiplier=logarithmic(0.5, 50.0),
    count=whole(1, 10_000),
)


def check_moves(
    release: Release, *, delta: float, more: float, tolerance: float, method: Method = "auto"
) -> None:
    """Move each setting by a factor of ``more``; epsilon must follow, to within a tolerance."""

    def cost(release: Release, delta: float = delta) -> float:
        return epsilon_of([release], delta=delta, method=method)

    epsilon = cost(release)

    assert math.isfinite(epsilon)
    assert epsilon > 0

    def allowed(largest: float) -> float:
        return largest * (1 + tolerance)

    noisier = replace(release, noise_multiplier=release.noise_multiplier * more)
    assert cost(noisier) <= allowed(epsilon)
    oftener = replace(release, count=math.ceil(release.count * more))
    assert epsilon <= allowed(cost(oftener))
    if not isinstance(release, GaussianRelease):
        rate = min(release.sampling_rate * more, 1.0)
        assert epsilon <= allowed(cost(replace(release, sampling_rate=rate)))
    stricter = max(delta / more, min(delta, 1e-8))
    assert epsilon <= allowed(cost(release, stricter))


@pytest.mark.parametrize(
    ("releases", "examples"), [(SAMPLED, 12), (ENTITY, 4)], ids=["sampled", "entity"]
)
def test_small_deltas_move_epsilon_as_they_should(
    releases: st.SearchStrategy[Release], examples: int
) -> None:
    """Any sampled release, by Renyi divergences; the search for an order errs by less than 1e-6."""

    @given(release=releases, delta=SMALL_DELTAS, more=logarithmic(1.0001, 10.0))
    @settings(deadline=None, max_examples=examples, derandomize=True, database=None)
    def check(release: Release, delta: float, more: float) -> None:
        check_moves(release, delta=delta, more=more, tolerance=1e-6, method="rdp")

    check()


@pytest.mark.parametrize(
    ("rate", "more"), [(5.844176013046653e-09, 1.0001), (1.522997974471263e-08, 1.6487212707001282)]
)
def test_the_best_order_is_found_where_epsilon_leaps_behind_it(rate: float, more: float) -> None:
    """At tiny rates epsilon falls with the order up to a leap: an order that is off costs alike."""
    release = EntitySampledRelease(
        parties=2, sampling_rate=rate, noise_multiplier=6.2928110481082316, count=20
    )
    delta = 1.522997974471263e-08
    check_moves(release, delta=delta, more=more, tolerance=1e-6, method="rdp")


@pytest.mark.parametrize(
    ("releases", "examples"), [(SAMPLED, 12), (ENTITY, 4)], ids=["sampled", "entity"]
)
def test_any_sampled_release_has_an_epsilon_that_divergences_hardly_better(
    releases: st.SearchStrategy[Release], examples: int
) -> None:
    """Whatever is accepted is accounted for; what is finer than the grid adds up to 1e-5."""

    @given(release=releases, delta=SMALL_DELTAS)
    @settings(deadline=None, max_examples=examples, derandomize=True, database=None)
    def check(release: Release, delta: float) -> None:
        largest = rdp_epsilon([release], delta=delta)
        assert 0 <= epsilon_of([release], delta=delta) <= largest * 1.002 + 1e-5

    check()


@given(release=GAUSSIAN, delta=logarithmic(1e-12, 0.1), more=logarithmic(1.0001, 10.0))
@settings(deadline=None, max_examples=100, derandomize=True, database=None)
def test_exact_curves_move_as_they_should(
    release: GaussianRelease, delta: float, more: float
) -> None:
    """Gaussians: epsilon is zero only where total variation is at most delta."""
    variation = math.erf(math.sqrt(release.count / 8) / release.noise_multiplier)
    if variation > delta * (1 + 1e-9):
        check_moves(release, delta=delta, more=more, tolerance=1e-9)
    else:
        assert epsilon_of([release], delta=delta) <= 1e-9


@given(release=PRACTICAL, delta=logarithmic(1e-8, 1e-4), more=st.floats(1.1, 3.0))
@settings(deadline=None, max_examples=4, derandomize=True, database=None)
def test_distributions_move_as_they_should(
    release: SampledRelease, delta: float, more: float
) -> None:
    """By privacy-loss distributions, whose grid moves epsilon by up to 0.1 % on the safe side."""
    if release.sampling_rate > 2 * delta and epsilon_of([release], delta=delta) > 0.01:
        check_moves(release, delta=delta, more=more, tolerance=2e-3)


@pytest.mark.parametrize(
    ("q", "count", "parties", "target", "delta"),
    [
        (0.003, 10_000, 1, 0.1, 5e-8),
        (0.001, 100_000, 1, 0.2, 5e-8),
        (0.01, 5_000, 2, 1.0, 2e-8),
        (0.003, 30_000, 5, 1.0, 1e-6),
    ],
)
def test_calibrated_noise_is_enough_by_a_contour_integral(
    q: float, count: int, parties: int, target: float, delta: float
) -> None:
    """The true delta at the target, by an integral that shares no code, is at most what was asked.

    And not by far where distributions are used; Renyi accounting is loose.
    """

    def releases(z: float) -> list[Release]:
        return [
            EntitySampledRelease(parties=parties, sampling_rate=q, noise_multiplier=z, count=count)
        ]

    z = noise_multiplier_for(releases, epsilon=target, delta=delta)

    phases = [(q, z, count, parties)]
    reached = max(log_delta(target, phases, direction) for direction in ("remove", "add"))
    assert reached <= math.log(delta) + 1e-6
    if delta >= 1e-7:
        assert reached >= math.log(delta) - 0.1
