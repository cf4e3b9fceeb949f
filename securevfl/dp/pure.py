"""Pure releases, whose privacy loss is bounded: symbols and Laplace sums, with Gaussian noise too.

Each draw counts as one of finitely many losses (docs/privacy.md, section 3). Losses of several
draws add up, and given their sum L what is left of epsilon is ``epsilon - L``.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from jaxtyping import Float64

from securevfl.dp.events import LaplaceRelease, PureRelease, SymbolRelease
from securevfl.dp.gaussian import gaussian_delta
from securevfl.dp.symbols import cell_probabilities

DRAW_DISTANCE: Final = 2.0**-200
"""Statistical distance of a sum of Laplace shares from its law, by the ends and the last digits of
sampling tables (:mod:`securevfl.dp.laplace_noise`), for each grid unit that a record moves."""

_Losses = Float64[np.ndarray, "2 outcomes"]
"""Probabilities of outcomes, and the privacy loss of each."""

_MOST_OUTCOMES: Final = 4096
# Sums of positive numbers in float64.
_ROUNDED: Final = 1 + 1e-9


def pure_delta(
    releases: Sequence[PureRelease], *, epsilon: float, noise_multiplier: float | None
) -> float:
    """Return delta of pure releases and one Gaussian release at ``epsilon``.

    It is the mean over their loss L of the Gaussian's delta at ``epsilon - L``, and what the draws
    of Laplace shares may be off their law.

    Args:
        releases: The pure releases.
        epsilon: Privacy-loss bound in nats, >= 0.
        noise_multiplier: Of the Gaussian release; None: there is none.

    References:
        [DRS19] Theorem 3.2: composition of trade-off functions, of which delta is the dual.
    """
    probabilities, losses = _losses(tuple(release for release in releases if release.count))
    terms = [
        probability * _delta_at(float(epsilon - loss), noise_multiplier)
        for probability, loss in zip(probabilities, losses, strict=True)
    ]
    moved = sum(
        release.shift * release.count for release in releases if isinstance(release, LaplaceRelease)
    )
    if moved:
        terms.append((1 + math.exp(min(epsilon, 700.0))) * moved * DRAW_DISTANCE)
    return min(1.0, math.fsum(terms) * _ROUNDED)


def largest_loss(release: PureRelease) -> float:
    """Return the pure epsilon of a release: its largest loss in either direction."""
    if isinstance(release, LaplaceRelease):
        return release.count * release.shift / release.scale
    own, other = cell_probabilities(release.cells, release.odds)
    if release.exchanged:
        return release.count * math.log(own / other)
    return release.count * max(math.log(release.cells * own), -math.log(release.cells * other))


def _delta_at(epsilon: float, noise_multiplier: float | None) -> float:
    """Return the Gaussian's delta, for an epsilon of either sign."""
    if epsilon >= 0:
        if noise_multiplier is None:
            return 0.0
        return gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier)
    # Of P and Q exchanged: delta(-x) = 1 - exp(-x) (1 - delta'(x)), and a Gaussian's is symmetric.
    reverse = 0.0
    if noise_multiplier is not None:
        reverse = gaussian_delta(epsilon=-epsilon, noise_multiplier=noise_multiplier)
    return -math.expm1(epsilon) + math.exp(epsilon) * reverse


def _symbol_losses(release: SymbolRelease) -> Float64[np.ndarray, " outcomes"]:
    """Return the probabilities of a symbol's losses -l, 0 and l.

    One removal may empty a row and leave a record to itself in another, and what is asked for may
    depend on the answers: so both directions have one pair. The direction with the larger loss l
    has the larger delta at every epsilon > 0, and both have the same delta d at 0; the first loss
    has probability ``d / (e^l - 1)``.
    """
    own, other = cell_probabilities(release.cells, release.odds)
    reached = own - (other if release.exchanged else 1 / release.cells)
    least = reached / math.expm1(largest_loss(release))
    return np.array([least, max(0.0, 1 - reached - 2 * least), reached + least])


def _laplace_losses(release: LaplaceRelease) -> Float64[np.ndarray, " outcomes"]:
    """Return the probabilities of a sum's losses, between -l and l, if it moves by all of shift.

    Both directions have the same ones. Of a number that is x steps towards where the unit leads,
    the loss is ``(2 x - shift) / scale``, with x within 0 and shift.
    """
    decay = -1 / release.scale
    losses = np.exp(decay * np.arange(release.shift, -1.0, -1.0)) / (1 + math.exp(decay))
    losses[1:-1] *= -math.expm1(decay)
    return losses


def _losses_of_one(release: PureRelease) -> Float64[np.ndarray, " outcomes"]:
    if isinstance(release, LaplaceRelease):
        return _laplace_losses(release)
    return _symbol_losses(release)


@lru_cache(maxsize=256)
def _losses(releases: tuple[PureRelease, ...]) -> _Losses:
    """Return the losses of a pair of outputs that is at least as far apart as any two worlds."""
    counts = Counter[PureRelease]()
    for release in releases:
        counts[replace(release, count=1)] += release.count
    whole = np.array([[1.0], [0.0]])
    for single, count in counts.items():
        steps = single.shift if isinstance(single, LaplaceRelease) else 2
        if steps * count >= _MOST_OUTCOMES:
            # The largest loss for certain is an upper bound.
            composed = np.array([[1.0], [count * largest_loss(single)]])
        else:
            each = _losses_of_one(single)
            probabilities = each
            for _ in range(count - 1):
                probabilities = np.convolve(probabilities, each)
            places = np.arange(len(probabilities)) - steps * count / 2
            composed = np.stack([probabilities, largest_loss(single) / (steps / 2) * places])
        whole = _coarsened(
            np.stack(
                [
                    np.multiply.outer(whole[0], composed[0]).ravel(),
                    np.add.outer(whole[1], composed[1]).ravel(),
                ]
            )
        )
    return whole


def _coarsened(whole: _Losses) -> _Losses:
    """Return losses rounded up to few enough values."""
    probabilities, losses = whole
    if len(losses) <= _MOST_OUTCOMES:
        return whole
    values = np.linspace(losses.min(), losses.max(), _MOST_OUTCOMES)
    places = np.searchsorted(values, losses)
    return np.stack([np.bincount(places, probabilities, minlength=_MOST_OUTCOMES), values])
