"""A floor for every computed epsilon, which finds errors in how epsilon is computed.

Composed releases reveal at least as much as any one of them, whose odds have a closed form. It
shares nothing with how epsilon is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.shift_mixture import SMALLEST_SAMPLED_MULTIPLIER, shift_mixture

# Two equal figures may differ by this much through rounding.
_TOLERANCE: Final = 1e-9


def checked_epsilon(epsilon: float, *, releases: Sequence[events.Release], delta: float) -> float:
    """Return a computed epsilon of all ``releases`` at ``delta`` if it can be true.

    A value between ``log(1 - delta)`` and 0 comes back as 0: the unit cannot be detected at all,
    except with probability delta.

    Raises:
        ConfigError: If it is infinite.
        PrivacyError: If it is not a number, below ``log(1 - delta)`` (no (epsilon, delta) is), or
            below what one of the releases costs alone.
    """
    if epsilon == math.inf:
        raise ConfigError(
            f"no finite epsilon at delta = {delta!r}: the noise is too small to be accounted for"
        )
    if not epsilon >= math.log1p(-delta) - _TOLERANCE:
        raise PrivacyError(
            f"accounting came to epsilon = {epsilon!r} at delta = {delta!r}, which no release has; "
            f"nothing may be released on it. Please report it, with the plan"
        )
    epsilon = epsilon if epsilon > 0 else 0.0
    for release in releases:
        least = least_epsilon(release, delta=delta)
        if epsilon < least * (1 - _TOLERANCE) - _TOLERANCE:
            raise PrivacyError(
                f"accounting came to epsilon = {epsilon!r} at delta = {delta!r}, but one of the "
                f"releases costs {least:.6g} alone; nothing may be released on it. Please report "
                f"it, with the plan"
            )
    return epsilon


def least_epsilon(release: events.Release, *, delta: float) -> float:
    """Return a lower bound on the epsilon of one release, whatever its count; 0 if never made."""
    return _least_epsilon(replace(release, count=1), delta) if release.count else 0.0


@lru_cache(maxsize=256)
def _least_epsilon(release: events.Release, delta: float) -> float:
    if isinstance(release, events.GaussianRelease):
        return gaussian_epsilon(delta=delta, noise_multiplier=release.noise_multiplier)
    if release.noise_multiplier < SMALLEST_SAMPLED_MULTIPLIER:
        # No grid is fine enough for so little noise; more noise costs less.
        release = replace(release, noise_multiplier=SMALLEST_SAMPLED_MULTIPLIER)
    if isinstance(release, events.SampledRelease):
        # Exchanging costs no less: the event "above x" is rarer where a record pulls it down than
        # where there is none.
        release = replace(release, neighbouring=events.Neighbouring.ADD_REMOVE)
    return shift_mixture(release).least_epsilon(delta=delta)
