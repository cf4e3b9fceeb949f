"""What secondaries were told of the primary's labels: charged before it is told, and added up."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from securevfl.dp.label_release import LabelRelease, LabelTotal, labels_total
from securevfl.federation.ledger import Ledger
from securevfl.federation.ledger_book import Session
from securevfl.federation.ledger_labels import LABELS


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsSpent(LabelTotal):
    """What runs on a table told secondaries of its labels."""

    runs: int


def charge_labels(ledger: Ledger, release: LabelRelease) -> bool:
    """Book what secondaries will be told of labels, durably; call it before anything is sent.

    Labels that were drawn once, or shown, may be told again, as when a run is resumed: that says
    nothing new, and costs nothing.

    Args:
        ledger: The primary's.
        release: What will be told.

    Returns:
        Whether it was booked; False where this run has booked the same labels before.

    Raises:
        PrivacyError: If the ledger is closed.
        StorageError: If the disk takes no more.
    """
    sessions = ledger.budgeted
    before = [one for session in sessions for one in session.labels]
    once = release.digest or release.mechanism == "shown"
    if once and release in before:
        return False
    ledger.file.append({"kind": LABELS, **asdict(release), "together": release.together})
    sessions[-1].labels.append(release)
    return True


def labels_spent(sessions: Iterable[Session]) -> LabelsSpent | None:
    """Return what sessions told of labels together; None where they told nothing."""
    told = [session for session in sessions if session.labels]
    total = labels_total(one for session in told for one in session.labels)
    if total is None:
        return None
    return LabelsSpent(runs=len({one.run for one in told}), **asdict(total))
