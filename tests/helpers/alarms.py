"""Tests of noise and of secret samples, each with a false-alarm probability of at most 1e-11.

Sums of squares are compared by chi-square, counts by the binomial, sums of neighbours' products by
Chernoff's bound: ``log E exp(t sum x_i x_(i+1))`` of n standard normal numbers is at most
``-n/2 log((1 + sqrt(1 - 4 t^2)) / 2)``, which puts 1.15 of the normal quantile below it from 900
numbers on.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.stats import binom, chi2, norm
from torch import Tensor

FALSE_ALARM: Final = 1e-11
QUANTILE: Final = float(norm.isf(FALSE_ALARM / 2))
_FEWEST: Final = 900

Sample = npt.NDArray[np.bool_]


class Alarm(Exception):
    """Noise or a sample is not what was promised; the text is the name of the test."""


def require_noise(noise: Tensor, std: float, *, slack: float = 0.0) -> None:
    """Require independent numbers of one deviation.

    Args:
        noise: The numbers; along every axis neighbours must be unrelated.
        std: What their deviation must be.
        slack: How far, relatively, what is known of their length may be off.

    Raises:
        Alarm: "size" or "order".
    """
    values, count = noise.double() / std, noise.numel()
    squares = float(values.square().sum())
    least, most = chi2.ppf(FALSE_ALARM / 2, count), chi2.isf(FALSE_ALARM / 2, count)
    if not least * (1 - slack) ** 2 <= squares <= most * (1 + slack) ** 2:
        raise Alarm(f"size: {math.sqrt(squares / count):.4f} of the deviation, {count} numbers")
    for axis, length in enumerate(values.shape):
        one, other = values.narrow(axis, 0, length - 1), values.narrow(axis, 1, length - 1)
        reach = 1.15 * QUANTILE * math.sqrt(one.numel()) * (1 + slack) ** 2
        if one.numel() >= _FEWEST and not abs(float((one * other).sum())) <= reach:
            raise Alarm(f"order: neighbours along axis {axis} are related")


def require_samples(samples: Sequence[Sample], others: Sequence[Sample], rate: float) -> None:
    """Require Poisson samples, each drawn afresh, here and in a second build.

    Args:
        samples: Of one build's rounds, in their order.
        others: Of the other's.
        rate: q, with which every record is in each of them.

    Raises:
        Alarm: "rate" or "fresh".
    """
    # First, since one sample many times is often off in its rate too.
    every = [one.tobytes() for one in (*samples, *others)]
    if len(set(every)) != len(every):
        raise Alarm("fresh: a sample came twice")
    require_count(np.stack(samples), rate, name="rate")
    # A record is in two samples with probability q^2; pairs without a common sample are unrelated.
    both = [one & other for one, other in zip(samples, others, strict=True)]
    require_count(np.stack(both), rate**2, name="fresh")
    for first in (0, 1):
        rounds = list(zip(samples[first::2], samples[first + 1 :: 2], strict=False))
        if rounds:
            require_count(np.stack([one & other for one, other in rounds]), rate**2, name="fresh")


def require_count(found: Sample, rate: float, *, name: str) -> None:
    """Require as many as a binomial gives.

    Raises:
        Alarm: By that name.
    """
    least, most = (
        binom.ppf(FALSE_ALARM / 2, found.size, rate),
        binom.isf(FALSE_ALARM / 2, found.size, rate),
    )
    if not least <= found.sum() <= most:
        raise Alarm(f"{name}: {found.mean():.4f} instead of {rate:.4f}")


def require_new(blocks: Sequence[npt.NDArray[np.int32]]) -> None:
    """Require that no 16 numbers in a row come twice.

    16 numbers of at least 64 units have more than 128 bits: a million such words differ, but for
    one chance in 1e26.

    Raises:
        Alarm: "twice".
    """
    words = [
        word.tobytes()
        for block in blocks
        for word in block[: len(block) // 16 * 16].reshape(-1, 16)
    ]
    if len(set(words)) != len(words):
        raise Alarm(f"twice: {len(words) - len(set(words))} of {len(words)} words")
