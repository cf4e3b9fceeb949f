"""An epoch's line of the history: what was measured, and what patience reads of it."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from securevfl.models.tasks import Metrics, TaskHead

VALIDATION: Final = "validation_"
"""Stands before the name of each metric of the validation rows."""

BY_ITSELF: Final = "by_itself"
"""The headline metric of the validation rows by the joint model without its base."""


def epoch_line(
    head: TaskHead,
    epoch: int,
    loss: float,
    trained: tuple[Tensor, Tensor],
    validated: tuple[Tensor, Tensor],
    *,
    threshold: float,
    start: float,
) -> dict[str, Any]:
    """Return an epoch's line.

    Args:
        head: The task.
        epoch: Its number; 0 is the base.
        loss: Of the training rows.
        trained: Outputs for the training rows, shape (rows, outputs), and their labels.
        validated: The same of the validation rows.
        threshold: Of a binary task.
        start: When it began, by ``time.monotonic``.
    """
    metrics = head.metrics(*validated, threshold=threshold)
    return {
        "epoch": epoch,
        "loss": loss,
        "train": head.metric(*trained, threshold=threshold),
        "validation": head.headline(metrics),
        **{f"{VALIDATION}{name}": value for name, value in metrics.items()},
        "seconds": round(time.monotonic() - start, 3),
    }


def metrics_of(line: Mapping[str, Any]) -> Metrics:
    """Return every metric of the validation rows, by name."""
    return {
        name.removeprefix(VALIDATION): value
        for name, value in line.items()
        if name.startswith(VALIDATION)
    }


def last_gain(head: TaskHead, history: Sequence[Mapping[str, Any]], *, since: int) -> int:
    """Return the last epoch that validated better than all before it, weighed or by itself.

    Epoch 0 is none of them: a network that is worse than the base may still be learning, and as
    long as it is, the best weight beside the base may be 0.

    Args:
        head: The task.
        history: Lines in the order of epochs.
        since: Epochs that don't count.
    """
    gained, best = since, dict.fromkeys(("validation", BY_ITSELF), float("nan"))
    for line in history:
        for name in best.keys() & line.keys() if line["epoch"] > since else ():
            if head.is_better(line[name], best[name]):
                best[name], gained = line[name], line["epoch"]
    return gained
