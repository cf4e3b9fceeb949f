"""What no accountant may say: the last check of every computed epsilon.

Composed releases tell at least as much as any one of them alone, and one alone has odds in closed
form. That shares nothing with how epsilon is computed, so it finds what went wrong there.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.events import GaussianRelease, Neighbouring, Release, SampledRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.mixtures import SMALLEST_SAMPLED_MULTIPLIER, shift_mixture

# What rounding may make of two figures that are equal.
_ROUNDING: Final = 1e-9


def checked_epsilon(epsilon: float, *, releases: Sequence[Release], delta: float) -> float:
    """Return a computed epsilon of all ``releases`` at ``delta`` if it can be true.

    A value between ``log(1 - delta)`` and 0 comes back as 0, which it proves: nobody can tell the
    unit at all, except with probability delta.

    Raises:
        ConfigError: If it is infinite.
        PrivacyError: If it is not a number, below ``log(1 - delta)`` (no (epsilon, delta) is), or
            below what one of the releases costs alone.
    """
    if epsilon == math.inf:
        raise ConfigError(
            f"no finite epsilon at delta = {delta!r}: the noise is too small to be accounted for"
        )
    if not epsilon >= math.log1p(-delta) - _ROUNDING:
        raise PrivacyError(
            f"accounting came to epsilon = {epsilon!r} at delta = {delta!r}, which no release has; "
            f"nothing may be released on it. Please report it, with the plan"
        )
    epsilon = epsilon if epsilon > 0 else 0.0
    for release in releases:
        least = least_epsilon(release, delta=delta)
        if epsilon < least * (1 - _ROUNDING) - _ROUNDING:
            raise PrivacyError(
                f"accounting came to epsilon = {epsilon!r} at delta = {delta!r}, but one of the "
                f"releases costs {least:.6g} alone; nothing may be released on it. Please report "
                f"it, with the plan"
            )
    return epsilon


def least_epsilon(release: Release, *, delta: float) -> float:
    """Return what a release costs at least, however often it is made."""
    return _least_epsilon(replace(release, count=1), delta) if release.count else 0.0


@lru_cache(maxsize=256)
def _least_epsilon(release: Release, delta: float) -> float:
    if isinstance(release, GaussianRelease):
        return gaussian_epsilon(delta=delta, noise_multiplier=release.noise_multiplier)
    if release.noise_multiplier < SMALLEST_SAMPLED_MULTIPLIER:
        # Hardly noise at all, and no grid is fine enough; more noise costs less.
        release = replace(release, noise_multiplier=SMALLEST_SAMPLED_MULTIPLIER)
    if isinstance(release, SampledRelease):
        # Exchanging costs no less: the event "above x" is rarer where a record pulls it down than
        # where there is none.
        release = replace(release, neighbouring=Neighbouring.ADD_REMOVE)
    return shift_mixture(release).least_epsilon(delta=delta)
