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

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, PartyView

_EPOCHS: Final = 5
"""The first ones: later gradients say more of how rows differ within a class."""

_MOST_NUMBERS: Final = 512
"""Most numbers of a row's gradients over these epochs together; more are projected at random."""


def _missing(evidence: Evidence) -> str | None:
    if (why := attack.needs_labels(evidence)) is not None:
        return why
    view = evidence.attacker
    if view is None:
        return "needs the view of a secondary"
    return None if evidence.gradients(view) else "no secondary received a gradient"


def _lengths(
    evidence: Evidence, view: PartyView
) -> tuple[Int64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """Return rows, and the mean over epochs of a gradient's length over its batch's mean."""
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
    """Return rows, and their gradients of the first epochs one after another, each of length 1."""
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


class GradientNorm:
    """A row of the rarer class is predicted worse, so that its gradient is longer."""

    name = "gradient-norm"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if (why := _missing(evidence)) is not None:
            return why
        return None if evidence.classes == 2 else "tells two classes apart, and there are more"

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:  # noqa: ARG002
        """Yield the AUC of lengths."""
        view = evidence.attacker
        assert view is not None, "asked before"
        rows, lengths = _lengths(evidence, view)
        rarer = int(evidence.labels[rows].mean() < 1 / 2)
        other = -lengths if rarer else lengths
        guess = attack.Guess(rows, np.stack([other, -other], axis=1))
        yield _finding(self.name, evidence, view, [guess], known="which class is the rarer one")


class GradientDirection:
    """Gradients of one class point in one direction: as that of a row whose label is known."""

    name = "gradient-direction"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        return _missing(evidence)

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield the success with one known row a class."""
        view = evidence.attacker
        assert view is not None, "asked before"
        rows, directions = _directions(evidence, view)
        place: Mapping[int, int] = {row: number for number, row in enumerate(rows.tolist())}
        guesses = []
        for seed in range(seeds):
            known = attack.some_known(evidence, rows, each=1, seed=seed)
            scores = directions @ directions[[place[row] for row in known.tolist()]].T
            left = ~np.isin(rows, known)
            guesses.append(attack.Guess(rows[left], scores[left]))
        yield _finding(self.name, evidence, view, guesses, known="the label of one row a class")


class GradientClusters:
    """Gradients fall into as many clusters as there are classes."""

    name = "gradient-clusters"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        return _missing(evidence)

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield the success of clusters, each called after its most frequent class."""
        view = evidence.attacker
        assert view is not None, "asked before"
        rows, directions = _directions(evidence, view)
        labels, classes = evidence.labels[rows], evidence.classes
        guesses, chances = [], []
        for seed in range(seeds):
            clusters = (
                KMeans(classes, n_init=3, random_state=seed)
                .fit_predict(directions)
                .astype(np.int64)
            )
            chances.append(attack.matched_by_chance(clusters, labels, classes=classes))
            guesses.append(
                attack.Guess(rows, attack.match_clusters(clusters, labels, classes=classes))
            )
        floor = max(float(np.mean(chances)), attack.label_floor(evidence, rows))
        yield _finding(
            self.name,
            evidence,
            view,
            guesses,
            known="which cluster is which class",
            floor=(floor, "the same names for clusters that say nothing"),
        )


def _finding(
    name: str,
    evidence: Evidence,
    view: PartyView,
    guesses: list[attack.Guess],
    *,
    known: str,
    floor: tuple[float, str] | None = None,
) -> attack.Leak:
    trivial, why = floor or (
        attack.label_floor(evidence, guesses[0].rows),
        "how frequent classes are",
    )
    return attack.label_leak(
        name,
        evidence,
        guesses,
        attacker=view.name,
        channel="gradients",
        floor=trivial,
        floor_is=why,
        known=known,
        seeds=len(guesses),
    )
