"""Labels from the gradients that secondaries receive: by length, by direction, by clusters.

References:
    [LSY22] Li et al., Label Leakage and Protection in Two-Party Split Learning: norm
    and cosine attacks; more than two classes and clusters are additions.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from sklearn.cluster import KMeans

from securevfl.lab.attacks import attack, label_guesses
from securevfl.lab.attacks.evidence import Evidence, PartyView, UnavailableError

_EPOCHS: Final = 5
"""First epochs that are read; later gradients say more of how rows differ within a class."""

_MOST_NUMBERS: Final = 512
"""Most numbers of a row's concatenated gradients; more are projected at random."""


def _attacking_view(evidence: Evidence) -> PartyView:
    """Return the view of a secondary that received gradients.

    Raises:
        UnavailableError: If there is none, or guesses can't be scored.
    """
    label_guesses.require_labels(evidence)
    if not evidence.gradients(evidence.attacker):
        raise UnavailableError("no secondary received a gradient")
    return evidence.attacker


def _lengths(
    evidence: Evidence, view: PartyView
) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """Return rows, and their gradients' mean length relative to the mean of the batch."""
    lengths: dict[int, list[float]] = {}
    for epoch in evidence.gradients(view):
        norms = np.linalg.norm(epoch.gradients.astype(np.float64), axis=1)
        for batch in np.unique(epoch.batches):
            of_batch = epoch.batches == batch
            relative = norms[of_batch] / max(norms[of_batch].mean(), 1e-30)
            for row, value in zip(epoch.rows[of_batch].tolist(), relative, strict=True):
                lengths.setdefault(row, []).append(float(value))
    return np.array(list(lengths)), np.array(
        [np.mean(row_lengths) for row_lengths in lengths.values()]
    )


def _directions(
    evidence: Evidence, view: PartyView
) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, "rows numbers"]]:
    """Return rows, and their concatenated gradients of the first epochs, each of length 1."""
    epochs = evidence.gradients(view)[:_EPOCHS]
    rows = np.unique(np.concatenate([epoch.rows for epoch in epochs]))
    width = epochs[0].gradients.shape[1]
    directions = np.zeros((len(rows), len(epochs), width))
    for number, epoch in enumerate(epochs):
        norms = np.linalg.norm(epoch.gradients, axis=1, keepdims=True)
        directions[np.searchsorted(rows, epoch.rows), number] = epoch.gradients / np.maximum(
            norms, 1e-30
        )
    flat = directions.reshape(len(rows), -1)
    if flat.shape[1] > _MOST_NUMBERS:
        random = np.random.default_rng(0)
        flat = flat @ random.normal(size=(flat.shape[1], _MOST_NUMBERS)) / np.sqrt(_MOST_NUMBERS)
    return rows, flat


def _gradient_norm(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield the AUC of gradients' lengths."""
    view = _attacking_view(evidence)
    if evidence.classes != 2:
        raise UnavailableError("tells two classes apart, and there are more")
    rows, lengths = _lengths(evidence, view)
    rarer = int(evidence.labels[rows].mean() < 1 / 2)
    other = -lengths if rarer else lengths
    guess = label_guesses.Guess(rows, np.stack([other, -other], axis=1))
    yield label_guesses.label_leak(
        GRADIENT_NORM.name,
        evidence,
        [guess],
        attacker=view.name,
        channel="gradients",
        known="which class is the rarer one",
    )


def _gradient_direction(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield the success with one known row of each class."""
    view = _attacking_view(evidence)
    rows, directions = _directions(evidence, view)
    place: Mapping[int, int] = {row: number for number, row in enumerate(rows.tolist())}
    guesses = []
    for seed in range(seeds):
        known = label_guesses.some_known(evidence, rows, each=1, seed=seed)
        scores = directions @ directions[[place[row] for row in known.tolist()]].T
        left = ~np.isin(rows, known)
        guesses.append(label_guesses.Guess(rows[left], scores[left]))
    yield label_guesses.label_leak(
        GRADIENT_DIRECTION.name,
        evidence,
        guesses,
        attacker=view.name,
        channel="gradients",
        known="the label of one row a class",
    )


def _gradient_clusters(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield the success of clusters, each named after its most frequent class."""
    view = _attacking_view(evidence)
    rows, directions = _directions(evidence, view)
    labels, classes = evidence.labels[rows], evidence.classes
    guesses, chances = [], []
    for seed in range(seeds):
        clusters = (
            KMeans(classes, n_init=3, random_state=seed).fit_predict(directions).astype(np.int64)
        )
        chances.append(label_guesses.matched_by_chance(clusters, labels, classes=classes))
        scores = label_guesses.match_clusters(clusters, labels, classes=classes)
        guesses.append(label_guesses.Guess(rows, scores))
    yield label_guesses.label_leak(
        GRADIENT_CLUSTERS.name,
        evidence,
        guesses,
        attacker=view.name,
        channel="gradients",
        floor=float(np.mean(chances)),
        floor_is="the same names for clusters that say nothing",
        known="which cluster is which class",
    )


GRADIENT_NORM = attack.Attack("gradient-norm", "labels", _gradient_norm)
"""Attack by length: a row of the rarer class is predicted worse, so that its gradient is longer."""

GRADIENT_DIRECTION = attack.Attack("gradient-direction", "labels", _gradient_direction)
"""Attack by direction: a gradient points where that of a known row of the same class points."""

GRADIENT_CLUSTERS = attack.Attack("gradient-clusters", "labels", _gradient_clusters)
"""Attack by clusters: gradients form one cluster for each class."""
