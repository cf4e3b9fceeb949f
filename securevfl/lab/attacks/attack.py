"""One attack's interface: what it needs, what it guesses, and how its success is stated."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize, stats

from securevfl.lab.attacks.evidence import Evidence

LEVEL: Final = 0.95
"""Confidence level of every interval."""

FOLDER: Final = "attacks"
"""Folder in the run folder: one file for each finished attack."""

_RESAMPLES: Final = 400

Aim = Literal["labels", "columns", "keys", "links", "members", "noise"]
"""Target of an attack; "noise" is whether the promised noise is there, and no guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """What one attack found out, next to a trivial guess."""

    attack: str
    attacker: str
    """Who has what the attack needs."""
    about: str
    """Whose labels or records."""
    channel: str
    """Through which channel of :mod:`securevfl.config.disclosure`."""
    measure: str
    """Quantity that the figures give, in words."""
    value: float
    interval: tuple[float, float]
    """With confidence :data:`LEVEL`, over rows; seeds are averaged."""
    floor: float
    """The same of a guess that needs nothing of the run."""
    floor_is: str
    """Basis of the trivial guess, in words."""
    ceiling: float | None = None
    """The same attack where the run's defence is taken away; None where it has none."""
    rows: int
    """How many are guessed."""
    known: str = ""
    """Further knowledge that the attacker needs."""
    seeds: int = 1
    seconds: float = 0.0
    violates: str | None = None
    """Broken promise: not how much is learned, but that the run is not what it says."""

    @property
    def beats_floor(self) -> bool:
        """Whether more is learned than by the trivial guess, clearly."""
        return bool(self.interval[0] > self.floor)

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name, and whether the floor is beaten."""
        return {**asdict(self), "interval": list(self.interval), "beats_floor": self.beats_floor}


@runtime_checkable
class Attack(Protocol):
    """One attack."""

    name: str
    aim: Aim

    def missing(self, evidence: Evidence) -> str | None:
        """Return why the attack cannot be tried on this run; None if it can."""
        ...

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[Leak]:
        """Try the attack.

        Args:
            evidence: Of which nothing is missing.
            seeds: How often what is drawn at random is drawn.
        """
        ...


def attempt(attack: Attack, evidence: Evidence, *, seeds: int) -> list[Leak]:
    """Try an attack, and note how long it took."""
    start = time.monotonic()
    findings = list(attack.findings(evidence, seeds=seeds))
    seconds = round(time.monotonic() - start, 2)
    return [replace(finding, seconds=seconds) for finding in findings]


# Confidence intervals.


def bootstrap_interval(statistic: Callable[[Any], float], rows: int) -> tuple[float, float]:
    """Return the interval of a statistic over resampled rows.

    Args:
        statistic: Of row numbers from 0, some of them twice or not at all.
        rows: How many there are.
    """
    random = np.random.default_rng(0)
    samples = [statistic(random.integers(rows, size=rows)) for _ in range(_RESAMPLES)]
    low, high = np.nanquantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def exact_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the interval of a probability, by Clopper and Pearson [CP34]."""
    ends = stats.binomtest(hits, trials).proportion_ci(LEVEL, method="exact")
    return float(ends.low), float(ends.high)


# Guesses of numbers, and how good they are.


def needs_links(evidence: Evidence) -> str | None:
    """Return why the primary's guesses of a secondary's records cannot be scored; None if can."""
    if evidence.primary is None:
        return "needs the view of the primary"
    if not evidence.with_links:
        return "needs the view of a secondary to the run's end, to know what is right"
    return None


