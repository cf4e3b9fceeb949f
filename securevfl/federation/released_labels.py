"""Labels released to secondaries: charged before they are sent, and drawn once a run."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.config.federation import FederationConfig
from securevfl.config.stage_policy import policies
from securevfl.core.devices import to_device
from securevfl.core.errors import PrivacyError
from securevfl.dp.labels import LabelRelease, digest_of_labels, keep_probability, randomised_labels
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.book import LABELS
from securevfl.ledger.ledger import Ledger

_FILE: Final = "labels.pt"


@dataclass(frozen=True, eq=False)
class DrawnLabels:
    """Labels of training rows by randomised response, and the loss that takes them as such."""

    targets: Shaped[Tensor, " rows"]
    """Labels of all the primary's rows, as drawn on training rows; no other row is trained on."""
    keep: float
    """With which probability a label was kept."""

    @classmethod
    def of(
        cls,
        drawn: Int64[np.ndarray, " train"],
        rows: Int64[np.ndarray, " train"],
        targets: Shaped[Tensor, " rows"],
        *,
        keep: float,
    ) -> "DrawnLabels":
        """Return drawn labels as the primary trains on them.

        Args:
            drawn: Classes, by :func:`securevfl.dp.labels.randomised_labels`.
            rows: Whose they are.
            targets: Of all rows, as they are.
            keep: With which probability a label was kept.
        """
        trained_on = targets.clone()
        trained_on[torch.from_numpy(rows).to(trained_on.device)] = torch.from_numpy(drawn).to(
            trained_on
        )
        return cls(trained_on, keep)

    def targets_of(self, rows: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, " batch"]:
        """Return the labels of training rows as they were drawn."""
        return self.targets[to_device(rows, self.targets.device)]

    def loss(
        self, outputs: Float[Tensor, "rows outputs"], drawn: Shaped[Tensor, " rows"]
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of drawn labels, where outputs are of labels as they are.

        The model's probabilities are carried through the draw: a drawn label has probability
        ``q + (p - q) f_y`` where the label as it is has ``f_y``.

        References:
            [PRMNQ17] Patrini et al., Making Deep Neural Networks Robust to Label Noise, CVPR 2017,
            Theorem 2 ("forward" correction), with the matrix of randomised response.
        """
        if outputs.shape[1] == 1:
            right = torch.where(drawn > 0, outputs[:, 0], -outputs[:, 0]).sigmoid()
        else:
            right = functional.softmax(outputs, dim=1).gather(1, drawn[:, None])[:, 0]
        other = (1 - self.keep) / max(1, outputs.shape[1] - 1)
        return -(other + (self.keep - other) * right).log().mean()


def label_release(config: FederationConfig) -> LabelRelease | None:
    """Return the labels that a federation releases to secondaries; None for none.

    A stage says what it releases; a network under ``training.label_epsilon`` releases what its
    gradients are made of.
    """
    for policy in policies(config).values():
        if (release := policy.label_release(config)) is not None:
            return release
    epsilon = config.training.label_epsilon
    if epsilon is None:
        return None
    parties = len(config.secondaries)
    return LabelRelease(mechanism="randomised", epsilon=epsilon, delta=0.0, parties=parties)


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
    """Charge a release of labels to the ledger, durably; call it before anything is sent.

    Labels that were drawn once, or shown, may be sent again, as when a run is resumed: that reveals
    nothing new, and costs nothing.

    Args:
        ledger: The primary's.
        release: What will be sent.

    Returns:
        Whether it was booked; False where this run has booked the same labels before.

    Raises:
        PrivacyError: If the ledger is closed.
        StorageError: If the disk takes no more.
    """
    sessions = ledger.budget_sessions
    before = [label for session in sessions for label in session.labels]
    once = release.digest or release.mechanism == "plaintext"
    if once and release in before:
        return False
    ledger.file.append({"kind": LABELS, **asdict(release), "together": release.together})
    sessions[-1].labels.append(release)
    return True


def drawn_labels(
    plan: RunPlan, data: PrimaryData, *, ledger: Ledger, files: StateFolder
) -> DrawnLabels | None:
    """Charge for labels by randomised response, and return them; None without a promise of labels.

    Args:
        plan: The run, whose top model is a network.
        data: The primary's table.
        ledger: Its own, open.
        files: Its own; a resumed run finds the labels there that were drawn before.

    Raises:
        PrivacyError: If labels were drawn for other rows than the table has now.
        StorageError: If the disk takes no more; nothing was sent then.

    Reveals:
        Nothing yet: gradients that are sent later are a function of it.
    """
    release, epsilon = label_release(plan.config), plan.config.training.label_epsilon
    if release is None or epsilon is None:
        return None
    rows, head = data.split.train, data.head
    classes = max(2, head.num_classes)
    labels = data.targets.cpu().numpy()[rows].astype(np.int64)
    drawn = drawn_once(files, rows, lambda: randomised_labels(labels, classes, epsilon))
    charge_labels(ledger, replace(release, digest=digest_of_labels(drawn)))
    return DrawnLabels.of(drawn, rows, data.targets, keep=keep_probability(epsilon, classes))
