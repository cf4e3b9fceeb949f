"""Labels that secondaries may see: classes by randomised response, numbers behind noise.

Both are drawn once a run, and told to every secondary alike; :mod:`securevfl.dp.label_release` says
what that costs.
"""

import hashlib
import math
import os
from decimal import ROUND_CEILING, Context, Decimal
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.label_release import SMALLEST_EPSILON, label_noise_multiplier
from securevfl.dp.ring_noise import ExactDiscreteGaussian

_BITS: Final = 63
_SLOTS: Final = 1 << _BITS
# 40 digits more than a weight has, always rounded up.
_EXACT: Final = Context(prec=60, rounding=ROUND_CEILING)
# e^44 is more than there are slots: beyond it a class other than the true one keeps a single slot.
_LARGEST_EPSILON: Final = 44.0

# With so many, rounding up leaves the true class more slots than any other.
_MOST_CLASSES: Final = 1_000_000

_RANGE_BITS: Final = 16
_MOST_STD_BITS: Final = 26


def randomised_labels(
    bins: Int64[np.ndarray, " rows"], classes: int, epsilon: float
) -> Int64[np.ndarray, " rows"]:
    """Return classes by K-ary randomised response: the true one, or any other, by fresh bits.

    Every row draws one of 2^63 slots from the system's random source: w of them for each class but
    the true one, all others for that. With ``w = ceil(2^63 / (e^epsilon + K - 1))`` no class is
    more than e^epsilon times as likely under one label than under another. All of it is whole
    numbers, so nothing is approximated.

    Args:
        bins: Classes from 0 to K - 1; K stays K, for a row that is not for learning.
        classes: K, at least 2.
        epsilon: Of one row's label, > 0.

    Raises:
        ConfigError: If an argument is out of range.

    Reveals:
        To whoever reads the result: each class within epsilon, and which rows have none.

    References:
        [W65] for two classes, [KBR16] for K.
    """
    _, weight = slots(epsilon, classes)
    known = bins < classes
    if ((bins < 0) | (bins > classes)).any():
        raise ConfigError(f"bins: must be classes from 0 to {classes - 1}, or {classes} for none")
    drawn = np.frombuffer(os.urandom(8 * len(bins)), np.uint64) >> np.uint64(64 - _BITS)
    turned = drawn.astype(np.int64) // weight + 1
    turned[turned >= classes] = 0
    return np.where(known, (bins + turned) % classes, bins).astype(np.int64)


def keep_probability(epsilon: float, classes: int) -> float:
    """Return how likely :func:`randomised_labels` leaves a class as it is.

    Every other class comes with probability ``(1 - p) / (K - 1)``.

    Args:
        epsilon: Of one row's label, > 0.
        classes: K, at least 2.

    Returns:
        ``p = e^epsilon / (e^epsilon + K - 1)``, less by at most ``K 2^-63``: what is really drawn.

    Raises:
        ConfigError: If an argument is out of range.

    Examples:
        >>> round(keep_probability(2.0, 10), 4)
        0.4509
    """
    return slots(epsilon, classes)[0] / _SLOTS


def slots(epsilon: float, classes: int) -> tuple[int, int]:
    """Return how many of 2^63 slots the true class has, and how many each other one.

    The first is at most e^epsilon times the second: that is the whole of the promise.

    Args:
        epsilon: Of one row's label, at least 1e-6; above 44 the promise is that of 44.
        classes: K, from 2 to a million.

    Raises:
        ConfigError: If an argument is out of range.
    """
    checks.at_least(SMALLEST_EPSILON, epsilon=epsilon)
    checks.whole(classes=classes)
    checks.at_least(2, classes=classes)
    if classes > _MOST_CLASSES:
        raise ConfigError(f"classes must be at most {_MOST_CLASSES}, got {classes}")
    # Below e^epsilon, as decimals are rounded to the nearest here.
    factor = Decimal(min(epsilon, _LARGEST_EPSILON)).exp(_EXACT).next_minus(_EXACT)
    other = math.ceil(_EXACT.divide(Decimal(_SLOTS), factor + (classes - 1)))
    return _SLOTS - (classes - 1) * other, other


def noised_labels(
    values: Float64[np.ndarray, " rows"],
    *,
    lower: float,
    upper: float,
    epsilon: float,
    delta: float,
) -> Float64[np.ndarray, " rows"]:
    """Return numbers cut to a range, each with Gaussian noise of its own.

    The range is cut into 2^16 steps (fewer where epsilon is so small that the noise passes 2^26 of
    them), and the noise is the exact discrete Gaussian of these.

    Args:
        values: Labels of rows.
        lower: Least label that counts; what is below is raised to it.
        upper: Largest that counts, above ``lower``. Neither may be taken from the labels.
        epsilon: Of one row's label, > 0.
        delta: At which it holds, in (0, 1).

    Raises:
        ConfigError: If an argument is out of range.

    Reveals:
        To whoever reads the result: each label within (epsilon, delta).
    """
    if not (math.isfinite(lower) and math.isfinite(upper) and lower < upper):
        raise ConfigError(f"labels: the range must go up, got {lower!r} to {upper!r}")
    multiplier = label_noise_multiplier(epsilon, delta)
    bits = min(_RANGE_BITS, _MOST_STD_BITS - math.ceil(math.log2(multiplier)))
    if bits < 1:
        raise ConfigError(f"epsilon = {epsilon!r} of labels is too small for their noise")
    steps = 1 << bits
    unit = (upper - lower) / steps
    whole = np.rint((np.clip(values, lower, upper) - lower) / unit)
    noise = ExactDiscreteGaussian(multiplier * steps).sample(values.shape).numpy()
    return np.asarray(lower + unit * (whole + noise), dtype=np.float64)


def unbiased_indicators(
    labels: Int64[np.ndarray, " rows"], *, classes: int, epsilon: float
) -> Float64[np.ndarray, "rows classes"]:
    """Return numbers whose mean over the randomness is 1 for the true class and 0 for others.

    Args:
        labels: What :func:`randomised_labels` returned, of rows that have a class.
        classes: K.
        epsilon: By which they were drawn.

    Returns:
        ``(e_label - q) / (p - q)``; every row sums to 1.
    """
    kept = keep_probability(epsilon, classes)
    other = (1 - kept) / (classes - 1)
    shown = np.eye(classes)[labels]
    return np.asarray((shown - other) / (kept - other), dtype=np.float64)


def digest_of_labels(labels: Shaped[np.ndarray, " rows"]) -> str:
    """Return the digest by which a ledger knows labels that were told before."""
    return hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest()
