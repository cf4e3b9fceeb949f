"""Gaussian releases: exact privacy curve, its inverse, and composition.

All functions take the noise multiplier ``z`` (noise standard deviation over L2 sensitivity,
dimensionless); its inverse ``mu = 1/z`` composes by adding squares.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import scipy  # special functions load when they are first named

from securevfl.core import checks
from securevfl.core.errors import ConfigError

# Bisection halves the bracket; 200 halvings exhaust a float64 bracket of any width.
_MAX_BISECTIONS: Final = 200
# Relative error allowed for each of scipy's log_ndtr and our float64 arithmetic around it. A few
# units in the last place (2.2e-16) are typical; the margin costs at most 1e-12 of delta where
# nothing cancels.
_LOG_ROUNDING: Final = 1e-14
_LARGEST_MULTIPLIER: Final = 1e12
# exp(-745) is the smallest float64 above zero.
_LOG_TINY: Final = -745.0


def gaussian_delta(*, epsilon: float, noise_multiplier: float) -> float:
    r"""Return the exact delta(epsilon) of one Gaussian release.

    The release is ``f(D) + N(0, (z C)^2 I)``, where ``C`` bounds the L2 distance between ``f(D)``
    and ``f(D')`` for neighbouring ``D``, ``D'``, and ``z`` is the noise multiplier.

    Args:
        epsilon: Privacy-loss bound in nats, >= 0.
        noise_multiplier: ``z``, noise standard deviation over sensitivity; dimensionless, > 0.

    Returns:
        The smallest delta in [0, 1] for which the release is (epsilon, delta)-DP, rounded up.

    Raises:
        ConfigError: If an argument is out of range or not finite.

    References:
        [BW18] Theorem 8 (arXiv:1805.06530v2), with sensitivity 1 and sigma ``z``:
        ``delta = Phi(1/(2z) - epsilon z) - exp(epsilon) Phi(-1/(2z) - epsilon z)``.

    Examples:
        >>> round(gaussian_delta(epsilon=1.0, noise_multiplier=1.0), 6)
        0.126937
    """
    checks.non_negative(epsilon=epsilon)
    checks.positive(noise_multiplier=noise_multiplier)
    z = noise_multiplier
    # In log space, as exp(epsilon) overflows float64 from epsilon = 710 on.
    first = 1 / (2 * z) - epsilon * z
    second = -1 / (2 * z) - epsilon * z
    log_first = float(scipy.special.log_ndtr(first))
    log_second = epsilon + float(scipy.special.log_ndtr(second))
    if log_first == -math.inf:
        # Beyond float64's reach even in logarithms; delta is at most this first term.
        return math.exp(_LOG_TINY)
    # A relative error r in an argument a moves log Phi(a) by about r a^2 where a is negative.
    slack = _LOG_ROUNDING * (1 + epsilon + abs(log_first) + second * second)
    gap = min(log_second - log_first, 0.0) - slack
    log_delta = log_first + slack + math.log(-math.expm1(gap))
    return math.exp(min(max(log_delta, _LOG_TINY), 0.0))


@lru_cache(maxsize=64)
def gaussian_epsilon(*, delta: float, noise_multiplier: float) -> float:
    """Return an epsilon that holds for one Gaussian release at ``delta``, rounded up.

    Args:
        delta: Failure probability, in (0, 1).
        noise_multiplier: ``z`` as in :func:`gaussian_delta`; dimensionless, > 0.

    Returns:
        The upper end of a bisection: ``gaussian_delta(epsilon=result) <= delta`` holds always.

    Raises:
        ConfigError: If an argument is out of range or not finite, or the noise is so small that
            epsilon is beyond 1e12.

    Examples:
        >>> round(gaussian_epsilon(delta=1e-5, noise_multiplier=2.0), 4)
        1.9931
    """
    checks.open_unit(delta=delta)
    checks.positive(noise_multiplier=noise_multiplier)

    def enough(epsilon: float) -> bool:
        return gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier) <= delta

    if enough(0.0):
        return 0.0
    return smallest_enough(enough, start=1.0, what=f"epsilon at {noise_multiplier=}, {delta=}")


@lru_cache(maxsize=64)
def gaussian_noise_multiplier(*, epsilon: float, delta: float) -> float:
    """Return a noise multiplier that is enough for one (epsilon, delta)-DP release.

    Args:
        epsilon: Target privacy-loss bound in nats, > 0.
        delta: Target failure probability, in (0, 1).

    Returns:
        ``z`` as in :func:`gaussian_delta`, rounded towards more noise.

    Raises:
        ConfigError: If a target is out of range, or no multiplier below 1e12 is enough.
    """
    checks.positive(epsilon=epsilon)
    checks.open_unit(delta=delta)

    def enough(noise_multiplier: float) -> bool:
        return gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier) <= delta

    return smallest_enough(enough, start=1.0, what=f"noise multiplier for {epsilon=}, {delta=}")


def composed_multiplier(*noise_multipliers: float) -> float:
    """Return the multiplier of one Gaussian release that equals several together.

    The joint release of ``z_1, z_2, …`` (each chosen with knowledge of the earlier outputs, if one
    likes) is as private as one release at ``(sum_i z_i^-2)^(-1/2)``.

    References:
        [DRS19] Corollary 3.3 (arXiv:1905.02383v3): ``mu = sqrt(mu_1^2 + … + mu_n^2)``, with
        ``mu = 1/z``.

    Examples:
        >>> composed_multiplier(2.0, 2.0, 2.0, 2.0)
        1.0
    """
    for noise_multiplier in noise_multipliers:
        checks.positive(noise_multiplier=noise_multiplier)
    if not noise_multipliers:
        raise ConfigError("composed_multiplier: needs at least one release")
    # Over the least of them: squares of very small or large multipliers leave float64's range.
    least = min(noise_multipliers)
    return least / math.sqrt(math.fsum((least / z) ** 2 for z in noise_multipliers))


def smallest_enough(enough: Callable[[float], bool], *, start: float, what: str) -> float:
    """Return a value from which on a monotone test passes, by doubling and bisection.

    Args:
        enough: False below some point, True above it.
        start: First guess, > 0.
        what: What is sought, for the message.

    Returns:
        A value that passed the test itself: the upper end of the last bracket.

    Raises:
        ConfigError: If nothing below 1e12 is enough.
    """
    low, high = 0.0, start
    while not enough(high):
        low, high = high, 2 * high
        if high > _LARGEST_MULTIPLIER:
            raise ConfigError(f"{what}: nothing below 1e12 is enough")
    for _ in range(_MAX_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
