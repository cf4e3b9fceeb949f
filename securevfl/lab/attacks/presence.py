"""Whether a row is linked to any record, from its average: without one there is noise alone."""

from collections.abc import Iterator

import numpy as np

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence


class LinkedOrNot:
    """An average of no record is short."""

    name = "linked-or-not"
    aim: attack.Aim = "links"

    def missing(self, evidence: Evidence) -> str | None:
        """Return why it cannot be tried."""
        if evidence.primary is None:
            return "needs the view of the primary"
        if not evidence.knows_terms:
            return "needs the views of all secondaries to the end, to know what is right"
        rows, _ = evidence.released_averages
        if not len(rows):
            return "no average came from the encoders of the run's end"
        linked = np.any(
            [evidence.linked_rows(secondary)[rows] for secondary in evidence.secondaries.values()],
            axis=0,
        )
        return "all rows are linked, or none" if len({*linked.tolist()}) == 1 else None

    def findings(self, evidence: Evidence, *, seeds: int) -> Iterator[attack.Leak]:  # noqa: ARG002
        """Yield, for each secondary, the AUC of the average's length."""
        assert evidence.primary is not None, "asked before"
        rows, averages = evidence.released_averages
        lengths = np.linalg.norm(averages, axis=1)
        clear = np.linalg.norm(evidence.without_noise(rows), axis=1)
        for view in evidence.secondaries.values():
            linked = evidence.linked_rows(view)[rows]
            if linked.all() or not linked.any():
                continue
            yield attack.Leak(
                attack=self.name,
                attacker=evidence.config.primary.name,
                about=view.name,
                channel="aggregates",
                measure="AUC",
                value=attack.auc(linked, lengths),
                interval=attack.bootstrap_interval(
                    lambda chosen, truth=linked: attack.auc(truth[chosen], lengths[chosen]),  # type: ignore[misc]
                    len(rows),
                ),
                floor=0.5,
                floor_is="a coin",
                ceiling=attack.auc(linked, clear) if evidence.noise_deviation else None,
                rows=len(rows),
            )
