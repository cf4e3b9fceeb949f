"""What a task asks of a model: how many outputs, which loss, which metrics, which way is better."""

import math
from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.task import Task
from securevfl.models.task_metrics import (
    TASK_METRICS,
    Outputs,
    Targets,
    TaskMetric,
    metrics_of,
)

Metrics = dict[str, float | None]
"""Figures of a set of rows by name, the one that training goes by first; None: not defined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHead:
    """Loss and metrics of one task.

    Targets are float32 for a regression (standardised) and for a binary task (0 or 1), and int64
    class numbers for a multiclass task; always of shape (rows,).
    """

    task: Task
    """What the label is."""

    num_classes: int = 1
    """Classes of a multiclass task; unused otherwise."""

    label_deviation: float = 1.0
    """What a regression's labels were divided by; errors are given in the labels' own units."""

    chosen: str | None = None
    """Name of the metric that training goes by; None: the task's usual one."""

    def __post_init__(self) -> None:
        checks.one_of(TASK_METRICS, task=self.task)
        metrics_of(self.task, self.chosen)
        checks.positive(label_deviation=self.label_deviation)
        if self.task == "multiclass" and not self.num_classes >= 2:
            raise ConfigError(f"num_classes must be at least 2, got {self.num_classes!r}")

    @property
    def outputs(self) -> int:
        """Width of a model's output: classes, or one."""
        return self.num_classes if self.task == "multiclass" else 1

    @property
    def metric_name(self) -> str:
        """Name of the metric that chooses the best epoch and stands first in every table."""
        return self._first.name

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of that metric is a better one."""
        return self._first.higher_is_better

    @property
    def _first(self) -> TaskMetric:
        return metrics_of(self.task, self.chosen)[0]

    def is_better(self, metric: float, than: float) -> bool:
        """Return whether ``metric`` is strictly better; NaN never is, and all else is than NaN."""
        if math.isnan(than):
            return not math.isnan(metric)
        return metric > than if self.higher_is_better else metric < than

    def loss(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> Float[Tensor, ""]:
        """Return the mean loss: squared error, or cross-entropy in nats."""
        if self.task == "regression":
            return functional.mse_loss(outputs[:, 0], targets)
        if self.task == "binary":
            return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets)
        return functional.cross_entropy(outputs, targets)

    def metric(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> float:
        """Return the metric that training goes by over all rows given.

        Returns:
            NaN if an output is not finite, which is no better than anything.

        Raises:
            DataError: If it is not defined for these labels.
        """
        self.require_defined(targets)
        if not bool(outputs.isfinite().all()):
            return math.nan
        return self._measure(self._first, *_on_cpu(outputs, targets))

    def metrics(
        self, outputs: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, " rows"]
    ) -> Metrics:
        """Return every metric of the task over all rows given.

        Raises:
            DataError: If the one that training goes by is not defined for these labels, or an
                output is not finite.
        """
        self.require_defined(targets)
        if not bool(outputs.isfinite().all()):
            raise DataError(
                f"{self.metric_name}: the model's outputs are not finite; training has diverged, "
                f"lower its learning_rate"
            )
        out, true = _on_cpu(outputs, targets)
        return {
            metric.name: self._measure(metric, out, true)
            if metric.defined(true, self.outputs)
            else None
            for metric in metrics_of(self.task, self.chosen)
        }

    def headline(self, metrics: Metrics) -> float:
        """Return the metric that training goes by, out of what :meth:`metrics` returned."""
        value = metrics[self.metric_name]
        assert value is not None, "it was refused where it is not defined"
        return value

    def require_defined(self, targets: Shaped[Tensor, " rows"], *, rows: str = "given") -> None:
        """Refuse labels for which the metric that training goes by is not defined.

        Args:
            targets: The labels.
            rows: What the rows are called in the message.

        Raises:
            DataError: Saying what the rows lack.
        """
        if self._first.defined(targets.cpu().numpy(), self.outputs):
            return
        raise DataError(
            f"{self.metric_name} is not defined for the {len(targets)} {rows} rows: it needs "
            f"{self._first.needs}; give this split more rows, or choose another training.metric"
        )

    def _measure(self, metric: TaskMetric, outputs: Outputs, targets: Targets) -> float:
        value = float(metric.measure(outputs, targets))
        return value * self.label_deviation if metric.unit == "label" else value


def _on_cpu(outputs: Tensor, targets: Tensor) -> tuple[Outputs, Targets]:
    true = targets.double() if targets.is_floating_point() else targets
    return outputs.detach().double().cpu().numpy(), true.cpu().numpy()
