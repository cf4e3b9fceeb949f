"""A run's privacy figures, computed again from a ledger's lines."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.core.errors import PrivacyError
from securevfl.federation.ledger_book import LedgerBook, epsilon_of_sessions
from securevfl.federation.told_labels import LabelsSpent, labels_spent


def until_end(entries: Sequence[Mapping[str, Any]], run: str) -> Sequence[Mapping[str, Any]]:
    """Return a ledger's lines up to a run's last; later runs on the table are not in its figures.

    Args:
        entries: All lines.
        run: The run's id.
    """
    current, end = "", 0
    for number, entry in enumerate(entries, 1):
        if entry["kind"] == "open":
            current = entry["run"]
        if current == run:
            end = number
    return entries[:end]


def recomputed(entries: Sequence[Mapping[str, Any]], run: str) -> dict[str, float | None]:
    """Return a run's privacy figures by name, as its ledger's lines give them.

    Args:
        entries: The ledger's lines up to the run's end.
        run: Its id.

    Returns:
        ``epsilon`` of the run and ``total_epsilon`` of all runs on the table, both at the run's
        delta and for its unit (None: no bound), ``releases`` and ``row_releases``; and those of
        labels, ``labels.epsilon`` and so on (None too where nothing was told of them).

    Raises:
        PrivacyError: If they are no ledger's lines, or hold nothing of the run.
    """
    book = LedgerBook()
    book.read(entries, where="the ledger")
    sessions = [one for one in book.sessions if one.run == run]
    if not sessions:
        raise PrivacyError(f"no session of run {run} was opened in it")
    privacy = sessions[-1].plan.privacy
    return {
        "epsilon": _finite(epsilon_of_sessions(sessions, delta=privacy.delta)),
        "total_epsilon": _finite(book.total(privacy.unit, delta=privacy.delta)),
        "releases": sum(one.rounds for one in sessions),
        "row_releases": sum(one.row_releases for one in sessions),
        **_of_labels(labels_spent(sessions), labels_spent(book.sessions)),
    }


def _of_labels(own: LabelsSpent | None, table: LabelsSpent | None) -> dict[str, float | None]:
    """Return the figures of labels by name; None where a run told nothing of them."""
    if own is None or table is None:
        names = ("epsilon", "together", "delta", "total_epsilon", "total_together", "runs")
        return {f"labels.{name}": None for name in names}
    return {
        "labels.epsilon": own.epsilon,
        "labels.together": own.together,
        "labels.delta": own.delta,
        "labels.total_epsilon": table.epsilon,
        "labels.total_together": table.together,
        "labels.runs": table.runs,
    }


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