def explained_share(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> float:
    """Return the share of squared errors that a guess takes away from those of a trivial one."""
    return float(1 - errors.sum() / trivial.sum())


def explained_between(
    errors: Float64[np.ndarray, "rows ..."], trivial: Float64[np.ndarray, "rows ..."]
) -> tuple[float, float]:
    """Return the interval of :func:`explained_share`."""
    return bootstrap_interval(
        lambda chosen: explained_share(errors[chosen], trivial[chosen]), len(errors)
    )


# Guesses of labels, and how good they are: AUC of two classes, accuracy of more.


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """One score a class for some rows; the largest is the guess."""

    rows: Int64[np.ndarray, " some"]
    scores: Float64[np.ndarray, "some classes"]


def needs_labels(evidence: Evidence) -> str | None:
    """Return why no attack on labels can be scored here; None if one can."""
    if evidence.primary is None:
        return "needs the view of the primary, to know which guesses are right"
    if not evidence.classes:
        return "guesses classes, and labels are numbers"
    return None


def label_measure(evidence: Evidence) -> str:
    """Return what guesses of labels are measured by."""
    return "AUC" if evidence.classes == 2 else "accuracy"


def label_success(
    labels: Int64[np.ndarray, " some"], scores: Float64[np.ndarray, "some classes"]
) -> float:
    """Return the AUC of two classes, or the accuracy of more."""
    if scores.shape[1] > 2:
        return float((scores.argmax(axis=1) == labels).mean())
    return auc(labels == 1, scores[:, 1] - scores[:, 0])


def auc(positive: Any, scores: Any) -> float:
    """Return how often a positive row scores above a negative one; ties count half."""
    ranks = stats.rankdata(scores)
    true, false = int(positive.sum()), int((~positive).sum())
    if not true or not false:
        return float("nan")
    return float((ranks[positive].sum() - true * (true + 1) / 2) / (true * false))


def label_floor(evidence: Evidence, rows: Int64[np.ndarray, " some"]) -> float:
    """Return the success of guesses that know how frequent classes are, and nothing else."""
    if evidence.classes == 2:
        return 0.5
    return float(np.bincount(evidence.labels[rows]).max() / len(rows))


def label_success_of(
    evidence: Evidence, guesses: Sequence[Guess]
) -> tuple[float, tuple[float, float]]:
    """Return the mean success over seeds, and its interval over rows."""
    labels = evidence.labels
    value = np.mean([label_success(labels[guess.rows], guess.scores) for guess in guesses])
    ends = [
        bootstrap_interval(
            lambda chosen, guess=guess: label_success(  # type: ignore[misc]
                labels[guess.rows[chosen]], guess.scores[chosen]
            ),
            len(guess.rows),
        )
        for guess in guesses
    ]
    low, high = np.mean(ends, axis=0)
    return float(value), (float(low), float(high))


def label_leak(
    name: str,
    evidence: Evidence,
    guesses: Sequence[Guess],
    *,
    attacker: str,
    channel: str,
    floor: float,
    floor_is: str = "how frequent classes are",
    known: str = "",
    seeds: int = 1,
) -> Leak:
    """Return what guesses of labels, one a seed, are worth; see the fields of :class:`Leak`."""
    value, interval = label_success_of(evidence, guesses)
    return Leak(
        attack=name,
        attacker=attacker,
        about=evidence.config.primary.name,
        channel=channel,
        measure=label_measure(evidence),
        value=value,
        interval=interval,
        floor=floor,
        floor_is=floor_is,
        rows=len(guesses[0].rows),
        known=known,
        seeds=seeds,
    )


def some_known(
    evidence: Evidence, rows: Int64[np.ndarray, " some"], *, each: int, seed: int
) -> Int64[np.ndarray, " known"]:
    """Return rows whose labels an attacker knows, so many of each class, drawn at random."""
    random = np.random.default_rng(seed)
    labels = evidence.labels[rows]
    chosen = []
    for label in range(evidence.classes):
        of_class = rows[labels == label]
        chosen.append(random.permutation(of_class)[: min(each, len(of_class) // 2)])
    return np.concatenate(chosen)


def match_clusters(
    clusters: Int64[np.ndarray, " rows"], labels: Int64[np.ndarray, " rows"], *, classes: int
) -> Float64[np.ndarray, "rows classes"]:
    """Return scores of clusters as classes, matched so that most guesses are right."""
    table = np.zeros((classes, classes))
    np.add.at(table, (clusters, labels), 1)
    if classes == 2:  # By AUC, which a rare class counts as much in.
        table /= np.maximum(table.sum(axis=0), 1)
    _, names = optimize.linear_sum_assignment(-table)
    scores: Float64[np.ndarray, "rows classes"] = np.eye(classes)[names[clusters]]
    return scores


def matched_by_chance(
    clusters: Int64[np.ndarray, " rows"], labels: Int64[np.ndarray, " rows"], *, classes: int
) -> float:
    """Return the success of :func:`match_clusters` where clusters say nothing."""
    random = np.random.default_rng(0)
    successes = []
    for _ in range(20):
        shuffled = random.permutation(labels)
        scores = match_clusters(clusters, shuffled, classes=classes)
        successes.append(label_success(shuffled, scores))
    return float(np.mean(successes))
