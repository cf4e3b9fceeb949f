"""The dominating pair of a sampled Gaussian release, and its integrals.

A release adds N(0, z^2) to a shift that is 0 without the unit and random with it: shift s_j with
probability w_j (0 or 1 for Poisson sampling; j/k binomially when k parties sample on their own).
Privacy loss when the unit is present, at output x:

    L(x) = log sum_j w_j exp((2 s_j x - s_j^2) / (2 z^2)).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import scipy  # special functions load when they are first named

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import events
from securevfl.dp.gaussian import gaussian_epsilon

Array = npt.NDArray[np.float64]
# Below this multiplier a release counts as unsampled: an upper bound; epsilon is in the hundreds.
SMALLEST_SAMPLED_MULTIPLIER: Final = 0.02
# The trapezoidal rule on a function analytic in a strip of half-width d errs by exp(-2 pi d / step)
# of its size on the strip's edge. A mixture of binomial shifts is a polynomial in exp(x / (k z))
# whose zeros are all negative (that of (1 - q + q y)^k, its coefficients times exp(-a j^2), which
# keeps real zeros real), so L is analytic for |Im x| < pi k z. There |exp(order L)| is at most its
# value on the axis for order > 0, and that over cos(Im x / (2 k z))^(k |order|) for order < 0; the
# density grows by exp(d^2 / 2). These steps keep the error below 1e-17 of the moment.
_STEP: Final = 0.1
_STEPS_PER_MULTIPLIER: Final = 4
_NEGATIVE_ORDERS_STEP: Final = 0.5
# The integrand's logarithm h has h'(x) + x between 0 and order / z. So beyond order / z, and below
# 0, it falls at least as fast as a Gaussian does from its mean: 13 deviations on, less than 1e-37
# of the integral is left, at any order.
_TAIL: Final = 13.0
_LARGEST_GRID: Final = 2_000_000
_LARGEST_BLOCK: Final = 2_000_000
_NEAR_ZERO: Final = 0.5
_NEARLY_ONE: Final = 0.1
# Sixteen units in the last place for each rounded step: a few are typical.
_ROUNDING: Final = 16 * 2.0**-53


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftMixture:
    """Distribution of one sampled Gaussian release when the unit is present."""

    log_weights: tuple[float, ...]
    """Logarithms of the shifts' probabilities."""

    shifts: tuple[float, ...]
    """Shifts ``s_j`` in [0, 1], in units of the sensitivity, rising."""

    noise_multiplier: float
    """``z``, noise standard deviation in units of the sensitivity, > 0."""

    def loss(self, points: Array) -> Array:
        """Return ``L`` at outputs given in units of the noise's standard deviation.

        Exact to a few units in the last place of the exponents' size, times what the shifted
        components add where that is less than one; never NaN or infinite for finite points.
        """
        blocks = math.ceil(len(points) * len(self.shifts) / _LARGEST_BLOCK)
        return np.concatenate([self._loss(block) for block in np.array_split(points, blocks)])

    def _loss(self, points: Array) -> Array:
        exponents = self._exponents(points)
        log_weights = np.array(self.log_weights)[:, None]
        terms = log_weights + exponents
        top = np.max(terms, axis=0)
        out: Array = top + np.log(np.sum(np.exp(terms - top), axis=0))
        # Near zero, log(1 + growth) keeps the digits that log(sum) loses next to one.
        near = np.abs(out) < _NEAR_ZERO
        out[near] = np.log1p(np.sum(_scaled_growth(log_weights, exponents[:, near]), axis=0))
        return out

    def _exponents(self, points: Array) -> Array:
        """Return ``(2 s_j x - s_j^2) / (2 z^2)``, a row for each shift."""
        shifts = np.array(self.shifts)[:, None] / self.noise_multiplier
        out: Array = shifts * points - shifts * shifts / 2
        return out

    def grid(self, *, order: float) -> tuple[Array, float]:
        """Return integration points for ``E[exp(order L)]``, and their step; in noise units.

        Raises:
            ConfigError: If that takes more than two million points.
        """
        z = self.noise_multiplier
        step = min(_STEP, z / _STEPS_PER_MULTIPLIER)
        if order < 0:
            parties = max(len(self.shifts) - 1, 1)
            spread = 1 + abs(order) / (4 * parties * z * z)
            step = min(step, _NEGATIVE_ORDERS_STEP / math.sqrt(spread))
        start, end = min(order, 0.0) / z - _TAIL, max(order, 0.0) / z + _TAIL
        if not (end - start) / step < _LARGEST_GRID:
            raise ConfigError(
                f"noise_multiplier = {self.noise_multiplier!r} is too small to be integrated; "
                f"such noise protects nothing"
            )
        return start + step * np.arange(math.ceil((end - start) / step) + 1.0), step

    def log_moment(self, order: float) -> float:
        """Return ``log E[exp(order L(x))]`` for x of the release without the unit, rounded up.

        For an order above 1 this is ``order - 1`` times the Renyi divergence of that order, of the
        release with the unit from the one without it; for ``1 - order``, of the one without it
        from the one with it.

        Raises:
            ConfigError: If the noise is too small to be integrated.
            PrivacyError: If the result is not a number.
        """
        points, step = self.grid(order=order)
        log_density = -points * points / 2 - math.log(2 * math.pi) / 2 + math.log(step)
        loss = self.loss(points)
        exponent = order * loss
        log_terms = exponent + log_density
        log_moment = float(scipy.special.logsumexp(log_terms))
        tilted = np.exp(log_terms - log_moment)
        summed = tilted
        if abs(log_moment) < _NEARLY_ONE:
            # Near one the logarithm would lose what little the moment has above it.
            summed = _scaled_growth(log_density, exponent)
            log_moment = math.log1p(float(np.sum(summed)))
        rounding = np.sum(tilted * abs(order) * self._loss_rounding(points, loss))
        rounding += _ROUNDING * np.sum(np.abs(summed) * (1 + points * points))
        result = log_moment + float(rounding)
        if not math.isfinite(result):
            raise PrivacyError(
                f"the moment of order {order!r} at noise_multiplier = {self.noise_multiplier!r} "
                f"could not be computed; no epsilon follows from it"
            )
        return result

    def _loss_rounding(self, points: Array, loss: Array) -> Array:
        """Bound the error of :meth:`loss`: its exponents' rounding, times what they contribute."""
        z = self.noise_multiplier
        size = len(self.shifts) + np.abs(points) / z + 1 / (2 * z * z) + np.abs(loss)
        moved = -math.expm1(self.log_weights[0]) if self.shifts[0] == 0 else 1.0
        # sum of w_j max(1, exp(exponent_j)) over shifts above 0 is at most exp(L) - 1 + 2 moved.
        out: Array = _ROUNDING * size * np.minimum(np.expm1(np.minimum(loss, 1.0)) + 2 * moved, 1.0)
        return out

    def least_epsilon(self, *, delta: float) -> float:
        """Return an epsilon that no accountant may go below at ``delta``, by one event's odds.

        Every event E refutes each epsilon at which ``P[E] - exp(epsilon) Q[E]`` is above delta.
        Here E is "the output is above x" and ``epsilon = L(x)``, the best over a grid of x.
        """
        points, _ = self.grid(order=1.0)
        exponents = self._exponents(points)
        scaled = np.array(self.shifts)[:, None] / self.noise_multiplier
        above = np.exp(scipy.special.log_ndtr(scaled - points)) - np.exp(
            exponents + scipy.special.log_ndtr(-points)
        )
        deltas = np.sum(np.exp(self.log_weights)[:, None] * above, axis=0)
        refuted = self.loss(points)[deltas > delta]
        return float(np.max(refuted, initial=0.0))

    def loss_range(self) -> float:
        """Return the range of the losses that carry all but 1e-37 of the mass."""
        reach = 1 / self.noise_multiplier + _TAIL
        low, high = self.loss(np.array([-reach, reach]))
        return float(high - low)

    def loss_std(self) -> float:
        """Return the standard deviation of ``L`` for x of the release with the unit."""
        points, step = self.grid(order=1.0)
        loss = self.loss(points)
        density = np.exp(loss - points * points / 2) * (step / math.sqrt(2 * math.pi))
        mean = float(np.sum(density * loss))
        return math.sqrt(float(np.sum(density * (loss - mean) ** 2)))


