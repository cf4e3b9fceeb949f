"""Privacy of the discrete Gaussian noise that is added in the ring, alone and summed over parties.

Standard deviations are in ring units (``tau / granularity``) where they are called ``ring_std``.
"""

import math
from typing import Final

import numpy as np
from scipy.special import logsumexp

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import smallest_enough

# Beyond 14 standard deviations lies less than 1e-43 of the mass.
_TAIL: Final = 14.0
_LARGEST_TABLE: Final = 20_000_000
# Relative error of sums of positive float64 numbers in numpy's cumulative order.
_ROUNDING: Final = 1e-9


def sum_divergence_log(*, parties: int, ring_std: float) -> float:
    """Return the natural log of how far a sum of discrete Gaussians is from being one itself.

    The sum over ``n`` parties at ``s`` ring units each is, pointwise in log-probability and per
    coordinate, within ``10 sum_{j=1}^{n-1} exp(-2 pi^2 s^2 j/(j+1))`` of a discrete Gaussian of
    variance ``n s^2``.

    Returns:
        The log of that bound; minus infinity for a single party.

    References:
        [KLS21] Theorem 1 (arXiv:2102.06387v4), where the bound is called tau.
    """
    checks.whole(parties=parties)
    checks.at_least(1, parties=parties)
    checks.positive(ring_std=ring_std)
    if parties == 1:
        return -math.inf
    j = np.arange(1, parties, dtype=np.float64)
    return math.log(10) + float(logsumexp(-2 * math.pi**2 * ring_std**2 * j / (j + 1)))


def summed_renyi_divergence(
    *,
    order: float,
    sensitivity: float,
    parties: int,
    share_std: float,
    granularity: float,
    dimension: int,
) -> float:
    """Return the Renyi divergence of a sum that carries one discrete Gaussian share per party.

    Args:
        order: Above 1.
        sensitivity: L2 sensitivity of the sum, in the units of the representation, > 0.
        parties: Shares in the sum, >= 1.
        share_std: ``tau``, each share's standard deviation, same units, > 0.
        granularity: ``gamma``, one ring unit, same units, > 0.
        dimension: Coordinates released together, >= 1.

    Returns:
        ``order/2`` times ``min(D^2/(n tau^2) + e d, (D/(sqrt(n) tau) + e sqrt(d))^2)``, with ``e``
        of :func:`sum_divergence_log`; rounded up.

    References:
        [KLS21] Theorem 1 (arXiv:2102.06387v4). We charge ``e d`` where the theorem has half of it:
        the difference is far below float64 at the required ring_std >= 64.
    """
    checks.positive(
        order=order, sensitivity=sensitivity, share_std=share_std, granularity=granularity
    )
    checks.whole(dimension=dimension)
    checks.at_least(1, dimension=dimension)
    if not order > 1:
        raise ConfigError(f"order must be above 1, got {order!r}")
    log_excess = sum_divergence_log(parties=parties, ring_std=share_std / granularity)
    excess = math.exp(log_excess)
    squared = (sensitivity / share_std) ** 2 / parties
    bound = min(
        squared + excess * dimension,
        (math.sqrt(squared) + excess * math.sqrt(dimension)) ** 2,
    )
    return order / 2 * bound


def discrete_gaussian_epsilon(*, shift: int, ring_std: float, delta: float) -> float:
    """Return epsilon at ``delta`` of one integer released with discrete Gaussian noise, rounded up.

    Args:
        shift: How far neighbouring integers are apart, in ring units, >= 1.
        ring_std: Parameter sigma of the discrete Gaussian, in ring units, > 0.
        delta: In (0, 1).

    References:
        [CKS20] Theorem 7 (arXiv:2004.00010v5): with X the noise,
        ``delta = P[X > e s^2/D - D/2] - exp(e) P[X > e s^2/D + D/2]``.
    """
    checks.whole(shift=shift)
    checks.at_least(1, shift=shift)
    checks.positive(ring_std=ring_std)
    checks.open_unit(delta=delta)
    reach = math.ceil(_TAIL * ring_std) + 2 * shift + 2
    if 2 * reach > _LARGEST_TABLE:
        raise ConfigError(
            f"ring_std = {ring_std!r} is too large to be summed; at that size the continuous "
            f"Gaussian (gaussian_epsilon) is the same to all digits"
        )
    values = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-(values**2) / (2 * ring_std**2))
    # Summed from the far tail inwards, so that small terms are not lost.
    upper_tails = np.concatenate([np.cumsum(weights[::-1])[::-1], [0.0]]) / weights.sum()

    def tail_above(threshold: float) -> float:
        """Return P[X > threshold]."""
        index = math.floor(threshold) + 1 + reach
        return float(upper_tails[min(max(index, 0), len(upper_tails) - 1)])

    def enough(epsilon: float) -> bool:
        centre = epsilon * ring_std**2 / shift
        upper = tail_above(centre - shift / 2) * (1 + _ROUNDING)
        lower = tail_above(centre + shift / 2) * (1 - _ROUNDING)
        # Beyond the table the upper tail is below every delta that float64 can tell from zero.
        return upper - (math.exp(min(epsilon, 700.0)) * lower if lower else 0.0) <= delta

    if enough(0.0):
        return 0.0
    return smallest_enough(enough, start=1.0, what=f"epsilon at {ring_std=}, {delta=}")
