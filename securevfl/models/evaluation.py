"""What a model's outputs for labelled rows are worth: metrics, how sure they are, and mistakes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.models.task_metrics import (
    CALIBRATION_BINS,
    LEVEL,
    Interval,
    Outputs,
    Targets,
    bootstrap_intervals,
    calibration_bins,
    confidences,
    resampled_metrics,
    resamples_for,
)
from securevfl.models.tasks import Metrics, TaskHead, as_logit, on_cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Figures of a set of labelled rows."""

    metrics: Metrics
    """Every metric of the task, the one that training goes by first."""

    rows: int
    """How many were measured."""

    intervals: dict[str, Interval | None]
    """A bootstrap interval of every metric; None where it is not defined, or for too few draws of
    the rows."""

    resamples: int
    """Draws of the rows with replacement, as many rows in each, that intervals are made from."""

    threshold: dict[str, Any] | None
    """Of a binary task: the ``rule`` and the ``value``, the probability above which a row counts as
    one of the second class."""

    confusion: dict[str, Any] | None
    """Of classes: their names, ``classes``, and ``counts``, for each true class so many rows of
    each predicted one."""

    calibration: list[dict[str, float]] | None
    """Of classes: for each bin of probabilities that has ``rows``, their mean probability,
    ``predicted``, and the share of rows where it came true, ``observed``. It is the probability of
    the second class, or of the most probable one of several."""

    def as_json(self) -> dict[str, Any]:
        """Return what stands beside the metrics in a file, without what the task does not have."""
        figures = {
            "rows": self.rows,
            "threshold": self.threshold,
            "bootstrap": {"method": "percentile", "level": LEVEL, "resamples": self.resamples},
            "intervals": {
                name: None if interval is None else list(interval)
                for name, interval in self.intervals.items()
            },
            "confusion": self.confusion,
            "calibration": self.calibration,
        }
        return {name: value for name, value in figures.items() if value is not None}


def evaluate(
    outputs: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    head: TaskHead,
    *,
    classes: Sequence[Any] | None,
    threshold: float,
    seed: int,
) -> Evaluation:
    """Measure a model's outputs.

    Args:
        outputs: As the head takes them.
        targets: As the head takes them.
        head: The task.
        classes: What each class is called; None for a regression.
        threshold: Of a binary task, as :meth:`TaskHead.choose_threshold` chose it on validation
            rows.
        seed: Run seed of the bootstrap.

    Raises:
        DataError: As :meth:`TaskHead.metrics`.
    """
    metrics = head.metrics(outputs, targets, threshold=threshold)
    out, true = on_cpu(outputs, targets)
    cut = as_logit(threshold)
    resamples = resamples_for(len(true), head.outputs)
    resampled = resampled_metrics(head.task, out, true, cut=cut)
    drawn = bootstrap_intervals(
        {name: resampled[name] for name, value in metrics.items() if value is not None},
        rows=len(true),
        resamples=resamples,
        seed=seed,
    )
    return Evaluation(
        metrics=metrics,
        rows=len(true),
        intervals={name: head.in_label_units(name, drawn.get(name)) for name in metrics},
        resamples=resamples,
        threshold={"rule": _rule(head), "value": threshold} if head.task == "binary" else None,
        confusion=None if classes is None else _confusion(out, true, classes, cut=cut),
        calibration=None if classes is None else _calibration(out, true),
    )


def _rule(head: TaskHead) -> str:
    return head.threshold if isinstance(head.threshold, str) else "fixed"


def _confusion(
    outputs: Outputs, targets: Targets, classes: Sequence[Any], *, cut: float
) -> dict[str, Any]:
    if outputs.shape[1] == 1:
        predicted = (outputs[:, 0] > cut).astype(np.int64)
    else:
        predicted = outputs.argmax(axis=1)
    size = len(classes)
    places = targets.astype(np.int64) * size + predicted
    counts = np.bincount(places, minlength=size * size).reshape(size, size)
    return {"classes": [str(one) for one in classes], "counts": counts.tolist()}


def _calibration(outputs: Outputs, targets: Targets) -> list[dict[str, float]]:
    probabilities, came_true = confidences(outputs, targets)
    bins = calibration_bins(probabilities)
    return [
        {
            "predicted": float(probabilities[bins == one].mean()),
            "observed": float(came_true[bins == one].mean()),
            "rows": int((bins == one).sum()),
        }
        for one in range(CALIBRATION_BINS)
        if (bins == one).any()
    ]
