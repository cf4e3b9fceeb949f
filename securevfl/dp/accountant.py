"""Privacy accountant: epsilon of a list of releases, and the noise for a target epsilon.

Three parts:

- Privacy-loss distributions (PLD). They are dp-accounting's, rounded up ("connect the dots");
  added here are the choice of the grid, the allowance for float64 and the refusals. Gaussian
  releases without sampling have an exact curve (:mod:`securevfl.dp.gaussian`).
- Renyi divergences (RDP), for delta from 1e-8 to 1e-7 where distributions are beyond float64 or
  slow, and wherever the library fails to invert a loss.
- Calibration: the inverse of both.

Epsilon is in nats. Every figure is an upper bound.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError, of_an_extra
from securevfl.dp import events
from securevfl.dp.gaussian import (
    SMALLEST_SAMPLED_MULTIPLIER,
    checked_epsilon,
    composed_multiplier,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    shift_mixture,
)

Method = Literal["auto", "pld", "rdp"]

# Below it RDP takes over where PLD is beyond float64 or slow (:func:`_is_practical`); below the
# second nothing is given (docs/privacy.md, section 3). Gaussians without sampling have a closed
# form and no such limit.
SMALLEST_PLD_DELTA: Final = 1e-7
SMALLEST_SAMPLED_DELTA: Final = 1e-8
# The smallest delta that pld_epsilon itself accepts, with its allowance for float64.
_SMALLEST_DELTA: Final = 1e-11
# Rounding privacy losses to a grid of step h adds about h^2/6 to the variance of each, and half of
# that to epsilon: with h a 40th of a loss's standard deviation, 5e-5 of epsilon; with a 10th, 8e-4.
# The fine grid is used while it is small.
_FINE_POINTS_PER_STD: Final = 40
_COARSE_POINTS_PER_STD: Final = 10
_COMFORTABLE_SINGLE: Final = 60_000
_COMFORTABLE_COMPOSED: Final = 400_000
_SMALLEST_STEP: Final = 1e-7
_LARGEST_STEP: Final = 1e-2
_LARGEST_GRID: Final = 4_000_000
# A larger multiplier counts as this one, since its losses are too small for the library's grid, or
# as one without sampling where that is the better bound. Both are upper bounds.
_LARGEST_SAMPLED_MULTIPLIER: Final = 1e6
# The library drops at most this much tail mass, on the pessimistic side.
_TAIL_MASS: Final = 1e-15
_FIRST_POWER: Final = 16
_SMALL_GRID: Final = 2000
# Raising n Fourier coefficients to the power T multiplies their rounding by T.
_FLOAT_ERROR: Final = 4e-16
_LARGEST_ALLOWANCE: Final = 0.05
# The composed distribution spans this many of its standard deviations, and half its variance.
_SPAN: Final = 20.0


def epsilon_of(
    releases: Sequence[events.Release], *, delta: float, method: Method = "auto"
) -> float:
    """Return an upper bound on epsilon, at ``delta``, of all ``releases`` together.

    Args:
        releases: What is released; order is immaterial.
        delta: Failure probability of the whole, in (0, 1).
        method: ``auto`` takes the exact curve where only Gaussians without sampling are released,
            else privacy-loss distributions; Renyi divergences below 1e-7 where distributions are
            beyond float64 or slow, and wherever the library cannot compute them.

    Raises:
        ConfigError: If ``delta`` is out of range, or too small for the method.
        PrivacyError: If what was computed cannot be true
        (:func:`securevfl.dp.gaussian.checked_epsilon`).
    """
    checks.open_unit(delta=delta)
    checks.one_of(("auto", "pld", "rdp"), method=method)
    left = simplify_releases(releases)
    if not left:
        return 0.0
    if method == "rdp":
        return rdp_epsilon(left, delta=delta)
    if len(left) == 1 and isinstance(left[0], events.GaussianRelease) and left[0].count == 1:
        return gaussian_epsilon(delta=delta, noise_multiplier=left[0].noise_multiplier)
    if delta < SMALLEST_SAMPLED_DELTA:
        raise ConfigError(
            f"delta = {delta!r} is too small for sampled releases, whose accounting is reliable "
            f"from {SMALLEST_SAMPLED_DELTA} up; raise delta, or set the sampling rate to 1"
        )
    if method == "pld":
        return pld_epsilon(left, delta=delta)
    if delta < SMALLEST_PLD_DELTA and not _is_practical(left, delta):
        return _by_divergences(left, delta)
    try:
        return _pld_epsilon(left, delta)
    except RecursionError:
        return _by_divergences(left, delta)


def simplify_releases(releases: Sequence[events.Release]) -> tuple[events.Release, ...]:
    """Drop what releases nothing, and merge all Gaussian releases without sampling into one."""
    gaussian: list[float] = []
    sampled: list[events.Release] = []
    for release in releases:
        if release.count == 0:
            continue
        plain = _as_plain(release)
        if isinstance(plain, events.GaussianRelease):
            gaussian.append(plain.noise_multiplier / math.sqrt(plain.count))
        else:
            sampled.append(plain)
    merged: list[events.Release] = []
    if gaussian:
        merged.append(events.GaussianRelease(noise_multiplier=composed_multiplier(*gaussian)))
    return (*merged, *sampled)


def _as_plain(release: events.Release) -> events.Release:
    """Return a release that costs no less, and whose cost can be computed."""
    if isinstance(release, events.GaussianRelease):
        return release
    z, rate = release.noise_multiplier, release.sampling_rate
    if rate < 1 and z >= SMALLEST_SAMPLED_MULTIPLIER:
        if z <= _LARGEST_SAMPLED_MULTIPLIER:
            return release
        # Many sampled releases act as one Gaussian with 1/z times the rate: take the better bound.
        if z * rate < _LARGEST_SAMPLED_MULTIPLIER:
            return replace(release, noise_multiplier=_LARGEST_SAMPLED_MULTIPLIER)
    if (
        isinstance(release, events.SampledRelease)
        and release.neighbouring is events.Neighbouring.REPLACE_ONE
    ):
        # One record's contribution leaves and another's enters: twice the shift.
        z /= 2
    return events.GaussianRelease(noise_multiplier=z, count=release.count)


@lru_cache(maxsize=256)
def _by_divergences(releases: tuple[events.Release, ...], delta: float) -> float:
    epsilon = rdp_epsilon(releases, delta=delta)
    # Sampling never costs; without it the curve is exact, which Renyi accounting is not.
    all_records = composed_multiplier(
        *(release.noise_multiplier / math.sqrt(release.count) for release in releases)
    )
    try:
        return min(epsilon, gaussian_epsilon(delta=delta, noise_multiplier=all_records))
    except ConfigError:  # beyond 1e12
        return epsilon


def pld_epsilon(releases: Sequence[events.Release], *, delta: float) -> float:
    """Return epsilon at ``delta`` by composing privacy-loss distributions, rounded up.

    References:
        [DGKKM22] "Connect the dots" (arXiv:2207.04380v1), through dp-accounting 0.6.

    Raises:
        ConfigError: If ``delta`` is below what float64 can resolve for so many releases, or if the
            noise is so small that no epsilon is finite, or if the library cannot invert a loss.
        PrivacyError: If what was computed cannot be true
        (:func:`securevfl.dp.gaussian.checked_epsilon`).
    """
    checks.open_unit(delta=delta)
    try:
        return _pld_epsilon(simplify_releases(releases), delta)
    except RecursionError:
        # It halves an interval to 1e-6, which float64 does not reach beyond 4e9.
        raise ConfigError(
            "so much noise at so small a sampling rate is beyond privacy-loss distributions in "
            "float64; use Renyi accounting"
        ) from None


@lru_cache(maxsize=256)
def _pld_epsilon(releases: tuple[events.Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    allowance = _allowance(releases)
    if delta < _SMALLEST_DELTA or allowance > _LARGEST_ALLOWANCE * delta:
        rounds = sum(release.count for release in releases)
        raise ConfigError(
            f"delta = {delta!r} is too small for privacy-loss distributions over {rounds} "
            f"releases in float64; use Renyi accounting or a larger delta"
        )
    step = _grid_step(releases)
    total: Any = None
    for release in releases:
        points = shift_mixture(_as_removal(release)).loss_range() / step
        composed = _self_compose(_single(release, step), release.count, points=points)
        total = composed if total is None else total.compose(composed, _TAIL_MASS)
    epsilon = float(total.get_epsilon_for_delta(delta - allowance))
    return checked_epsilon(epsilon, releases=releases, delta=delta)


def _is_practical(releases: Sequence[events.Release], delta: float) -> bool:
    """Return whether float64 resolves the distributions and their grids are of comfortable size."""
    if _allowance(releases) > _LARGEST_ALLOWANCE * delta:
        return False
    if min(release.noise_multiplier for release in releases) < SMALLEST_SAMPLED_MULTIPLIER:
        return False
    widest, span = _extent(releases)
    return max(widest, span) <= _COMFORTABLE_COMPOSED * _grid_step(releases)


def _allowance(releases: Sequence[events.Release]) -> float:
    """Return by how much float64 and tails that are cut can put delta off."""
    rounding = _FLOAT_ERROR * sum(release.count + 2 for release in releases)
    return rounding + 4 * _TAIL_MASS * len(releases)


def _single(release: events.Release, step: float) -> Any:
    # A second of every process's start, which only sampled releases need.
    privacy_loss_distribution = of_an_extra(
        "dp_accounting.pld.privacy_loss_distribution", use="accounting of sampled releases"
    )
    if isinstance(release, events.EntitySampledRelease):
        mixture = shift_mixture(release)
        # The library's Gaussian tails are cut where the mixture's weights vanish too.
        kept = [
            (shift, math.exp(weight))
            for shift, weight in zip(mixture.shifts, mixture.log_weights, strict=True)
        ]
        return privacy_loss_distribution.from_mixture_gaussian_mechanism(
            release.noise_multiplier,
            sensitivities=[shift for shift, _ in kept],
            sampling_probs=[weight for _, weight in kept],
            value_discretization_interval=step,
        )
    relation = privacy_loss_distribution.NeighborRel.ADD_OR_REMOVE_ONE
    rate = 1.0
    if isinstance(release, events.SampledRelease):
        rate = release.sampling_rate
        if release.neighbouring is events.Neighbouring.REPLACE_ONE:
            relation = privacy_loss_distribution.NeighborRel.REPLACE_ONE
    return privacy_loss_distribution.from_gaussian_mechanism(
        release.noise_multiplier,
        sampling_prob=rate,
        value_discretization_interval=step,
        neighboring_relation=relation,
    )


def _self_compose(single: Any, count: int, *, points: float) -> Any:
    """Compose a distribution of about ``points`` grid points with itself.

    For small grids the library computes ``size ** count`` as an exact integer, which takes seconds
    for a million rounds; a first power of 16 makes the distribution large enough to skip that.
    """
    if points > _SMALL_GRID or count <= _FIRST_POWER**2:
        return single.self_compose(count, _TAIL_MASS)
    blocks, rest = divmod(count, _FIRST_POWER)
    # Tails cut now count once a block.
    total = single.self_compose(_FIRST_POWER, _TAIL_MASS / blocks)
    total = total.self_compose(blocks, _TAIL_MASS)
    if rest:
        total = total.compose(single.self_compose(rest, _TAIL_MASS), _TAIL_MASS)
    return total


def _grid_step(releases: Sequence[events.Release]) -> float:
    """Return a step fine enough for every release, and coarse enough for time and memory."""
    stds = [shift_mixture(_as_removal(release)).loss_std() for release in releases]
    widest, span = _extent(releases)
    comfortable = max(widest / _COMFORTABLE_SINGLE, span / _COMFORTABLE_COMPOSED)
    finest = min(stds) / _FINE_POINTS_PER_STD
    step = max(finest, min(comfortable, min(stds) / _COARSE_POINTS_PER_STD))
    step = min(max(step, _SMALLEST_STEP), _LARGEST_STEP)
    return max(step, span / _LARGEST_GRID)


def _extent(releases: Sequence[events.Release]) -> tuple[float, float]:
    """Return the range of the widest release's losses, and the span of all losses' sum, in nats."""
    pairs = [shift_mixture(_as_removal(release)) for release in releases]
    variance = math.fsum(
        release.count * pair.loss_std() ** 2 for release, pair in zip(releases, pairs, strict=True)
    )
    widest = max(pair.loss_range() for pair in pairs)
    return widest, _SPAN * math.sqrt(variance) + variance


def _as_removal(release: events.Release) -> events.Release:
    """Return a release whose loss spreads no more than an exchange's, for choosing a grid."""
    if isinstance(release, events.SampledRelease):
        return replace(release, neighbouring=events.Neighbouring.ADD_REMOVE)
    return release


