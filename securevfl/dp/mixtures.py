"""The pair of distributions that dominates one sampled Gaussian release, and its integrals.

A release adds N(0, z^2) to a shift that is 0 without the unit and random with it: shift ``s_j``
with probability ``w_j`` (0 or 1 for Poisson sampling; ``j/k`` binomially when k parties sample on
their own). Privacy loss when the unit is there, at output x:

    L(x) = log sum_j w_j exp((2 s_j x - s_j^2) / (2 z^2)).
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

from securevfl.core.errors import ConfigError
from securevfl.dp.events import EntitySampledRelease, GaussianRelease, Neighbouring, Release

Array = npt.NDArray[np.float64]

# The trapezoidal rule on a Gaussian times a function analytic in a strip of half-width d errs by
# exp(-2 pi d / step). L's nearest singularity is pi z away from the axis in units of the noise, so
# step = min(0.1, z/4) keeps that below 1e-30 for Poisson sampling, and binomial mixtures (whose
# zeros lie further out) too.
_STEP: Final = 0.1
_STEPS_PER_MULTIPLIER: Final = 4
# Beyond 13 standard deviations a Gaussian has less than 1e-37 of its mass.
_TAIL: Final = 13.0
_LARGEST_GRID: Final = 2_000_000
_NEARLY_ONE: Final = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftMixture:
    """Shifts and their probabilities, and the noise around them."""

    log_weights: tuple[float, ...]
    shifts: tuple[float, ...]
    noise_multiplier: float

    def loss(self, points: Array) -> Array:
        """Return ``L`` at outputs given in units of the noise's standard deviation."""
        z = self.noise_multiplier
        terms = [
            weight + shift * points / z - shift * shift / (2 * z * z)
            for weight, shift in zip(self.log_weights, self.shifts, strict=True)
        ]
        out: Array = logsumexp(np.stack(terms), axis=0)
        return out

    def grid(self, *, reach: float) -> tuple[Array, float]:
        """Return points from far below 0 to beyond ``reach`` (noise units), and their step."""
        step = min(_STEP, self.noise_multiplier / _STEPS_PER_MULTIPLIER)
        count = math.ceil((reach + 2 * _TAIL) / step) + 1
        if count > _LARGEST_GRID:
            raise ConfigError(
                f"noise_multiplier = {self.noise_multiplier!r} is too small to be integrated; "
                f"such noise protects nothing"
            )
        return -_TAIL + step * np.arange(count, dtype=np.float64), step

    def log_moment(self, order: float) -> float:
        """Return ``log E[exp(order L(x))]`` for x of the release without the unit.

        This is ``(order - 1)`` times the Renyi divergence of that order, of the release with the
        unit from the one without it.
        """
        points, step = self.grid(reach=max(order, 1.0) / self.noise_multiplier)
        log_density = -points * points / 2 - math.log(2 * math.pi) / 2 + math.log(step)
        exponent = order * self.loss(points)
        log_moment = float(logsumexp(exponent + log_density))
        if abs(log_moment) > _NEARLY_ONE:
            return log_moment
        # Near one the logarithm would lose what little the moment has above it.
        return math.log1p(float(np.sum(np.exp(log_density) * np.expm1(exponent))))

    def loss_range(self) -> float:
        """Return how far apart losses lie that occur with more than 1e-37 of the mass."""
        reach = 1 / self.noise_multiplier + _TAIL
        low, high = self.loss(np.array([-reach, reach]))
        return float(high - low)

    def loss_std(self) -> float:
        """Return the standard deviation of ``L`` for x of the release with the unit."""
        points, step = self.grid(reach=1 / self.noise_multiplier)
        loss = self.loss(points)
        density = np.exp(loss - points * points / 2) * (step / math.sqrt(2 * math.pi))
        mean = float(np.sum(density * loss))
        return math.sqrt(max(float(np.sum(density * (loss - mean) ** 2)), 0.0))


def shift_mixture(release: Release) -> ShiftMixture:
    """Return the mixture of one release of an event, under adding or removing the unit.

    Raises:
        ConfigError: For an event under the replace-one relation, which is a different pair.
    """
    z = release.noise_multiplier
    if isinstance(release, GaussianRelease):
        return ShiftMixture(log_weights=(0.0,), shifts=(1.0,), noise_multiplier=z)
    q = release.sampling_rate
    if q == 1:
        return ShiftMixture(log_weights=(0.0,), shifts=(1.0,), noise_multiplier=z)
    if isinstance(release, EntitySampledRelease):
        drawn = np.arange(release.parties + 1)
        log_weights = (
            gammaln(release.parties + 1)
            - gammaln(drawn + 1)
            - gammaln(release.parties - drawn + 1)
            + drawn * math.log(q)
            + (release.parties - drawn) * math.log1p(-q)
        )
        return ShiftMixture(
            log_weights=tuple(map(float, log_weights)),
            shifts=tuple(map(float, drawn / release.parties)),
            noise_multiplier=z,
        )
    if release.neighbouring is Neighbouring.REPLACE_ONE:
        raise ConfigError("replace-one sampling has no shift mixture; account for it with PLD")
    return ShiftMixture(
        log_weights=(math.log1p(-q), math.log(q)), shifts=(0.0, 1.0), noise_multiplier=z
    )
