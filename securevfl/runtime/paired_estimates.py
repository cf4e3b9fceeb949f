"""Metrics of answers for the same test rows, with intervals of paired bootstrap resamples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float64

from securevfl.models import task_metrics
from securevfl.models.alone.choice import Used
from securevfl.models.tasks import TaskHead, as_logit

Coalition = frozenset[str]
"""Names of the partners that take part."""

_LOSS: Final = {"regression": "mse", "binary": "log_loss", "multiclass": "log_loss"}
"""Training loss by task: mean squared error in the label's unit squared, or logarithmic loss in
nats."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CoalitionAnswer:
    """Outputs for the test rows with one coalition."""

    outputs: task_metrics.Outputs
    """As the task's head takes them."""
    threshold: float
    """Probability above which a row counts as the second class, of a binary task."""
    used: Used = "joint"
    """Model that answers: the joint one, or the primary's local one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure of the test rows with its bootstrap interval."""

    value: float
    interval: task_metrics.Interval | None
    """From paired resamples of the test rows; None where too few of them define it."""
    standard_error: float | None = None
    """Standard error over sampled permutations, next to the interval; None of exact figures."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, without those that are undefined."""
        figures: dict[str, Any] = {
            "value": self.value,
            "interval": None if self.interval is None else list(self.interval),
        }
        if self.standard_error is not None:
            figures["standard_error"] = self.standard_error
        return figures


Figures = Mapping[str, Estimate]
"""By metric."""


def metric_functions(
    answer: CoalitionAnswer, head: TaskHead, targets: task_metrics.Targets
) -> dict[str, task_metrics.Resampled]:
    """Return the metric of training and the loss of an answer, as functions of rows' weights.

    Args:
        answer: Of the test rows.
        head: The task.
        targets: Labels of the test rows, as metrics take them.
    """
    cut = as_logit(answer.threshold)
    measures = task_metrics.resampled_metrics(head.task, answer.outputs, targets, cut=cut)
    functions: dict[str, task_metrics.Resampled] = {}
    for name in dict.fromkeys((head.metric_name, _LOSS[head.task])):
        if name == "mse":
            functions[name] = _times(_square_metric(measures["rmse"]), head.label_deviation**2)
        else:
            _, unit = head.in_label_units(name, (0.0, 1.0)) or (0.0, 1.0)
            functions[name] = _times(measures[name], unit)
    return functions


def draws_of(
    functions: Mapping[str, task_metrics.Resampled], head: TaskHead, *, rows: int, seed: int
) -> dict[str, Float64[np.ndarray, " draws"]]:
    """Return metrics on resamples of the test rows, the same resamples for all of them."""
    return task_metrics.bootstrap_draws(
        functions,
        rows=rows,
        resamples=task_metrics.resamples_for(rows, head.outputs),
        seed=seed,
    )


def _times(metric: task_metrics.Resampled, factor: float) -> task_metrics.Resampled:
    return lambda weights: factor * metric(weights)


def _square_metric(metric: task_metrics.Resampled) -> task_metrics.Resampled:
    def measure(weights: task_metrics.Weights) -> Float64[np.ndarray, " resamples"]:
        return np.square(metric(weights))

    return measure


def measure(
    answer: CoalitionAnswer, head: TaskHead, targets: task_metrics.Targets, *, seed: int
) -> Figures:
    """Return the metrics of one answer with intervals of resampled test rows."""
    functions, rows = metric_functions(answer, head, targets), len(targets)
    draws = draws_of(functions, head, rows=rows, seed=seed)
    return {
        name: Estimate(
            value=float(of(np.ones((1, rows)))[0]),
            interval=task_metrics.percentile_interval(draws[name]),
        )
        for name, of in functions.items()
    }
