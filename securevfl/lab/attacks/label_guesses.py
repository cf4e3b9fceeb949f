"""Guesses of labels and their success: AUC of two classes, accuracy of more."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize

from securevfl.lab.attacks.attack import Leak, auc, bootstrap_interval
from securevfl.lab.attacks.evidence import Evidence, UnavailableError


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """Scores of classes for some rows; the class with the largest score is the guess."""

    rows: Int64[np.ndarray, " some"]
    """Row ids."""
    scores: Float64[np.ndarray, "some classes"]
    """A score for each row and class."""


def require_labels(evidence: Evidence) -> None:
    """Refuse runs on which guesses of labels can't be scored.

    Raises:
        UnavailableError: If the primary's view is missing, or labels are numbers.
    """
    if not evidence.has_primary:
        raise UnavailableError("needs the view of the primary, to know which guesses are right")
    if not evidence.classes:
        raise UnavailableError("guesses classes, and labels are numbers")


def label_success(
    labels: Int64[np.ndarray, " some"], scores: Float64[np.ndarray, "some classes"]
) -> float:
    """Return the AUC of two classes, or the accuracy of more."""
    if scores.shape[1] > 2:
        return float((scores.argmax(axis=1) == labels).mean())
    return auc(labels == 1, scores[:, 1] - scores[:, 0])


def label_floor(evidence: Evidence, rows: Int64[np.ndarray, " some"]) -> float:
    """Return the success of guesses that know only how frequent classes are."""
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
    floor: float = 0.0,
    floor_is: str = "how frequent classes are",
    floor_rows: Int64[np.ndarray, " rows"] | None = None,
    known: str = "",
) -> Leak:
    """Return the leak by guesses of labels, one for each seed.

    Arguments are fields of the leak. Its floor is at least that of the most frequent class of
    ``floor_rows``; None: of the guessed rows.
    """
    rows = guesses[0].rows
    value, interval = label_success_of(evidence, guesses)
    return Leak(
        attack=name,
        attacker=attacker,
        about=evidence.config.primary.name,
        channel=channel,
        measure="AUC" if evidence.classes == 2 else "accuracy",
        value=value,
        interval=interval,
        floor=max(floor, label_floor(evidence, rows if floor_rows is None else floor_rows)),
        floor_is=floor_is,
        rows=len(rows),
        known=known,
        seeds=len(guesses),
    )


def some_known(
    evidence: Evidence, rows: Int64[np.ndarray, " some"], *, each: int, seed: int
) -> Int64[np.ndarray, " known"]:
    """Return rows whose labels an attacker knows: `each` of every class, drawn at random."""
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
    """Return scores of classes, by the matching of clusters and classes with most right guesses."""
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
    """Return the success of :func:`match_clusters` on shuffled labels."""
    random = np.random.default_rng(0)
    successes = []
    for _ in range(20):
        shuffled = random.permutation(labels)
        scores = match_clusters(clusters, shuffled, classes=classes)
        successes.append(label_success(shuffled, scores))
    return float(np.mean(successes))