def _scaled_growth(log_scale: Array, exponent: Array) -> Array:
    """Return ``exp(log_scale) (exp(exponent) - 1)``.

    The product is formed in logarithms where the exponent is large: there its factors may be 0 and
    infinity in float64 though it is small.
    """
    scale = np.exp(log_scale)
    low = scale * np.expm1(np.minimum(exponent, 1.0))
    out: Array = np.where(exponent > 1, np.exp(log_scale + exponent) - scale, low)
    return out


def shift_mixture(release: events.NoisedRelease) -> ShiftMixture:
    """Return the mixture of one release of an event, under adding or removing the unit.

    Raises:
        ConfigError: For an event under the replace-one relation, which is a different pair.
    """
    z = release.noise_multiplier
    if isinstance(release, events.GaussianRelease):
        return ShiftMixture(log_weights=(0.0,), shifts=(1.0,), noise_multiplier=z)
    q = release.sampling_rate
    if q == 1:
        return ShiftMixture(log_weights=(0.0,), shifts=(1.0,), noise_multiplier=z)
    if isinstance(release, events.EntitySampledRelease):
        k = release.parties
        return ShiftMixture(
            log_weights=tuple(
                math.log(math.comb(k, j)) + j * math.log(q) + (k - j) * math.log1p(-q)
                for j in range(k + 1)
            ),
            shifts=tuple(j / k for j in range(k + 1)),
            noise_multiplier=z,
        )
    if release.neighbouring is events.Neighbouring.REPLACE_ONE:
        raise ConfigError("replace-one sampling has no shift mixture; account for it with PLD")
    return ShiftMixture(
        log_weights=(math.log1p(-q), math.log(q)), shifts=(0.0, 1.0), noise_multiplier=z
    )


# Two equal figures may differ by this much through rounding.
_TOLERANCE: Final = 1e-9


def checked_epsilon(
    epsilon: float, *, releases: Sequence[events.NoisedRelease], delta: float
) -> float:
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


def least_epsilon(release: events.NoisedRelease, *, delta: float) -> float:
    """Return a lower bound on the epsilon of one release, whatever its count; 0 if never made."""
    return _least_epsilon(replace(release, count=1), delta) if release.count else 0.0


@lru_cache(maxsize=256)
def _least_epsilon(release: events.NoisedRelease, delta: float) -> float:
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
