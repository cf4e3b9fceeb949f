"""Laplace sums: secondaries' scores behind one discrete Laplace noise that all of them make.

A record's score is a whole number of grid units, at most D; with several classes, its vote is 1 at
the class that it is most like. Every secondary adds the difference of two Polya (negative binomial)
numbers of shape 1/h to each number of a row. Shares of h secondaries add up to

    P(x) = (1 - a) / (1 + a) a^|x|,    a = exp(-1 / scale),

so with h = k - c those of any k secondaries hide a record though c of them subtract their own. The
primary sees the sum alone, and its noise does not grow with k. The noise level is the scale b of
that law over the largest number of a record: 0 is none.

References:
    [AC11] Acs and Castelluccia: Laplace noise as a sum of shares. [GX15] Goryczka and Xiong, and
    [BBGN20] Balle, Bell, Gascon and Nissim: discrete shares.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Float64, Int64

from securevfl.core import checks
from securevfl.dp.events import LaplaceRelease, ScoreKind
from securevfl.dp.symbols import mean_records

GRID: Final = 16
"""D, grid units of the largest score."""

_STRETCH: Final = 1.25
"""A score of rank r is ``1.25 (2 r - 1)``, within [-1, 1]: the outermost tenths count alike."""

_TAIL_BITS: Final = 256
MOST_SCALE: Final = 4096.0
"""Largest scale of a sampling table, in grid units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaplacePlan:
    """Laplace sums that a run releases, by its plan alone."""

    classes: checks.Count | None = None
    """Number of classes, where a record votes for one; None: a record has a score."""

    exchanged: bool
    """Whether a removed record can bring another one forward in its row; else the row becomes one
    without a record, which costs less."""

    kind: ClassVar[ScoreKind] = "laplace"
    """Name of the release."""

    most_noise: ClassVar[float] = math.inf
    """Noise level from which on nothing is left."""

    def __post_init__(self) -> None:
        if self.classes is not None:
            checks.whole_from(2, classes=self.classes)

    @property
    def largest(self) -> int:
        """Grid units of the largest number of a record."""
        return GRID if self.classes is None else 1

    def grid_step(self, clip_norm: float) -> float:
        """Return the value of a grid unit: a power of two, so that floats hold whole ones exactly.

        Args:
            clip_norm: C, which no row is over or near enough to be scaled.
        """
        return 2.0 ** math.floor(math.log2(clip_norm * (1 - 2.0**-16) / self.largest))

    def release(self, scale: float, *, rows: int, parties: int) -> LaplaceRelease:
        """Return the event of the rows of the sum that one unit touches.

        Records of one unit at several secondaries may be in one row. One number that moves by the
        whole is then at least as telling as many that move by parts.

        Args:
            scale: Noise level b, > 0.
            rows: Rows that the unit touches at each secondary.
            parties: Secondaries at which it has a record.
        """
        shift, count = self.largest, rows
        if self.exchanged and self.classes is None:
            shift *= 2
        elif self.exchanged:
            # A vote leaves one class and goes to another one.
            count *= 2
        if parties > 1:
            shift, count = shift * count * parties, 1
        return LaplaceRelease(shift=shift, scale=scale * self.largest, count=count)

    def surviving_share(self, scale: float, *, honest: int = 1) -> float:
        """Return the share of variance that the sum explains of all secondaries' normal scores.

        Scores are independent, and read linearly: each secondary adds its score and its share. Of
        classes, which are equally likely, it is the share of one class's number of votes.

        Args:
            scale: Noise level b; 0 without noise.
            honest: h, secondaries whose shares add up to the whole noise.
        """
        if scale * self.largest > MOST_SCALE:
            return 0.0
        noise = share_variance(scale * self.largest, honest) if scale else 0.0
        if self.classes is not None:
            votes = (self.classes - 1) / self.classes**2
            return votes / (votes + noise)
        steps = np.arange(1, GRID + 1)
        # Ranks, and normal scores, from which on a score has so many steps.
        ranks = (1 + steps / (_STRETCH * GRID)) / 2
        density = np.exp(-np.square(scipy.special.ndtri(ranks)) / 2) / math.sqrt(2 * math.pi)
        covariance = 2 * float(density.sum())
        variance = 2 * float(((2 * steps - 1) * (1 - ranks)).sum())
        return covariance**2 / (variance + noise)


def share_variance(scale: float, honest: int) -> float:
    """Return the variance of one secondary's share, in grid units.

    Args:
        scale: Of the whole noise, in grid units, > 0.
        honest: h.
    """
    half = 1 / (2 * scale)
    # Beyond it a float has no such small number.
    return 0.0 if half > 350 else 1 / (2 * math.sinh(half) ** 2 * honest)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridScores:
    """One secondary's rows in whole grid units, before noise."""

    plan: LaplacePlan
    unit: float
    """Value of a record whose normal score is 1."""

    def units_of(
        self, values: Float64[np.ndarray, "rows slots numbers"]
    ) -> Int64[np.ndarray, "rows numbers"]:
        """Return each row's score, rounded towards zero, or its vote; 0 for one without a record.

        Args:
            values: As :func:`securevfl.dp.symbols.mean_records` takes them.
        """
        mean, known = mean_records(values, exchanged=self.plan.exchanged)
        if self.plan.classes is not None:
            votes = np.eye(mean.shape[1], dtype=np.int64)[mean.argmax(axis=1)]
            return votes * known[:, None]
        scores = _STRETCH * (2 * scipy.special.ndtr(mean / self.unit) - 1)
        units: Int64[np.ndarray, "rows numbers"] = (GRID * np.clip(scores, -1, 1)).astype(np.int64)
        return units * known[:, None]


def reach(scale: float) -> int:
    """Return the largest Polya number that a table has.

    Weights fall by a or faster, so that those beyond n have at most ``a^(n + 1) / (1 - a)``.
    """
    return math.ceil(scale * (_TAIL_BITS * math.log(2) - math.log(-math.expm1(-1 / scale))))
