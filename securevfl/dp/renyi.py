"""Renyi differential privacy (RDP), and its conversion to (epsilon, delta).

The divergences are integrated here (:meth:`securevfl.dp.shift_mixture.ShiftMixture.log_moment`).
``dp_accounting.rdp.RdpAccountant`` does not replace that, measured at delta 1e-8 to 1e-7: it has no
event for an entity that every party samples independently (bounding one by k independent samples
costs up to 3 % of epsilon); with its default orders one release at q = 0.1, z = 5 costs 38 % more
epsilon; with orders up to 1e5 most plans are within 0.1 %, at two seconds an evaluation instead
of 0.02; and its fractional orders diverge for q >= 0.5.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events
from securevfl.dp.shift_mixture import SMALLEST_SAMPLED_MULTIPLIER, checked_epsilon, shift_mixture

_SMALLEST_ORDER: Final = 1 + 1e-6
_LARGEST_ORDER: Final = 1e5
_COARSE_ORDERS: Final = 40
# From this order over z on, the bound without sampling is as good.
_LARGEST_REACH: Final = 4e3


def renyi_divergence(release: events.NoisedRelease, *, order: float) -> float:
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


def rdp_epsilon(releases: Sequence[events.NoisedRelease], *, delta: float) -> float:
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

    # Where epsilon falls and then leaps, it errs in proportion to the order.
    minimum = minimize_scalar(
        epsilon_at, bounds=(float(low), float(high)), method="bounded", options={"xatol": 1e-7}
    )
    return checked_epsilon(min(float(minimum.fun), least), releases=releases, delta=delta)
