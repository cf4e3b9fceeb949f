"""Calibration: from a target epsilon to the smallest sufficient noise, rounded to more noise."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events
from securevfl.dp.accountant import Method, epsilon_of, simplify_releases
from securevfl.dp.gaussian import gaussian_noise_multiplier

# The answer exceeds the smallest sufficient noise by at most this fraction, in addition to the
# accountant's own rounding.
_TOLERANCE: Final = 2e-4
_LARGEST_MULTIPLIER: Final = 1e9
_SMALLEST_MULTIPLIER: Final = 1e-6
_MAX_STEPS: Final = 60
_FIRST_WIDENING: Final = 1.02


def noise_multiplier_for(
    releases_at: Callable[[float], Sequence[events.NoisedRelease]],
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
    releases_at: Callable[[float], Sequence[events.NoisedRelease]], *, epsilon: float, delta: float
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
    releases_at: Callable[[float], Sequence[events.NoisedRelease]], *, epsilon: float, delta: float
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
