"""Release of the primary's labels to secondaries: its epsilon, and the mechanisms that keep it.

Neighbouring tables differ in the label of one row, which is exchanged for another. There are two
kinds of mechanism:

- Classes drawn once by randomised response and sent to every secondary alike. One epsilon holds
  against all secondaries together.
- Noise drawn for each secondary: its epsilon holds against that secondary, at a delta. Against k
  secondaries together it counts as k releases.
"""

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Final, Literal

import numpy as np
from jaxtyping import Int64, Shaped, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import composed_multiplier, gaussian_epsilon, gaussian_noise_multiplier

SMALLEST_EPSILON: Final = 1e-6
"""Smallest epsilon of labels; below it the labels carry no information."""

LabelMechanism = Literal["randomised", "shares", "plaintext"]
"""How labels reach secondaries: classes by ``randomised`` response, drawn once for all;
``shares``, sums over rows with a Gaussian for each secondary; ``plaintext``, as they are."""


def labels_together(epsilon: float, delta: float, parties: int) -> float:
    """Return epsilon of labels against ``parties`` secondaries that pool what each received.

    Args:
        epsilon: Privacy-loss bound against one of them, in nats, > 0.
        delta: Failure probability of both bounds, in (0, 1).
        parties: ``k``, at least 1.

    Raises:
        ConfigError: If an argument is out of range.

    References:
        [DRS19] Corollary 3.3: k releases of ``mu`` are one of ``sqrt(k) mu``.

    Examples:
        >>> round(labels_together(2.0, 1e-5, 4), 2)
        4.49
    """
    checks.whole_from(1, parties=parties)
    multiplier = gaussian_noise_multiplier(epsilon=epsilon, delta=delta) / math.sqrt(parties)
    return max(gaussian_epsilon(delta=delta, noise_multiplier=multiplier), epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelRelease:
    """Labels that a run releases to secondaries, as recorded in the ledger."""

    mechanism: LabelMechanism
    """How the labels are protected."""
    epsilon: checks.Positive | None
    """Privacy-loss bound against one secondary, in nats; None for labels that are shown."""
    delta: float
    """Failure probability of ``epsilon``; 0 for randomised and shown labels."""
    parties: checks.Count
    """Secondaries that receive the labels."""
    digest: str = ""
    """SHA-256 of labels that are drawn once and sent again on resuming; empty for others."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if (self.epsilon is None) != (self.mechanism == "plaintext"):
            raise ConfigError("an epsilon of labels belongs to all mechanisms but 'shown'")
        if self.gaussian:
            checks.open_unit(delta=self.delta)
        elif self.delta != 0:
            raise ConfigError(f"labels that are {self.mechanism} have no delta")

    @property
    def gaussian(self) -> bool:
        """Whether noise keeps the promise, at a delta."""
        return self.mechanism == "shares"

    @property
    def together(self) -> float | None:
        """Epsilon against all secondaries together; None for labels that are shown."""
        if not self.gaussian or self.epsilon is None:
            return self.epsilon
        return labels_together(self.epsilon, self.delta, self.parties)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTotal:
    """Total privacy loss of several label releases."""

    epsilon: float | None
    """Against one secondary that received all of them; None if labels were shown."""
    together: float | None
    """Against all secondaries together; None if labels were shown."""
    delta: float
    """Failure probability of both: the smallest of the releases with noise, else 0."""


def labels_total(releases: Iterable[LabelRelease]) -> LabelTotal | None:
    """Return the total privacy loss of label releases; None if there are none.

    Gaussian releases compose exactly, by adding the squares of ``mu``; epsilons of randomised
    labels are added to the result.

    References:
        [DRS19] Corollary 3.3; basic composition, [DR14] Theorem 3.16.
    """
    all_of_them = list(releases)
    if not all_of_them:
        return None
    noised = [release for release in all_of_them if release.gaussian]
    delta = min((release.delta for release in noised), default=0.0)
    if any(release.mechanism == "plaintext" for release in all_of_them):
        return LabelTotal(epsilon=None, together=None, delta=delta)
    if len(all_of_them) == 1:
        # As it was asked for, which its noise gives back but for the last digits.
        (only,) = all_of_them
        return LabelTotal(epsilon=only.epsilon, together=only.together, delta=delta)
    pure = math.fsum(release.epsilon or 0.0 for release in all_of_them if not release.gaussian)
    alone = [
        gaussian_noise_multiplier(epsilon=release.epsilon or 0.0, delta=release.delta)
        for release in noised
    ]
    joint = [z / math.sqrt(release.parties) for z, release in zip(alone, noised, strict=True)]
    if not noised:
        return LabelTotal(epsilon=pure, together=pure, delta=delta)
    return LabelTotal(
        epsilon=pure + gaussian_epsilon(delta=delta, noise_multiplier=composed_multiplier(*alone)),
        together=pure + gaussian_epsilon(delta=delta, noise_multiplier=composed_multiplier(*joint)),
        delta=delta,
    )


_BITS: Final = 63
_SLOTS: Final = 1 << _BITS
# 40 digits more than a weight has, always rounded up.
_EXACT: Final = Context(prec=60, rounding=ROUND_CEILING)
# e^44 is more than there are slots: beyond it a class other than the true one keeps a single slot.
_LARGEST_EPSILON: Final = 44.0

# With so many, rounding up leaves the true class more slots than any other.
_MOST_CLASSES: Final = 1_000_000


def randomised_labels(
    bins: Int64[np.ndarray, " rows"], classes: int, epsilon: float
) -> Int64[np.ndarray, " rows"]:
    """Return classes by K-ary randomised response.

    Every row draws one of 2^63 slots from the system's random source: w of them for each class but
    the true one, all others for that. With ``w = ceil(2^63 / (e^epsilon + K - 1))`` no class is
    more than e^epsilon times as likely under one label as under another. All numbers are whole, so
    nothing is approximated.

    Args:
        bins: Classes from 0 to K - 1; K stays K, for a row that is not for learning.
        classes: K, at least 2.
        epsilon: Of one row's label, > 0.

    Raises:
        ConfigError: If an argument is out of range.

    Reveals:
        To the readers of the result: each class within epsilon, and which rows have no class.

    References:
        [W65] for two classes, [KBR16] for K.
    """
    return turn_classes(bins, classes, epsilon, np.frombuffer(os.urandom(8 * len(bins)), np.uint64))


def turn_classes(
    bins: Int64[np.ndarray, " rows"],
    classes: int,
    epsilon: float,
    words: UInt64[np.ndarray, " rows"],
) -> Int64[np.ndarray, " rows"]:
    """Return classes by K-ary randomised response to given uniform numbers, one a row.

    See :func:`randomised_labels`, which draws them.

    Raises:
        ConfigError: If an argument is out of range.
    """
    _, weight = slots(epsilon, classes)
    known = bins < classes
    if ((bins < 0) | (bins > classes)).any():
        raise ConfigError(f"bins: must be classes from 0 to {classes - 1}, or {classes} for none")
    turned = (words >> np.uint64(64 - _BITS)).astype(np.int64) // weight + 1
    turned[turned >= classes] = 0
    return np.where(known, (bins + turned) % classes, bins).astype(np.int64)


def keep_probability(epsilon: float, classes: int) -> float:
    """Return the probability that :func:`randomised_labels` keeps a class.

    Every other class comes with probability ``(1 - p) / (K - 1)``.

    Args:
        epsilon: Of one row's label, > 0.
        classes: K, at least 2.

    Returns:
        ``p = e^epsilon / (e^epsilon + K - 1)``, less at most ``K 2^-63``, as it is drawn.

    Raises:
        ConfigError: If an argument is out of range.

    Examples:
        >>> round(keep_probability(2.0, 10), 4)
        0.4509
    """
    return slots(epsilon, classes)[0] / _SLOTS


def slots(epsilon: float, classes: int) -> tuple[int, int]:
    """Return how many of 2^63 slots the true class has, and how many each other class.

    The first is at most e^epsilon times the second, which is the guarantee.

    Args:
        epsilon: Of one row's label, at least 1e-6; above 44 the slots are those of 44.
        classes: K, from 2 to a million.

    Raises:
        ConfigError: If an argument is out of range.
    """
    checks.at_least(SMALLEST_EPSILON, epsilon=epsilon)
    checks.whole_from(2, classes=classes)
    if classes > _MOST_CLASSES:
        raise ConfigError(f"classes must be at most {_MOST_CLASSES}, got {classes}")
    # Below e^epsilon, as decimals are rounded to the nearest here.
    factor = Decimal(min(epsilon, _LARGEST_EPSILON)).exp(_EXACT).next_minus(_EXACT)
    other = math.ceil(_EXACT.divide(Decimal(_SLOTS), factor + (classes - 1)))
    return _SLOTS - (classes - 1) * other, other


def digest_of_labels(labels: Shaped[np.ndarray, " rows"]) -> str:
    """Return the SHA-256 by which a ledger recognises labels that it has released before."""
    return hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()
