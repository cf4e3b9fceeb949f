"""Attacks on labels: guesses, direct inference, gradients, and what own encoders have learned.

References:
    [FZJ22] Fu et al., Label Inference Attacks Against Vertical Federated Learning, section 4 (model
    completion); [FedHSSL] section VI, with 80 known labels. The head here is a logistic regression.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.attack import (
    Evidence,
    Leak,
    PartyView,
    UnavailableError,
    auc,
    bootstrap_interval,
)


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


_PARTS: Final = ("train", "validation", "test")
_KNOWN: Final = 10
"""Labels of each class that the attacker by row numbers knows."""


def _class_sums(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the success of its own class means on training rows.

    The floor is the success on rows whose labels are in no class sum: class means are fitted to
    predict labels of all rows, and only the difference leaks labels of training rows.
    """
    require_labels(evidence)
    if not evidence.config.encoder_reads_labels:
        raise UnavailableError("encoders are no class means")
    width = evidence.config.family.cut_shape(evidence.config.model)[-1]
    if evidence.config.scores or width != evidence.classes:
        raise UnavailableError("encoders have no number for each class")
    if not evidence.knows_terms:
        raise UnavailableError("needs the views of all secondaries to the end")
    for view in evidence.secondaries.values():
        rows = evidence.train[evidence.linked_rows(view)[evidence.train]]
        terms = view.array("terms").astype(np.float64)
        guess = Guess(rows, terms.reshape(len(terms), -1)[rows])
        others = evidence.other_rows
        others = others[evidence.linked_rows(view)[others]]
        elsewhere = label_success(evidence.labels[others], terms.reshape(len(terms), -1)[others])
        yield label_leak(
            evidence,
            [guess],
            attacker=view.name,
            channel="labels that class means are fitted to",
            floor=elsewhere,
            floor_is="the same of rows whose labels are in no class sum",
        )


def _row_numbers(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield the success of the nearest known rows, by number and part."""
    require_labels(evidence)
    parts = [evidence.primary.array(name) for name in _PARTS]
    rows = np.concatenate(parts)
    part = np.repeat(np.arange(len(parts)), [len(row_part) for row_part in parts])
    # Parts are further apart than any two rows.
    inputs = np.stack([rows / rows.max(), 2.0 * part], axis=1)
    guesses = []
    for seed in range(seeds):
        known = np.isin(rows, some_known(evidence, rows, each=_KNOWN, seed=seed))
        near = KNeighborsClassifier(3).fit(inputs[known], evidence.labels[rows[known]])
        scores = np.zeros((int((~known).sum()), evidence.classes))
        scores[:, near.classes_] = near.predict_proba(inputs[~known])
        guesses.append(Guess(rows[~known], scores))
    yield label_leak(
        evidence,
        guesses,
        attacker="every secondary",
        channel="sizes and times",
        floor_rows=rows,
        known=f"{_KNOWN} labels of each class",
    )


CLASS_SUMS = attack.Attack("class-sums", "labels", _class_sums)
"""Attack by the largest number of a class-mean encoder, which names the class."""

ROW_NUMBERS = attack.Attack("row-numbers", "labels", _row_numbers)
"""Attack by a row's number and its part of the split: a sorted table gives its labels away."""


_EPOCHS: Final = 5
"""First epochs that are read; later gradients say more of how rows differ within a class."""

_MOST_NUMBERS: Final = 512
"""Most numbers of a row's concatenated gradients; more are projected at random."""


def _attacking_view(evidence: Evidence) -> PartyView:
    """Return the view of a secondary that received gradients.

    Raises:
        UnavailableError: If there is none, or guesses can't be scored.
    """
    require_labels(evidence)
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
    guess = Guess(rows, np.stack([other, -other], axis=1))
    yield label_leak(
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
        known = some_known(evidence, rows, each=1, seed=seed)
        scores = directions @ directions[[place[row] for row in known.tolist()]].T
        left = ~np.isin(rows, known)
        guesses.append(Guess(rows[left], scores[left]))
    yield label_leak(
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
        chances.append(matched_by_chance(clusters, labels, classes=classes))
        scores = match_clusters(clusters, labels, classes=classes)
        guesses.append(Guess(rows, scores))
    yield label_leak(
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
