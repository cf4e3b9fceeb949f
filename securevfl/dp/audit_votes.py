"""Are class sums noised, and labels drawn, as promised? Tests on what each side gets to see.

A primary sees a secondary's class sums behind the secondary's noise, and is set on one record,
added or removed. The secondary sees them behind the primary's noise, as it knows its own, and is
set on one label, exchanged. Scores are 0 in the one world and 1 in the other, up to noise. Labels
by randomised response are counted.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int64
from scipy import stats

from securevfl.dp.audit_power import (
    correlation_power,
    counting_power,
    error_bound,
    variance_bounds,
)
from securevfl.dp.audit_statistics import AuditTest, distinguishability, round_correlation

# Sums that are compared with one another.
_COMPARED: Final = 8
# Chance of either count of labels to be beyond what the power is stated for.
_UNLIKELY: Final = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SumsSeen:
    """What one side saw of class sums."""

    noise: float
    """Deviation that is promised, over the change that is to be hidden; in [0.25, 8]."""

    residual: Float[np.ndarray, "sums bins numbers"]
    """Sums minus what they would be without noise, over the same change."""

    scores: Float[np.ndarray, "sums changes"]
    """Of every change that may have been made: 0 on average if it was not, 1 if it was."""

    made: Bool[np.ndarray, " changes"]
    """Which were."""


def sums_tests(seen: SumsSeen, *, what: str) -> list[AuditTest]:
    """Test the noise of class sums, and how well one change of the data is told apart.

    Args:
        seen: By one side.
        what: ``record`` or ``label``; names the tests.
    """
    noise = seen.residual / seen.noise
    count = noise.size
    low, _ = variance_bounds(count)
    compared = noise[:_COMPARED]
    pairs, lines = compared[0].size, compared.shape[1]
    tests = len(compared) * (len(compared) - 1) // 2 * (2 * lines - 1)
    told = [seen.scores[:, seen.made == made] for made in (False, True)]
    trials = min(one.size for one in told)
    return [
        AuditTest(
            name=f"{what}_noise_not_too_small",
            statistic=float(np.mean(noise**2)),
            threshold=low,
            passes_if="at least",
            power=float(stats.chi2.cdf(4 * low * count, count)),
            against=f"half the noise on what a {what} changes",
        ),
        AuditTest(
            name=f"{what}s_not_too_distinguishable",
            statistic=distinguishability(*told),
            threshold=1 / seen.noise,
            passes_if="at most",
            power=counting_power(seen.noise, trials),
            against=f"half the noise on what a {what} changes",
        ),
        AuditTest(
            name=f"{what}_sums_have_own_noise",
            statistic=round_correlation(compared),
            threshold=1.0,
            passes_if="at most",
            power=correlation_power(pairs, shared=pairs, parties=1, tests=tests),
            against="one sum's noise is added to the next one again",
        ),
    ]


def labels_needed(epsilon: float, *, classes: int) -> int:
    """Return how many rows of each of two labels catch twice the epsilon nearly surely.

    Args:
        epsilon: Of one label, that randomised response promises.
        classes: K.
    """
    rows = 64
    while not _caught(epsilon, classes, rows):
        rows *= 2
    return rows


def drawn_tests(
    first: Int64[np.ndarray, " rows"],
    second: Int64[np.ndarray, " rows"],
    again: Int64[np.ndarray, " both"],
    *,
    epsilon: float,
    classes: int,
) -> list[AuditTest]:
    """Test labels by randomised response.

    Args:
        first: What rows of class 0 were drawn as.
        second: What as many rows of class 1 were drawn as.
        again: What the run tells of both when it is resumed, class 0 first.
        epsilon: That is promised.
        classes: K.
    """
    rows = len(first)
    lower = 1 - float(error_bound(int((first != 0).sum()), rows))
    upper = float(error_bound(int((second == 0).sum()), rows))
    agree = _kept(epsilon, classes) ** 2 + (1 - _kept(epsilon, classes)) ** 2 / (classes - 1)
    return [
        AuditTest(
            name="drawn_not_too_distinguishable",
            statistic=max(0.0, math.log(max(lower, 1e-300) / upper)),
            threshold=epsilon,
            passes_if="at most",
            power=1 - 2 * _UNLIKELY if _caught(epsilon, classes, rows) else 0.0,
            against="labels are kept as often as twice their epsilon allows",
        ),
        AuditTest(
            name="drawn_told_again_alike",
            statistic=float((np.concatenate([first, second]) != again).sum()),
            threshold=0.0,
            passes_if="at most",
            power=1 - agree ** (2 * rows),
            against="labels are drawn again when a run is resumed",
        ),
    ]


def _kept(epsilon: float, classes: int) -> float:
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _caught(epsilon: float, classes: int, rows: int) -> bool:
    """Whether so many rows catch twice the epsilon, but in a share of 2 _UNLIKELY of audits."""
    kept = _kept(2 * epsilon, classes)
    turned = int(stats.binom.isf(_UNLIKELY, rows, 1 - kept))
    taken = int(stats.binom.isf(_UNLIKELY, rows, (1 - kept) / (classes - 1)))
    lower, upper = 1 - float(error_bound(turned, rows)), float(error_bound(taken, rows))
    return lower > upper * math.exp(epsilon)
