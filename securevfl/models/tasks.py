"""Tasks: outputs, loss, metrics, decision threshold and evaluation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Float, Float64, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.models import task_metrics

Rule = Literal["auto", "half", "f1", "youden"] | float
"""``half``: 0.5; ``f1`` and ``youden``: the best on the validation rows; or a number. ``auto``:
``f1`` where the second class is rare, else ``half``."""

RARE: Final = 0.2
"""Share of rows below which a class is rare."""

HALF: Final = 0.5
"""The default threshold."""


def choose_threshold(
    rule: Rule, logits: Float64[np.ndarray, " rows"], targets: Shaped[np.ndarray, " rows"]
) -> float:
    """Return the probability above which a row counts as the second class.

    Args:
        rule: ``youden`` maximises the true positive rate minus the false positive rate; ``f1``
            maximises F1.
        logits: Logits of the second class for the rows that choose.
        targets: Their labels, 0 or 1.

    Returns:
        A number in [0, 1]: the middle, in logits, between two rows; among equally good ones the
        nearest to 0.5. It is 0.5 if the rows are all of one class.
    """
    if isinstance(rule, float):
        return rule
    positives = int((targets == 1).sum())
    negatives = len(targets) - positives
    if rule == "auto":
        rule = "f1" if positives < RARE * len(targets) else "half"
    if rule == "half" or not positives or not negatives:
        return HALF
    scores, place = np.unique(logits, return_inverse=True)
    hits = np.bincount(place, weights=targets == 1)
    alarms = np.bincount(place, weights=targets != 1)
    # Counts above the middle between a score and the next one; nothing is above the last one, which
    # is never best.
    true = positives - hits.cumsum()[:-1]
    false = negatives - alarms.cumsum()[:-1]
    cuts = (scores[:-1] + scores[1:]) / 2
    if not len(cuts):
        return HALF
    if rule == "f1":
        worth = 2 * true / (true + false + positives)
    else:
        worth = true / positives - false / negatives
    best = cuts[worth >= worth.max() - 1e-12]
    return float(scipy.special.expit(best[np.abs(best).argmin()]))


def as_logit(threshold: float) -> float:
    """Return the logit of a threshold."""
    return float(scipy.special.logit(threshold))


Metrics = dict[str, float | None]
"""Metrics of rows by name, the one that training optimises first; None if not defined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHead:
    """Loss and metrics of one task.

    Targets are float32 for a regression (standardised) and for a binary task (0 or 1), and int64
    class numbers for a multiclass task; always of shape (rows,).
    """

    task: Task
    """Kind of label."""

    num_classes: int = 1
    """Classes of a multiclass task; unused otherwise."""

    label_deviation: checks.Positive = 1.0
    """Divisor of a regression's labels; errors are reported in the labels' own units."""

    chosen: str | None = None
    """Name of the metric that training optimises; None: the task's default."""

    threshold: Rule = "half"
    """Rule for the probability above which a row of a binary task counts as the second class."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        task_metrics.metrics_of(self.task, self.chosen)
        if self.task == "multiclass" and not self.num_classes >= 2:
            raise ConfigError(f"num_classes must be at least 2, got {self.num_classes!r}")

    @property
    def outputs(self) -> int:
        """Width of a model's output: the number of classes, or 1."""
        return self.num_classes if self.task == "multiclass" else 1

    @property
    def metric_name(self) -> str:
        """Name of the metric that chooses the best epoch and is first in every table."""
        return self._first.name

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of that metric is better."""
        return self._first.higher_is_better

    @property
    def _first(self) -> task_metrics.TaskMetric:
        return task_metrics.metrics_of(self.task, self.chosen)[0]

    def is_better(self, metric: float, than: float) -> bool:
        """Return whether ``metric`` is strictly better; NaN is worse than any number."""
        if math.isnan(than):
            return not math.isnan(metric)
        return metric > than if self.higher_is_better else metric < than

    def loss(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, "rows ..."]
    ) -> Float[Tensor, ""]:
        """Return the mean loss: squared error, or cross-entropy in nats.

        Targets may be soft labels: one number for each class (rows, classes), or one for the second
        of two classes. Numbers outside [0, 1] are allowed.
        """
        if self.task == "regression":
            return functional.mse_loss(outputs[:, 0], targets)
        if self.task == "binary":
            return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)
        return functional.cross_entropy(outputs, targets)

    def row_losses(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> Float[Tensor, " rows"]:
        """Return the loss of each row, in float64; :meth:`loss` is their mean."""
        exact = outputs.double()
        if self.task == "multiclass":
            return functional.cross_entropy(exact, targets, reduction="none")
        wanted = targets.double()
        if self.task == "regression":
            return functional.mse_loss(exact[:, 0], wanted, reduction="none")
        return functional.binary_cross_entropy_with_logits(exact[:, 0], wanted, reduction="none")

    def choose_threshold(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> float:
        """Return the threshold that the rule gives on these rows; 0.5 if the task is not binary."""
        if self.task != "binary" or self.threshold == "half":
            return HALF
        out, true = on_cpu(outputs, targets)
        return choose_threshold(self.threshold, out[:, 0], true)

    def metric(
        self,
        outputs: Float[Tensor, "rows outputs"],
        targets: Shaped[Tensor, " rows"],
        *,
        threshold: float = HALF,
    ) -> float:
        """Return the metric that training optimises, over all rows given.

        Args:
            outputs: A model's outputs.
            targets: The labels.
            threshold: Result of :meth:`choose_threshold` for validation rows.

        Returns:
            The metric; NaN if an output is not finite.

        Raises:
            DataError: If the metric is not defined for these labels.
        """
        self.require_defined(targets)
        if not bool(outputs.isfinite().all()):
            return math.nan
        return self._measure(self._first, *on_cpu(outputs, targets), as_logit(threshold))

    def metrics(
        self,
        outputs: Float[Tensor, "rows outputs"],
        targets: Shaped[Tensor, " rows"],
        *,
        threshold: float = HALF,
    ) -> Metrics:
        """Return every metric of the task over all rows given; arguments as in :meth:`metric`.

        Raises:
            DataError: If the metric that training optimises is not defined for these labels, or an
                output is not finite.
        """
        self.require_defined(targets)
        if not bool(outputs.isfinite().all()):
            raise DataError(
                f"{self.metric_name}: the model's outputs are not finite; training has diverged, "
                f"lower its learning_rate"
            )
        return self.measure(outputs, targets, threshold=threshold)

    def measure(
        self,
        outputs: Float[Tensor, "rows outputs"],
        targets: Shaped[Tensor, " rows"],
        *,
        threshold: float = HALF,
    ) -> Metrics:
        """Return every metric of the task over all rows given; None if not defined."""
        out, true = on_cpu(outputs, targets)
        cut = as_logit(threshold)
        return {
            metric.name: self._measure(metric, out, true, cut)
            if metric.defined(true, self.outputs)
            else None
            for metric in task_metrics.metrics_of(self.task, self.chosen)
        }

    def headline(self, metrics: Metrics) -> float:
        """Return the metric that training optimises, from a result of :meth:`metrics`."""
        value = metrics[self.metric_name]
        assert value is not None, "it was refused where it is not defined"
        return value

    def is_defined(self, targets: Shaped[Tensor, " rows"]) -> bool:
        """Return whether the metric that training optimises is defined for these labels."""
        return self._first.defined(targets.cpu().numpy(), self.outputs)

    def require_defined(self, targets: Shaped[Tensor, " rows"], *, rows: str = "given") -> None:
        """Refuse labels for which the metric that training optimises is not defined.

        Args:
            targets: The labels.
            rows: Name of the rows in the message.

        Raises:
            DataError: Naming what the rows lack.
        """
        if self.is_defined(targets):
            return
        raise DataError(
            f"{self.metric_name} is not defined for the {len(targets)} {rows} rows: it needs "
            f"{self._first.needs}; give this split more rows, or choose another training.metric"
        )

    def in_label_units(
        self, name: str, interval: tuple[float, float] | None
    ) -> tuple[float, float] | None:
        """Return a metric's interval in the units of :meth:`metrics`."""
        (metric,) = (
            candidate
            for candidate in task_metrics.metrics_of(self.task, None)
            if candidate.name == name
        )
        if interval is None or metric.unit != "label":
            return interval
        return interval[0] * self.label_deviation, interval[1] * self.label_deviation

    def _measure(
        self,
        metric: task_metrics.TaskMetric,
        outputs: task_metrics.Outputs,
        targets: task_metrics.Targets,
        cut: float,
    ) -> float:
        value = metric.value(outputs, targets, cut)
        return value * self.label_deviation if metric.unit == "label" else value


