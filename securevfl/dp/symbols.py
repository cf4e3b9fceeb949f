"""Symbols: a released score's cell, or a record's class, by M-ary randomised response.

The rank of a record's score falls into one of M cells of equal probability; with several classes,
M is their number, and a record's cell is the class that it is most like. A secondary sends that
cell with probability p, and any other with probability q; a row without a record sends a uniform
cell. Cells are drawn by :func:`securevfl.dp.labels.turn_classes`, in whole numbers, which follow
from a secret and the row's key: so rows of one key have one symbol, whenever they are asked for.
The noise level of symbols is the odds ``q / p``: 0 is none, and 1 leaves nothing of the score.

Against one number behind Gaussian noise, nearly all of whose epsilon goes into a tail of
probability delta, a symbol has a bounded privacy loss (docs/privacy.md, section 3).

References:
    [W65] Warner, for two cells. [KBR16] Kairouz, Bonawitz and Ramage, for M.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import scipy  # special functions load when they are first named
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from jaxtyping import Bool, Float64, Int64, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp.events import ScoreKind, SymbolRelease
from securevfl.dp.labels import SMALLEST_EPSILON, slots, turn_classes

CELLS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 64)
"""Numbers of cells that a plan may choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SymbolPlan:
    """Symbols that a run releases, by its plan alone."""

    cells: checks.Count
    """M, number of cells; of scores, one of :data:`CELLS`."""

    classes: bool = False
    """Whether a cell is a class, and not a range of scores."""

    exchanged: bool
    """Whether a removed record can bring another one forward in its row; else the row becomes one
    without a record, which costs less."""

    kind: ClassVar[ScoreKind] = "symbols"
    """Name of the release."""

    most_noise: ClassVar[float] = 1.0
    """Noise level from which on nothing is left."""

    def __post_init__(self) -> None:
        if self.classes:
            checks.whole_from(2, cells=self.cells)
        elif self.cells not in CELLS:
            raise ConfigError(f"cells: must be one of {CELLS}, got {self.cells!r}")

    def release(self, odds: float, *, rows: int, parties: int) -> SymbolRelease:
        """Return the event of the symbols of rows that one unit touches.

        Each party draws its own symbols, so neither others' noise nor colluders matter.

        Args:
            odds: Noise level, > 0.
            rows: Rows that the unit touches at each secondary.
            parties: Secondaries at which it has a record.
        """
        return SymbolRelease(
            cells=self.cells, odds=odds, exchanged=self.exchanged, count=rows * parties
        )

    def surviving_share(self, odds: float, *, honest: int = 1) -> float:
        """Return the share of a normal score's variance, or of a class's, that symbols explain.

        The posterior mean of a score is ``(p - q)`` times the mean score of the symbol's cell. Of a
        sum over secondaries as much survives, since each symbol has randomness of its own.

        Args:
            odds: Noise level; 0 without noise.
            honest: Secondaries that do not collude, who do not matter here.

        Returns:
            ``(p - q)^2``; of scores, times the mean square of :func:`normal_scores`.
        """
        del honest
        own, other = cell_probabilities(self.cells, odds) if odds else (1.0, 0.0)
        within = 1.0 if self.classes else float(np.mean(normal_scores(self.cells) ** 2))
        return (own - other) ** 2 * within


def cell_probabilities(cells: int, odds: float) -> tuple[float, float]:
    """Return p and q, the probabilities of a record's own cell and of any other.

    Args:
        cells: M.
        odds: Noise level ``q / p``, above 0, at most 1.

    Raises:
        ConfigError: If an argument is out of range.
    """
    checks.rate(odds=odds)
    own, other = slots(_log_ratio(odds), cells)
    whole = own + (cells - 1) * other
    return own / whole, other / whole


