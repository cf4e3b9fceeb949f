"""Labels from messages that depend on them directly: residuals, class sums, row numbers."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from securevfl.lab.attacks import attack, label_guesses
from securevfl.lab.attacks.evidence import Evidence, UnavailableError

_PARTS: Final = ("train", "validation", "test")
_KNOWN: Final = 10
"""Labels of each class that the attacker by row numbers knows."""


def _residual_signs(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield the success of the first round's residuals."""
    label_guesses.require_labels(evidence)
    views = list(evidence.secondaries.values())[:1]
    lines = [line for view in views for line in view.of_kind("RESIDUALS") if line["epoch"] == 1]
    if not lines:
        raise UnavailableError("no secondary received residuals")
    rows = np.concatenate([line["rows"].numpy() for line in lines])
    scores = np.concatenate([line["residuals"].numpy() for line in lines]).astype(np.float64)
    if scores.shape[1] == 1:
        scores = np.hstack([-scores, scores])
    yield label_guesses.label_leak(
        RESIDUAL_SIGNS.name,
        evidence,
        [label_guesses.Guess(rows, scores)],
        attacker=views[0].name,
        channel="residuals",
    )


def _class_sums(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the success of its own class means on training rows.

    The floor is the success on rows whose labels are in no class sum: class means are fitted to
    predict labels of all rows, and only the difference leaks labels of training rows.
    """
    label_guesses.require_labels(evidence)
    _require_class_numbers(evidence)
    for view in evidence.secondaries.values():
        rows = evidence.train[evidence.linked_rows(view)[evidence.train]]
        terms = view.array("terms").astype(np.float64)
        guess = label_guesses.Guess(rows, terms.reshape(len(terms), -1)[rows])
        others = evidence.other_rows
        others = others[evidence.linked_rows(view)[others]]
        elsewhere = label_guesses.label_success(
            evidence.labels[others], terms.reshape(len(terms), -1)[others]
        )
        yield label_guesses.label_leak(
            CLASS_SUMS.name,
            evidence,
            [guess],
            attacker=view.name,
            channel="labels that class means are fitted to",
            floor=elsewhere,
            floor_is="the same of rows whose labels are in no class sum",
        )


def _require_class_numbers(evidence: Evidence) -> None:
    """Refuse runs whose encoders do not write one number for each class."""
    if not evidence.config.encoder_reads_labels:
        raise UnavailableError("encoders are no class means")
    width = evidence.config.family.cut_shape(evidence.config.model)[-1]
    if evidence.config.scores or width != evidence.classes:
        raise UnavailableError("encoders have no number for each class")
    if not evidence.knows_terms:
        raise UnavailableError("needs the views of all secondaries to the end")


def _row_numbers(evidence: Evidence, seeds: int) -> Iterator[attack.Leak]:
    """Yield the success of the nearest known rows, by number and part."""
    label_guesses.require_labels(evidence)
    parts = [evidence.primary.array(name) for name in _PARTS]
    rows = np.concatenate(parts)
    part = np.repeat(np.arange(len(parts)), [len(row_part) for row_part in parts])
    # Parts are further apart than any two rows.
    inputs = np.stack([rows / rows.max(), 2.0 * part], axis=1)
    guesses = []
    for seed in range(seeds):
        known = np.isin(rows, label_guesses.some_known(evidence, rows, each=_KNOWN, seed=seed))
        near = KNeighborsClassifier(3).fit(inputs[known], evidence.labels[rows[known]])
        scores = np.zeros((int((~known).sum()), evidence.classes))
        scores[:, near.classes_] = near.predict_proba(inputs[~known])
        guesses.append(label_guesses.Guess(rows[~known], scores))
    yield label_guesses.label_leak(
        ROW_NUMBERS.name,
        evidence,
        guesses,
        attacker="every secondary",
        channel="sizes and times",
        floor_rows=rows,
        known=f"{_KNOWN} labels of each class",
    )


RESIDUAL_SIGNS = attack.Attack("residuals", "labels", _residual_signs)
"""Attack by the sign of a row's first residual, or the class whose residual is largest."""

CLASS_SUMS = attack.Attack("class-sums", "labels", _class_sums)
"""Attack by the largest number of a class-mean encoder, which names the class."""

ROW_NUMBERS = attack.Attack("row-numbers", "labels", _row_numbers)
"""Attack by a row's number and its part of the split: a sorted table gives its labels away."""