# Renyi differential privacy (RDP), and its conversion to (epsilon, delta).
#
# The divergences are integrated here (securevfl.dp.gaussian.ShiftMixture.log_moment).
# dp_accounting.rdp.RdpAccountant does not replace that, measured at delta 1e-8 to 1e-7: it has no
# event for an entity that every party samples independently (bounding one by k independent samples
# costs up to 3 % of epsilon); with its default orders one release at q = 0.1, z = 5 costs 38 % more
# epsilon; with orders up to 1e5 most plans are within 0.1 %, at two seconds an evaluation instead
# of 0.02; and its fractional orders diverge for q >= 0.5.

_SMALLEST_ORDER: Final = 1 + 1e-6
_LARGEST_ORDER: Final = 1e5
_COARSE_ORDERS: Final = 40
# From this order over z on, the bound without sampling is as good.
_LARGEST_REACH: Final = 4e3


def renyi_divergence(release: events.Release, *, order: float) -> float:
    """Return the Renyi divergence of ``order`` of all ``release.count`` releases, rounded up.

    References:
        [MTZ19] Theorems 4 and 5 (arXiv:1908.10530v1): for the sampled Gaussian, the divergence of
        the release with the record from the one without it is the larger of the two directions.
        For an entity, whose shift is binomial, both are integrated and the larger one is taken.
        Without sampling: [Mir17] Corollary 3 (arXiv:1702.07476v3), ``order / (2 z^2)``.

    Raises:
        ConfigError: If ``order`` is not above 1 and finite, or for replace-one sampling.
        PrivacyError: If the divergence is not a number, or below zero.
    """
    checks.positive(order=order)
    if not order > 1:
        raise ConfigError(f"order must be above 1, got {order!r}")
    z = release.noise_multiplier
    unsampled = order / z / z / 2
    replaces = (
        isinstance(release, events.SampledRelease)
        and release.neighbouring is events.Neighbouring.REPLACE_ONE
    )
    if replaces:
        raise ConfigError("replace-one sampling: use the PLD accountant")
    if release.count == 0:
        return 0.0
    if isinstance(release, events.GaussianRelease) or release.sampling_rate == 1:
        return release.count * unsampled
    if z < SMALLEST_SAMPLED_MULTIPLIER or order / z > _LARGEST_REACH:
        return release.count * unsampled
    mixture = shift_mixture(release)
    log_moment = mixture.log_moment(order)
    if isinstance(release, events.EntitySampledRelease) and release.parties > 1:
        log_moment = max(log_moment, mixture.log_moment(1 - order))
    if log_moment < 0:
        raise PrivacyError(
            f"the moment of order {order!r} of {release} came out below one, which is impossible"
        )
    return release.count * min(log_moment / (order - 1), unsampled)