def normal_scores(cells: int) -> Float64[np.ndarray, " cells"]:
    """Return the mean of a standard normal number in each of M cells of equal probability."""
    inner = scipy.special.ndtri(np.arange(1, cells) / cells)
    density = np.concatenate([[0.0], np.exp(-inner * inner / 2) / math.sqrt(2 * math.pi), [0.0]])
    return cells * (density[:-1] - density[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class SymbolNoise:
    """One secondary's randomised response on the cells of its rows."""

    plan: SymbolPlan
    odds: float
    """Noise level ``q / p``, above 0, at most 1."""
    unit: float
    """Value of a record whose normal score is 1."""

    def __post_init__(self) -> None:
        cell_probabilities(self.plan.cells, self.odds)

    def cells_of(
        self, values: Float64[np.ndarray, "rows slots numbers"]
    ) -> Int64[np.ndarray, " rows"]:
        """Return the cell of each row: of its score, or its class; -1 for a row without a record.

        Args:
            values: As :func:`mean_records` takes them.
        """
        mean, known = mean_records(values, exchanged=self.plan.exchanged)
        if self.plan.classes:
            cells = mean.argmax(axis=1)
        else:
            edges = scipy.special.ndtri(np.arange(1, self.plan.cells) / self.plan.cells)
            cells = np.searchsorted(edges * self.unit, mean[:, 0], side="right")
        return np.where(known, cells, -1).astype(np.int64)

    def draw(
        self, cells: Int64[np.ndarray, " rows"], keys: Int64[np.ndarray, " rows"], *, secret: bytes
    ) -> Int64[np.ndarray, " rows"]:
        """Return each row's symbol, from 0 to M - 1.

        Args:
            cells: From :meth:`cells_of`.
            keys: A number for each row's key; equal ones have equal cells, and get equal symbols.
            secret: 32 random bytes, of this release alone.

        Reveals:
            To readers of the result: each row's symbol, as
            :class:`securevfl.dp.events.SymbolRelease` says.
        """
        words = uniform_words(secret, keys, draw=0)
        uniform, count = words[:, 1].copy(), 0
        # Numbers that would favour some cells are drawn again.
        last = np.uint64(2**64 - 1 - 2**64 % self.plan.cells)
        while (again := uniform > last).any():
            count += 1
            uniform[again] = uniform_words(secret, keys[again], draw=count)[:, 1]
        absent = (uniform % np.uint64(self.plan.cells)).astype(np.int64)
        known = np.where(cells < 0, absent, cells)
        return turn_classes(known, self.plan.cells, _log_ratio(self.odds), words[:, 0])

    def values_of(self, symbols: Int64[np.ndarray, " rows"]) -> Float64[np.ndarray, "rows numbers"]:
        """Return the mean score of each symbol's cell over the largest one; of a class, its vote.

        Returns:
            One of M values in [-1, 1]; of classes, 1 at one of M places.

        Raises:
            PrivacyError: If a symbol is none of the M.
        """
        if ((symbols < 0) | (symbols >= self.plan.cells)).any():
            raise PrivacyError(f"a symbol is not from 0 to {self.plan.cells - 1}; nothing is sent")
        if self.plan.classes:
            return np.eye(self.plan.cells)[symbols]
        means = normal_scores(self.plan.cells)
        scores: Float64[np.ndarray, "rows 1"] = (means / means[-1])[symbols, None]
        return scores


def mean_records(
    values: Float64[np.ndarray, "rows slots numbers"], *, exchanged: bool
) -> tuple[Float64[np.ndarray, "rows numbers"], Bool[np.ndarray, " rows"]]:
    """Return the mean of each row's records, and which rows have one.

    Args:
        values: Numbers of each record of a row, the score or one for each class; not finite where a
            slot holds none.
        exchanged: Whether a row of several records counts; else it counts as one without, so that
            no record stands behind another.
    """
    there = np.isfinite(values).all(axis=2, keepdims=True)
    records = there.sum(axis=1)
    known = records > 0 if exchanged else records == 1
    return np.where(there, values, 0.0).sum(axis=1) / np.maximum(records, 1), known[:, 0]


def uniform_words(
    secret: bytes, keys: Int64[np.ndarray, " rows"], *, draw: int
) -> UInt64[np.ndarray, "rows 2"]:
    """Return two uniform numbers for each key: AES-256 of the key and the draw's number.

    To whoever lacks the secret, those of different keys are independent.
    """
    blocks = np.empty((len(keys), 2), dtype=np.uint64)
    blocks[:, 0], blocks[:, 1] = keys, draw
    encrypted = Cipher(AES256(secret), ECB()).encryptor().update(blocks.tobytes())  # noqa: S305
    return np.frombuffer(encrypted, dtype=np.uint64).reshape(-1, 2)


def _log_ratio(odds: float) -> float:
    return max(-math.log(odds), SMALLEST_EPSILON)
