"""Renyi differential privacy of Gaussian releases, and its conversion to (epsilon, delta).

Renyi divergences are integrated directly: dp-accounting 0.6 sums a binomial series whose
fractional orders are loose, and diverge for sampling rates of one half and more.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy.optimize import minimize_scalar

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.events import GaussianRelease, Neighbouring, Release, SampledRelease
from securevfl.dp.mixtures import shift_mixture

# What integration and summation may lose of log E[exp(order L)]: a fraction, and a part that
# float64 cannot see beside one.
_RELATIVE_ROUNDING: Final = 1e-10
_ABSOLUTE_ROUNDING: Final = 1e-16
_SMALLEST_ORDER: Final = 1 + 1e-6
_LARGEST_ORDER: Final = 1e5
_COARSE_ORDERS: Final = 40
# Where orders reach that far into the tail, the bound without sampling is as good.
_LARGEST_REACH: Final = 2e4


def renyi_divergence(release: Release, *, order: float) -> float:
    """Return the Renyi divergence of ``order`` of all ``release.count`` releases, rounded up.

    References:
        [MTZ19] Theorems 4 and 5 (arXiv:1908.10530v1): for the sampled Gaussian, the divergence of
        the release with the record from the one without it is the larger of the two directions.
        Without sampling: [Mir17] Corollary 3 (arXiv:1702.07476v3), ``order / (2 z^2)``.

    Raises:
        ConfigError: If ``order`` is not above 1 and finite, or for replace-one sampling.
    """
    checks.positive(order=order)
    if not order > 1:
        raise ConfigError(f"order must be above 1, got {order!r}")
    z = release.noise_multiplier
    unsampled = order / (2 * z * z)
    replaces = (
        isinstance(release, SampledRelease) and release.neighbouring is Neighbouring.REPLACE_ONE
    )
    if replaces:
        raise ConfigError("replace-one sampling: use the PLD accountant")
    if isinstance(release, GaussianRelease) or release.sampling_rate == 1:
        return release.count * unsampled
    if order / z > _LARGEST_REACH:
        return release.count * unsampled
    log_moment = shift_mixture(release).log_moment(order)
    log_moment += _RELATIVE_ROUNDING * abs(log_moment) + _ABSOLUTE_ROUNDING
    return release.count * min(max(log_moment, 0.0) / (order - 1), unsampled)


def epsilon_of_divergence(*, divergence: float, order: float, delta: float) -> float:
    """Convert a Renyi divergence of one order to epsilon at ``delta``.

    References:
        [CKS20] Proposition 12 (arXiv:2004.00010v5):
        ``epsilon = D + log((a-1)/a) - (log delta + log a)/(a-1)``.
    """
    return divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def rdp_epsilon(releases: Sequence[Release], *, delta: float) -> float:
    """Return an epsilon for all ``releases`` together at ``delta``, through Renyi divergences.

    Returns:
        The best over real orders between 1 and 1e5; an upper bound at whichever order was found.

    Raises:
        ConfigError: If ``delta`` is outside (0, 1), or for replace-one sampling.
    """
    checks.open_unit(delta=delta)
    if not any(release.count for release in releases):
        return 0.0

    def at(log_excess: float) -> float:
        order = 1 + math.exp(log_excess)
        divergence = math.fsum(renyi_divergence(release, order=order) for release in releases)
        return epsilon_of_divergence(divergence=divergence, order=order, delta=delta)

    edges = np.linspace(math.log(_SMALLEST_ORDER - 1), math.log(_LARGEST_ORDER - 1), _COARSE_ORDERS)
    values = [at(float(edge)) for edge in edges]
    best = int(np.argmin(values))
    low, high = edges[max(best - 1, 0)], edges[min(best + 1, len(edges) - 1)]
    found = minimize_scalar(
        at, bounds=(float(low), float(high)), method="bounded", options={"xatol": 1e-4}
    )
    return max(0.0, min(float(found.fun), values[best]))
