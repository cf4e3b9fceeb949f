"""Labels from a secondary's own final encoder, which has learned from the primary's labels.

References:
    [FZJ22] Fu et al., Label Inference Attacks Against Vertical Federated Learning, section 4 (model
    completion); [FedHSSL] section VI, with 80 known labels. The head here is a logistic regression.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from sklearn.cluster import SpectralClustering
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import Evidence, PartyView, UnavailableError
from securevfl.lab.attacks.labels import (
    Guess,
    label_leak,
    label_success_of,
    match_clusters,
    require_labels,
    some_known,
)

KNOWN: Final = 80
"""Labels that the attacker knows, of all classes together, as in [FedHSSL]."""

_LEAST_COMPARED: Final = 50
"""Least training rows, and least other rows, to measure memory."""

_MOST_ROWS: Final = 2000
"""Most rows that are clustered; a random sample of more."""


def _taught_channel(evidence: Evidence) -> str:
    """Return the channel through which encoders have learned labels.

    Raises:
        UnavailableError: If there is none, no final encoder was recorded, or guesses can't be
            scored.
    """
    require_labels(evidence)
    channel = evidence.label_channel
    if channel is None:
        raise UnavailableError("encoders are frozen and have learned nothing of labels")
    if not any("terms" in view.held for view in evidence.secondaries.values()):
        raise UnavailableError("needs the view of a secondary to the run's end")
    return channel


def _representations(view: PartyView) -> Float64[np.ndarray, "rows numbers"]:
    terms = view.array("terms").astype(np.float64)
    return standardise(terms.reshape(len(terms), -1))


def standardise(
    numbers: Float64[np.ndarray, "rows numbers"],
) -> Float64[np.ndarray, "rows numbers"]:
    """Return columns of mean 0 and deviation 1."""
    values: Float64[np.ndarray, "rows numbers"] = StandardScaler().fit_transform(numbers)
    return values


def _model_completion(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the success on training rows, and its excess over other rows.

    The floor is the same head on the secondary's own columns, which it has without the run.
    """
    channel = _taught_channel(evidence)
    each = max(2, KNOWN // evidence.classes)
    for view in evidence.secondaries.values():
        rows = evidence.train[evidence.linked_rows(view)[evidence.train]]
        inputs = _representations(view)
        own = standardise(evidence.own_columns(view))
        by_model = _completion_guesses(evidence, inputs, rows, each=each, seeds=seeds)
        by_columns = _completion_guesses(evidence, own, rows, each=each, seeds=seeds)
        columns, _ = label_success_of(evidence, by_columns)
        leak = label_leak(
            MODEL_COMPLETION.name,
            evidence,
            by_model,
            attacker=view.name,
            channel=channel,
            floor=columns,
            floor_is="the same head on its own columns",
            floor_rows=rows,
            known=f"{each} labels of each class",
        )
        yield leak
        others = evidence.other_rows
        others = others[evidence.linked_rows(view)[others]]
        if min(len(rows), len(others)) < _LEAST_COMPARED:
            continue
        gap, interval = _memory(evidence, inputs, rows, others, each=each)
        without, _ = _memory(evidence, own, rows, others, each=each)
        yield replace(
            leak,
            attack="encoder-memory",
            measure=f"{leak.measure} of training rows, minus that of others",
            value=gap,
            interval=interval,
            floor=max(without, 0.0),
            rows=len(rows),
            seeds=1,
        )


def _memory(
    evidence: Evidence,
    inputs: Float64[np.ndarray, "rows numbers"],
    rows: Int64[np.ndarray, " train"],
    others: Int64[np.ndarray, " others"],
    *,
    each: int,
) -> tuple[float, tuple[float, float]]:
    """Return a head's success on the encoder's training rows minus that on other rows."""
    labels = evidence.labels
    known = some_known(evidence, rows, each=each, seed=0)
    scores = completed_head(inputs[known], labels[known], inputs, evidence.classes)
    success, width = [], 0.0
    for part in (rows[~np.isin(rows, known)], others):
        of_part, ends = label_success_of(evidence, [Guess(part, scores[part])])
        success.append(of_part)
        width = float(np.hypot(width, (ends[1] - ends[0]) / 2))
    gap = success[0] - success[1]
    return gap, (gap - width, gap + width)


def _completion_guesses(
    evidence: Evidence,
    inputs: Float64[np.ndarray, "rows numbers"],
    rows: Int64[np.ndarray, " some"],
    *,
    each: int,
    seeds: int,
) -> list[Guess]:
    guesses = []
    for seed in range(seeds):
        known = some_known(evidence, rows, each=each, seed=seed)
        left = rows[~np.isin(rows, known)]
        scores = completed_head(
            inputs[known], evidence.labels[known], inputs[left], evidence.classes
        )
        guesses.append(Guess(left, scores))
    return guesses


def completed_head(
    inputs: Float64[np.ndarray, "known numbers"],
    labels: Int64[np.ndarray, " known"],
    asked: Float64[np.ndarray, "rows numbers"],
    classes: int,
) -> Float64[np.ndarray, "rows classes"]:
    """Return scores of classes for `asked`, by a head that is fitted to a few labelled rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        head = LogisticRegression(C=0.3, max_iter=300).fit(inputs, labels)
    probabilities = np.zeros((len(asked), classes))
    probabilities[:, head.classes_] = head.predict_proba(asked)
    return probabilities


def _own_clusters(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the success of clusters; clusters of its columns are the floor."""
    channel = _taught_channel(evidence)
    classes = evidence.classes
    for view in evidence.secondaries.values():
        rows = evidence.train[evidence.linked_rows(view)[evidence.train]]
        rows = np.random.default_rng(0).permutation(rows)[:_MOST_ROWS]
        labels = evidence.labels[rows]
        own = standardise(evidence.own_columns(view))
        guesses = []
        for numbers in (_representations(view), own):
            clusters = _clusters(numbers[rows], classes)
            scores = match_clusters(clusters, labels, classes=classes)
            guesses.append(Guess(rows, scores))
        columns, _ = label_success_of(evidence, guesses[1:])
        yield label_leak(
            OWN_CLUSTERS.name,
            evidence,
            guesses[:1],
            attacker=view.name,
            channel=channel,
            floor=columns,
            floor_is="clusters of its own columns",
            known="which cluster is which class",
        )


def _clusters(
    numbers: Float64[np.ndarray, "rows numbers"], classes: int
) -> Int64[np.ndarray, " rows"]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Of a graph in several pieces.
        spectral = SpectralClustering(
            classes, affinity="nearest_neighbors", n_neighbors=10, random_state=0
        )
        clusters: Int64[np.ndarray, " rows"] = spectral.fit_predict(numbers).astype(np.int64)
    return clusters


MODEL_COMPLETION = attack.Attack("model-completion", "labels", _model_completion)
"""Attack by a head that is fitted to own representations of a few rows with known labels."""

OWN_CLUSTERS = attack.Attack("own-clusters", "labels", _own_clusters)
"""Attack by spectral clusters of own representations, without any label."""
