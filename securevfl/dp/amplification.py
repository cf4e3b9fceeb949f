"""Amplification of one release by a secret Poisson sample."""

import math
from typing import Final

from securevfl.core import checks
from securevfl.dp.gaussian import gaussian_epsilon

# exp() overflows float64 from 710 on.
_LARGEST_EXPONENT: Final = 700.0


def amplified_epsilon(*, epsilon: float, sampling_rate: float) -> float:
    """Return epsilon of a release on a secret Poisson sample; its delta shrinks to ``q delta``.

    Args:
        epsilon: Of the release on the whole data, in nats, >= 0.
        sampling_rate: ``q``, in (0, 1].

    Returns:
        ``log(1 + q (exp(epsilon) - 1))``.

    References:
        [BBG18] Theorem 8 (arXiv:1807.01647v2). Differs from [FeT] section 6.1, whose
        ``q epsilon`` is its first-order term, too small by up to a factor of ``1/q``.

    Examples:
        >>> round(amplified_epsilon(epsilon=4.0, sampling_rate=0.1), 4)
        1.8496
    """
    checks.non_negative(epsilon=epsilon)
    checks.rate(sampling_rate=sampling_rate)
    if epsilon > _LARGEST_EXPONENT:
        # The same in a form that cannot overflow; below, it would cancel for small rates.
        return epsilon + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-epsilon))
    return math.log1p(sampling_rate * math.expm1(epsilon))


def sampled_gaussian_epsilon(
    *, delta: float, noise_multiplier: float, sampling_rate: float
) -> float:
    """Return epsilon at ``delta`` of one Gaussian release on a secret Poisson sample.

    Exact for removing a record, an upper bound for adding one: the curve of the whole release is
    taken at ``delta / q``.
    """
    checks.open_unit(delta=delta)
    checks.rate(sampling_rate=sampling_rate)
    if delta >= sampling_rate:
        return 0.0
    whole = gaussian_epsilon(delta=delta / sampling_rate, noise_multiplier=noise_multiplier)
    return amplified_epsilon(epsilon=whole, sampling_rate=sampling_rate)


def basic_composition(
    *, delta: float, noise_multiplier: float, sampling_rate: float, steps: int
) -> float:
    """Return epsilon of ``steps`` sampled releases by adding epsilons and deltas.

    The oldest rule ([DR14] Theorem 3.16), for comparison: true, and very loose for many steps.

    Raises:
        ConfigError: If an argument is out of range, or the sum is not finite.
    """
    checks.whole(steps=steps)
    checks.at_least(0, steps=steps)
    if steps == 0:
        return 0.0
    epsilon = steps * sampled_gaussian_epsilon(
        delta=delta / steps, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate
    )
    checks.non_negative(epsilon=epsilon)
    return epsilon
