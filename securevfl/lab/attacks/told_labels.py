"""Labels from what secondaries are sent of them: residuals, class sums, row numbers."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence

_PARTS: Final = ("train", "validation", "test")
_KNOWN: Final = 10
"""Labels of each class that the reader of row numbers knows."""


class ResidualSigns:
    """The sign of a row's first residual, or the class whose residual is the largest."""

    name = "residuals"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if (why := attack.needs_labels(evidence)) is not None:
            return why
        view = evidence.attacker
        if view is None or next(view.of("RESIDUALS"), None) is None:
            return "no secondary received residuals"
        return None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:  # noqa: ARG002
        """Yield the success of the first round's residuals."""
        view = evidence.attacker
        assert view is not None, "asked before"
        lines = [line for line in view.of("RESIDUALS") if line["epoch"] == 1]
        rows = np.concatenate([line["rows"].numpy() for line in lines])
        scores = np.concatenate([line["residuals"].numpy() for line in lines]).astype(np.float64)
        if scores.shape[1] == 1:
            scores = np.hstack([-scores, scores])
        yield attack.label_leak(
            self.name,
            evidence,
            [attack.Guess(rows, scores)],
            attacker=view.name,
            channel="residuals",
            floor=attack.label_floor(evidence, rows),
        )


class ClassSums:
    """A class-mean encoder read as it is: its largest number names the class."""

    name = "class-sums"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if (why := attack.needs_labels(evidence)) is not None:
            return why
        if not evidence.config.encoder_reads_labels:
            return "encoders are no class means"
        width = evidence.config.family.cut_shape(evidence.config.model)[-1]
        if evidence.config.scores or width != evidence.classes:
            return "encoders have no number for each class"
        return None if evidence.knows_terms else "needs the views of all secondaries to the end"

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:  # noqa: ARG002
        """Yield, for each secondary, the success of its own class means on training rows.

        What classes are like in general is what the encoder is for; what is better on rows whose
        labels are in the sums than on others is what the sums say of these labels.
        """
        for view in evidence.secondaries.values():
            rows = evidence.train[evidence.linked_rows(view)[evidence.train]]
            terms = view.array("terms").astype(np.float64)
            guess = attack.Guess(rows, terms.reshape(len(terms), -1)[rows])
            others = evidence.other_rows
            others = others[evidence.linked_rows(view)[others]]
            elsewhere = attack.label_success(
                evidence.labels[others], terms.reshape(len(terms), -1)[others]
            )
            yield attack.label_leak(
                self.name,
                evidence,
                [guess],
                attacker=view.name,
                channel="labels that class means are fitted to",
                floor=max(elsewhere, attack.label_floor(evidence, rows)),
                floor_is="the same of rows whose labels are in no class sum",
            )


class RowNumbers:
    """A row's number and its part of the split: a table in order of its labels shows them."""

    name = "row-numbers"
    aim: attack.Aim = "labels"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        return attack.needs_labels(evidence)

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:
        """Yield the success of the nearest known rows, by number and part."""
        assert evidence.primary is not None, "asked before"
        parts = [evidence.primary.array(name) for name in _PARTS]
        rows = np.concatenate(parts)
        part = np.repeat(np.arange(len(parts)), [len(row_part) for row_part in parts])
        # Parts are further apart than any two rows.
        inputs = np.stack([rows / rows.max(), 2.0 * part], axis=1)
        guesses = []
        for seed in range(seeds):
            known = np.isin(rows, attack.some_known(evidence, rows, each=_KNOWN, seed=seed))
            near = KNeighborsClassifier(3).fit(inputs[known], evidence.labels[rows[known]])
            scores = np.zeros((int((~known).sum()), evidence.classes))
            scores[:, near.classes_] = near.predict_proba(inputs[~known])
            guesses.append(attack.Guess(rows[~known], scores))
        yield attack.label_leak(
            self.name,
            evidence,
            guesses,
            attacker="every secondary",
            channel="sizes and times",
            floor=attack.label_floor(evidence, rows),
            known=f"{_KNOWN} labels of each class",
            seeds=seeds,
        )
