"""Whether a row is linked to any record, by the length of its average: unlinked rows are noise."""

from collections.abc import Iterator

import numpy as np

from securevfl.lab.attacks import attack
from securevfl.lab.attacks.evidence import Evidence, UnavailableError


def _linked_or_not(evidence: Evidence, _seeds: int) -> Iterator[attack.Leak]:
    """Yield, for each secondary, the AUC of the average's length."""
    _require_both_kinds(evidence)
    rows, averages = evidence.released_averages
    lengths = np.linalg.norm(averages, axis=1)
    clear = np.linalg.norm(evidence.without_noise(rows), axis=1)
    for view in evidence.secondaries.values():
        linked = evidence.linked_rows(view)[rows]
        if linked.all() or not linked.any():
            continue
        yield attack.Leak(
            attack=LINKED_OR_NOT.name,
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


def _require_both_kinds(evidence: Evidence) -> None:
    """Refuse runs without linked and unlinked rows among the released averages."""
    rows, _ = evidence.released_averages
    if not evidence.knows_terms:
        raise UnavailableError(
            "needs the views of all secondaries to the end, to know what is right"
        )
    if not len(rows):
        raise UnavailableError("no average came from the encoders of the run's end")
    linked = np.any(
        [evidence.linked_rows(secondary)[rows] for secondary in evidence.secondaries.values()],
        axis=0,
    )
    if linked.all() or not linked.any():
        raise UnavailableError("all rows are linked, or none")


LINKED_OR_NOT = attack.Attack("linked-or-not", "links", _linked_or_not)
"""Attack on links: an average of no record is short."""