def epsilon_of_divergence(*, divergence: float, order: float, delta: float) -> float:
    """Convert a Renyi divergence of one order to epsilon at ``delta``.

    References:
        [CKS20] Proposition 12 (arXiv:2004.00010v5):
        ``epsilon = D + log((a-1)/a) - (log delta + log a)/(a-1)``.

    Raises:
        PrivacyError: If ``divergence`` is negative or not a number.
    """
    if not divergence >= 0:
        raise PrivacyError(f"a divergence of {divergence!r} (order {order!r}) is impossible")
    return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def rdp_epsilon(releases: Sequence[events.Release], *, delta: float) -> float:
    """Return an epsilon for all ``releases`` together at ``delta``, through Renyi divergences.

    Returns:
        The best over real orders between 1 and 1e5; an upper bound at whichever order was found.

    Raises:
        ConfigError: If ``delta`` is outside (0, 1), for replace-one sampling, or if the noise is
            so small that no epsilon is finite.
        PrivacyError: If what was computed cannot be true.
    """
    checks.open_unit(delta=delta)
    if not any(release.count for release in releases):
        return 0.0

    def divergence_at(order: float) -> float:
        return math.fsum(renyi_divergence(release, order=order) for release in releases)

    def epsilon_at(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        divergence = divergence_at(order)
        return epsilon_of_divergence(divergence=divergence, order=order, delta=delta)

    edges = np.linspace(math.log(_SMALLEST_ORDER - 1), math.log(_LARGEST_ORDER - 1), _COARSE_ORDERS)
    best, least = 0, math.inf
    for index, edge in enumerate(edges):
        order = 1 + math.exp(float(edge))
        divergence = divergence_at(order)
        epsilon = epsilon_of_divergence(divergence=divergence, order=order, delta=delta)
        if epsilon < least:
            best, least = index, epsilon
        # Divergences rise with the order, and what is added to them is at least log(1 - delta).
        if divergence + math.log1p(-delta) > least:
            break
    low, high = edges[max(best - 1, 0)], edges[min(best + 1, len(edges) - 1)]
    from scipy.optimize import minimize_scalar  # slow to import, and most runs never come here

    minimum = minimize_scalar(
        epsilon_at, bounds=(float(low), float(high)), method="bounded", options={"xatol": 1e-4}
    )
    return checked_epsilon(min(float(minimum.fun), least), releases=releases, delta=delta)


# Calibration: from a target epsilon to the smallest sufficient noise, rounded to more noise.

# The answer exceeds the smallest sufficient noise by at most this fraction, in addition to the
# accountant's own rounding.
_TOLERANCE: Final = 2e-4
_LARGEST_MULTIPLIER: Final = 1e9
_SMALLEST_MULTIPLIER: Final = 1e-6
_MAX_STEPS: Final = 60
_FIRST_WIDENING: Final = 1.02


def noise_multiplier_for(
    releases_at: Callable[[float], Sequence[events.Release]],
    *,
    epsilon: float,
    delta: float,
    method: Method = "auto",
) -> float:
    """Return a noise multiplier at which a plan of releases costs at most ``epsilon``.

    Args:
        releases_at: Returns the plan's releases at a noise multiplier; more noise must not cost
            more.
        epsilon: Target, in nats, > 0.
        delta: Target, in (0, 1).
        method: As in :func:`epsilon_of`.

    Returns:
        A value that the accountant has accepted, at most 0.02 % above the smallest such value.

    Raises:
        ConfigError: If a target is out of range, or no multiplier below 1e9 is enough.
        PrivacyError: If a cost cannot be true.
    """
    checks.positive(epsilon=epsilon)
    checks.open_unit(delta=delta)
    if all(release.count == 0 for release in releases_at(1.0)):
        raise ConfigError("the plan releases nothing: any noise is enough")
    if method == "auto" or method == "pld":
        exact = _if_gaussian(releases_at, epsilon=epsilon, delta=delta)
        if exact is not None:
            return exact

    def cost(noise_multiplier: float) -> float:
        value = epsilon_of(releases_at(noise_multiplier), delta=delta, method=method)
        if not value >= 0:
            raise PrivacyError(f"a cost of {value!r} at {noise_multiplier=} is impossible")
        return value

    guess = _central_limit_guess(releases_at, epsilon=epsilon, delta=delta)
    return _search(cost, guess=guess, epsilon=epsilon, delta=delta)


def _if_gaussian(
    releases_at: Callable[[float], Sequence[events.Release]], *, epsilon: float, delta: float
) -> float | None:
    """Solve a plan of Gaussians whose multipliers are fixed or scale with the argument.

    Their inverse squares add up to ``fixed + moving / argument^2``.
    """
    squares = []
    for argument in (1.0, 2.0, 4.0):
        merged = simplify_releases(releases_at(argument))
        if not (len(merged) == 1 and isinstance(merged[0], events.GaussianRelease)):
            return None
        squares.append(1 / merged[0].noise_multiplier / merged[0].noise_multiplier)
    moving = (squares[0] - squares[1]) * 4 / 3
    fixed = squares[0] - moving
    left = gaussian_noise_multiplier(epsilon=epsilon, delta=delta) ** -2 - fixed
    if not (math.isclose(squares[2], fixed + moving / 16, rel_tol=1e-9) and left > 0 < moving):
        return None
    needed = math.sqrt(moving / left)
    # Rounding must not leave the plan short of noise; little is left of a nearly spent target.
    more = 1e-12
    while not epsilon_of(releases_at(needed), delta=delta) <= epsilon:
        needed *= 1 + more
        more *= 2
        if needed > _LARGEST_MULTIPLIER:
            raise ConfigError(f"no noise multiplier below 1e9 gives {epsilon=} at {delta=}")
    return needed


def _central_limit_guess(
    releases_at: Callable[[float], Sequence[events.Release]], *, epsilon: float, delta: float
) -> float:
    """Guess by [DRS19] Corollary 5.4: many sampled releases act as one Gaussian release.

    Its multiplier is ``1/mu`` with ``mu^2 = sum count q^2 (exp(1/z^2) - 1)``.
    """
    needed = 1 / gaussian_noise_multiplier(epsilon=epsilon, delta=delta)

    def central_mu(multiplier: float) -> float:
        total = 0.0
        for release in releases_at(multiplier):
            rate = 1.0 if isinstance(release, events.GaussianRelease) else release.sampling_rate
            inverse = 1 / release.noise_multiplier / release.noise_multiplier
            growth = math.expm1(min(inverse, 500.0)) if rate < 1 else inverse
            total += release.count * rate * rate * growth
        return math.sqrt(total)

    low, high = math.log(_SMALLEST_MULTIPLIER), math.log(_LARGEST_MULTIPLIER)
    for _ in range(_MAX_STEPS):
        middle = (low + high) / 2
        if central_mu(math.exp(middle)) > needed:
            low = middle
        else:
            high = middle
    # Below one half the limit theorem means nothing; the search widens from here.
    return max(math.exp(high), 0.3)


def _search(cost: Callable[[float], float], *, guess: float, epsilon: float, delta: float) -> float:
    """Bracket the target from the guess, then interpolate in logarithms."""
    low, high, cost_low, cost_high = _bracket(cost, guess=guess, epsilon=epsilon, delta=delta)
    for step in range(_MAX_STEPS):
        if high <= low * (1 + _TOLERANCE):
            break
        # The curve is nearly a power law, so its logarithm is nearly straight; every third step
        # halves, so that a bend cannot stall the search.
        share = 0.5
        if step % 3 < 2 and 0 < cost_high < cost_low < math.inf:
            share = math.log(cost_low / epsilon) / math.log(cost_low / cost_high)
        width = math.log(high / low)
        # Aim a little to either side of the root: that closes the bracket from both ends.
        nudge = 0.4 * _TOLERANCE * (1 if step % 2 else -1)
        middle = low * math.exp(min(max(share * width + nudge, 0.02 * width), 0.98 * width))
        value = cost(middle)
        if value <= epsilon:
            high, cost_high = middle, value
        else:
            low, cost_low = middle, value
    return high


def _bracket(
    cost: Callable[[float], float], *, guess: float, epsilon: float, delta: float
) -> tuple[float, float, float, float]:
    value = cost(guess)
    widening = _FIRST_WIDENING
    if value <= epsilon:
        high, cost_high = guess, value
        low = high / widening
        while (cost_low := cost(low)) <= epsilon:
            if low < _SMALLEST_MULTIPLIER:
                return low, low, cost_low, cost_low
            widening *= widening
            high, cost_high, low = low, cost_low, low / widening
        return low, high, cost_low, cost_high
    low, cost_low = guess, value
    high = low * widening
    while (cost_high := cost(high)) > epsilon:
        if high > _LARGEST_MULTIPLIER:
            raise ConfigError(f"no noise multiplier below 1e9 gives {epsilon=} at {delta=}")
        widening *= widening
        low, cost_low, high = high, cost_high, high * widening
    return low, high, cost_low, cost_high
