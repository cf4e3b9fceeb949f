"""Privacy accountant: epsilon of a list of releases, in nats and rounded up.

Privacy-loss distributions (PLD) are dp-accounting's, rounded up ("connect the dots"); added here
are the choice of the grid, the allowance for float64 and the refusals. Gaussian releases without
sampling have an exact curve (:mod:`securevfl.dp.gaussian`). Renyi divergences
(:mod:`securevfl.dp.renyi`) serve delta from 1e-8 to 1e-7 where distributions are beyond float64 or
slow, and wherever the library fails to invert a loss.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError, of_an_extra
from securevfl.dp import events
from securevfl.dp.gaussian import composed_multiplier, gaussian_epsilon, smallest_enough
from securevfl.dp.pure import largest_loss, pure_delta
from securevfl.dp.renyi import rdp_epsilon
from securevfl.dp.shift_mixture import SMALLEST_SAMPLED_MULTIPLIER, checked_epsilon, shift_mixture

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
# More than float64 rounds a sum of losses, or a delta.
_ROUNDED_UP: Final = 1 + 1e-12
_ROUNDED_DOWN: Final = 1 - 1e-6
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
        (:func:`securevfl.dp.shift_mixture.checked_epsilon`).
    """
    checks.open_unit(delta=delta)
    checks.one_of(("auto", "pld", "rdp"), method=method)
    pure = tuple(release for release in releases if isinstance(release, events.PureRelease))
    left = simplify_releases(releases)
    if any(release.count for release in pure):
        return _with_pure(pure, left, delta=delta, method=method)
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


def _with_pure(
    pure: tuple[events.PureRelease, ...],
    noised: tuple[events.NoisedRelease, ...],
    *,
    delta: float,
    method: Method,
) -> float:
    """Return epsilon of pure releases beside others behind noise."""
    # Pure epsilon adds up with whatever holds at delta.
    largest = sum(largest_loss(release) for release in pure)
    if any(not isinstance(release, events.GaussianRelease) for release in noised):
        return epsilon_of(noised, delta=delta, method=method) + largest
    multiplier = noised[0].noise_multiplier if noised else None
    largest += epsilon_of(noised, delta=delta * _ROUNDED_DOWN)

    def enough(epsilon: float) -> bool:
        # Delta never grows with epsilon; what draws are off their law has a bound that does.
        at = min(epsilon, largest * _ROUNDED_UP)
        return pure_delta(pure, epsilon=at, noise_multiplier=multiplier) <= delta

    if enough(0.0):
        return 0.0
    if not enough(math.inf):
        return math.inf
    return smallest_enough(enough, start=1.0, what=f"epsilon of pure releases at {delta=}")


def simplify_releases(releases: Sequence[events.Release]) -> tuple[events.NoisedRelease, ...]:
    """Drop what releases nothing, and merge all Gaussian releases without sampling into one.

    Pure releases are left out: their loss is no Gaussian's.
    """
    gaussian: list[float] = []
    sampled: list[events.NoisedRelease] = []
    for release in releases:
        if release.count == 0 or isinstance(release, events.PureRelease):
            continue
        plain = _as_plain(release)
        if isinstance(plain, events.GaussianRelease):
            gaussian.append(plain.noise_multiplier / math.sqrt(plain.count))
        else:
            sampled.append(plain)
    merged: list[events.NoisedRelease] = []
    if gaussian:
        merged.append(events.GaussianRelease(noise_multiplier=composed_multiplier(*gaussian)))
    return (*merged, *sampled)


def _as_plain(release: events.NoisedRelease) -> events.NoisedRelease:
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
def _by_divergences(releases: tuple[events.NoisedRelease, ...], delta: float) -> float:
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
        (:func:`securevfl.dp.shift_mixture.checked_epsilon`).
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
def _pld_epsilon(releases: tuple[events.NoisedRelease, ...], delta: float) -> float:
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


def _is_practical(releases: Sequence[events.NoisedRelease], delta: float) -> bool:
    """Return whether float64 resolves the distributions and their grids are of comfortable size."""
    if _allowance(releases) > _LARGEST_ALLOWANCE * delta:
        return False
    if min(release.noise_multiplier for release in releases) < SMALLEST_SAMPLED_MULTIPLIER:
        return False
    widest, span = _extent(releases)
    return max(widest, span) <= _COMFORTABLE_COMPOSED * _grid_step(releases)


def _allowance(releases: Sequence[events.NoisedRelease]) -> float:
    """Return by how much float64 and tails that are cut can put delta off."""
    rounding = _FLOAT_ERROR * sum(release.count + 2 for release in releases)
    return rounding + 4 * _TAIL_MASS * len(releases)


def _single(release: events.NoisedRelease, step: float) -> Any:
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


def _grid_step(releases: Sequence[events.NoisedRelease]) -> float:
    """Return a step fine enough for every release, and coarse enough for time and memory."""
    stds = [shift_mixture(_as_removal(release)).loss_std() for release in releases]
    widest, span = _extent(releases)
    comfortable = max(widest / _COMFORTABLE_SINGLE, span / _COMFORTABLE_COMPOSED)
    finest = min(stds) / _FINE_POINTS_PER_STD
    step = max(finest, min(comfortable, min(stds) / _COARSE_POINTS_PER_STD))
    step = min(max(step, _SMALLEST_STEP), _LARGEST_STEP)
    return max(step, span / _LARGEST_GRID)


def _extent(releases: Sequence[events.NoisedRelease]) -> tuple[float, float]:
    """Return the range of the widest release's losses, and the span of all losses' sum, in nats."""
    pairs = [shift_mixture(_as_removal(release)) for release in releases]
    variance = math.fsum(
        release.count * pair.loss_std() ** 2 for release, pair in zip(releases, pairs, strict=True)
    )
    widest = max(pair.loss_range() for pair in pairs)
    return widest, _SPAN * math.sqrt(variance) + variance


def _as_removal(release: events.NoisedRelease) -> events.NoisedRelease:
    """Return a release whose loss spreads no more than an exchange's, for choosing a grid."""
    if isinstance(release, events.SampledRelease):
        return replace(release, neighbouring=events.Neighbouring.ADD_REMOVE)
    return release
