"""What secondaries were told of the primary's labels: charged before it is told, and added up."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64, Shaped

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import PrivacyError
from securevfl.dp.label_release import LabelMechanism, LabelRelease, LabelTotal, labels_total
from securevfl.federation.ledger import Ledger
from securevfl.federation.ledger_book import Session
from securevfl.federation.ledger_labels import LABELS
from securevfl.federation.state_files import StateFolder

_FILE: Final = "labels.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsSpent(LabelTotal):
    """What runs on a table told secondaries of its labels."""

    runs: int


def label_release(config: FederationConfig) -> LabelRelease | None:
    """Return what a federation tells secondaries of labels by themselves; None for nothing.

    Assisted boosting tells what its residuals are made of, and votes what they are fitted to.
    """
    parties, encoder = len(config.secondaries), config.encoder
    mechanism: LabelMechanism
    if encoder is not None and encoder.labels is not None:
        epsilon = encoder.label_epsilon if encoder.labels != "shown" else None
        gaussian = encoder.labels == "shares"
        mechanism = encoder.labels
    elif config.family.assisted:
        epsilon = config.label_epsilon
        gaussian = epsilon is not None and config.federation.task == "regression"
        mechanism = "shown" if epsilon is None else "noised" if gaussian else "randomised"
    else:
        return None
    delta = config.privacy.delta if gaussian else 0.0
    return LabelRelease(mechanism=mechanism, epsilon=epsilon, delta=delta, parties=parties)


def drawn_once(
    files: StateFolder,
    rows: Int64[np.ndarray, " train"],
    draw: Callable[[], Shaped[np.ndarray, " train"]],
) -> Shaped[np.ndarray, " train"]:
    """Return labels of rows as they were drawn, in this session of the run or an earlier one.

    Args:
        files: The primary's own.
        rows: Whose labels they are.
        draw: Draws them, if no session has.

    Raises:
        PrivacyError: If labels were drawn for other rows.
        StorageError: If the disk takes no more.
    """
    if files.holds(_FILE):
        kept = files.read(_FILE)
        if not np.array_equal(kept["rows"].numpy(), rows):
            raise PrivacyError(
                f"{files.path / _FILE}: holds labels that were drawn for other rows than now "
                f"train; restore the table, or begin another run"
            )
        return np.asarray(kept["labels"].numpy())
    drawn = draw()
    files.write(_FILE, {"rows": torch.from_numpy(rows), "labels": torch.from_numpy(drawn)})
    return drawn


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