def on_cpu(outputs: Tensor, targets: Tensor) -> tuple[task_metrics.Outputs, task_metrics.Targets]:
    """Return outputs in float64 and labels, as numpy arrays."""
    true = targets.double() if targets.is_floating_point() else targets
    return outputs.detach().double().cpu().numpy(), true.cpu().numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Metrics of a set of labelled rows, with intervals, confusion and calibration."""

    metrics: Metrics
    """Every metric of the task, the one that training optimises first."""

    rows: int
    """Number of rows."""

    intervals: dict[str, task_metrics.Interval | None]
    """Bootstrap interval of every metric; None if too few resamples define it."""

    resamples: int
    """Number of bootstrap resamples."""

    threshold: dict[str, Any] | None
    """Decision threshold of a binary task: the ``rule``, and the ``value``, the probability above
    which a row counts as the second class."""

    confusion: dict[str, Any] | None
    """Confusion matrix of a classification task: names of ``classes``, and ``counts`` of rows by
    true and predicted class."""

    calibration: list[dict[str, float]] | None
    """Calibration of a classification task, by bins of probabilities: number of ``rows``, their
    mean probability ``predicted``, and the share ``observed`` of rows where it came true. The
    probability is the second class's, or that of the most probable of several classes."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures for files, next to the metrics, without those that the task lacks."""
        figures = {
            "rows": self.rows,
            "threshold": self.threshold,
            "bootstrap": {
                "method": "percentile",
                "level": task_metrics.LEVEL,
                "resamples": self.resamples,
            },
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
    """Evaluate a model's outputs.

    Args:
        outputs: A model's outputs.
        targets: The labels, as the head takes them.
        head: The task.
        classes: Names of the classes; None for a regression.
        threshold: Result of :meth:`TaskHead.choose_threshold` on validation rows.
        seed: Run seed of the bootstrap.

    Raises:
        DataError: As in :meth:`TaskHead.metrics`.
    """
    metrics = head.metrics(outputs, targets, threshold=threshold)
    out, true = on_cpu(outputs, targets)
    cut = as_logit(threshold)
    resamples = task_metrics.resamples_for(len(true), head.outputs)
    resampled = task_metrics.resampled_metrics(head.task, out, true, cut=cut)
    drawn = task_metrics.bootstrap_intervals(
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
    outputs: task_metrics.Outputs,
    targets: task_metrics.Targets,
    classes: Sequence[Any],
    *,
    cut: float,
) -> dict[str, Any]:
    size = len(classes)
    places = targets.astype(np.int64) * size + task_metrics.predicted_classes(outputs, cut)
    counts = np.bincount(places, minlength=size * size).reshape(size, size)
    return {"classes": [str(label) for label in classes], "counts": counts.tolist()}


def _calibration(
    outputs: task_metrics.Outputs, targets: task_metrics.Targets
) -> list[dict[str, float]]:
    probabilities, came_true = task_metrics.confidences(outputs, targets)
    bins = task_metrics.calibration_bins(probabilities)
    return [
        {
            "predicted": float(probabilities[bins == bin_number].mean()),
            "observed": float(came_true[bins == bin_number].mean()),
            "rows": int((bins == bin_number).sum()),
        }
        for bin_number in range(task_metrics.CALIBRATION_BINS)
        if (bins == bin_number).any()
    ]
