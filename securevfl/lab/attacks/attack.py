"""An attack, its findings, and confidence intervals of their figures."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float64
from scipy import stats

from securevfl.lab.attacks.evidence import Evidence, UnavailableError

LEVEL: Final = 0.95
"""Confidence level of every interval."""

FOLDER: Final = "attacks"
"""Folder in the run folder: one file for each finished attack."""

_RESAMPLES: Final = 400

Aim = Literal["labels", "columns", "keys", "links", "members", "noise"]
"""Target of an attack; "noise" is whether the promised noise is there, and no guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Success of one attack, and of a trivial guess."""

    attack: str
    """Name of the attack."""
    attacker: str
    """Party that can run the attack."""
    about: str
    """Party whose labels or records are guessed."""
    channel: str
    """Channel of :mod:`securevfl.config.disclosure` that leaks."""
    measure: str
    """Meaning of ``value``, in words."""
    value: float
    """Success of the attack; higher is worse for the run."""
    interval: tuple[float, float]
    """Interval of ``value`` over rows with confidence :data:`LEVEL`; seeds are averaged."""
    floor: float
    """Success of a guess that needs nothing of the run."""
    floor_is: str
    """Basis of the trivial guess, in words."""
    ceiling: float | None = None
    """Success of the attack without the run's defence; None if the run has no defence."""
    rows: int
    """Number of guessed rows or records."""
    known: str = ""
    """Further knowledge that the attacker needs."""
    seeds: int = 1
    """Number of seeds that ``value`` is averaged over."""
    seconds: float = 0.0
    """Duration of the attack."""
    violates: str | None = None
    """Promise that the run breaks; None if it breaks none."""

    @property
    def beats_floor(self) -> bool:
        """Whether the interval lies above the trivial guess."""
        return bool(self.interval[0] > self.floor)

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name, and whether the floor is beaten."""
        return {**asdict(self), "interval": list(self.interval), "beats_floor": self.beats_floor}


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack on a recorded run."""

    name: str
    """Name of the attack, and of its file."""
    aim: Aim
    """Target of the attack."""
    findings: Callable[[Evidence, int], Iterable[Leak]]
    """Function of a run's evidence and a number of seeds for random choices. It raises
    :class:`securevfl.lab.attacks.evidence.UnavailableError` if the attack can't be tried."""


def attempt(attack: Attack, evidence: Evidence, *, seeds: int) -> list[Leak]:
    """Return an attack's findings, with its duration.

    Raises:
        UnavailableError: If the attack can't be tried on this run.
    """
    start = time.monotonic()
    findings = list(attack.findings(evidence, seeds))
    seconds = round(time.monotonic() - start, 2)
    return [replace(finding, seconds=seconds) for finding in findings]


def bootstrap_interval(statistic: Callable[[Any], float], rows: int) -> tuple[float, float]:
    """Return the interval of a statistic over resampled rows.

    Args:
        statistic: Function of resampled row numbers.
        rows: Number of rows.
    """
    random = np.random.default_rng(0)
    samples = [statistic(random.integers(rows, size=rows)) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def exact_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the interval of a probability, by Clopper and Pearson [CP34]."""
    ends = stats.binomtest(hits, trials).proportion_ci(LEVEL, method="exact")
    return float(ends.low), float(ends.high)


def require_links(evidence: Evidence) -> None:
    """Refuse runs on which guesses of a secondary's records can't be scored.

    Raises:
        UnavailableError: If no secondary has recorded its links.
    """
    if not evidence.with_links:
        raise UnavailableError(
            "needs the view of a secondary to the run's end, to know what is right"
        )


def explained_share(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> float:
    """Return 1 minus the squared errors of a guess over those of a trivial guess."""
    return float(1 - errors.sum() / trivial.sum())


def explained_interval(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> tuple[float, float]:
    """Return the interval of :func:`explained_share`."""
    return bootstrap_interval(
        lambda chosen: explained_share(errors[chosen], trivial[chosen]), len(errors)
    )


def auc(positive: Any, scores: Any) -> float:
    """Return the share of pairs whose positive row scores higher; ties count half."""
    ranks = stats.rankdata(scores)
    true, false = int(positive.sum()), int((~positive).sum())
    if not true or not false:
        return float("nan")
    return float((ranks[positive].sum() - true * (true + 1) / 2) / (true * false))
