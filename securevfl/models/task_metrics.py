"""The metrics of each task: what each one says, in which units, and where it says nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Bool, Float64, Int64, Shaped

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.task import Task

Outputs = Float64[np.ndarray, "rows outputs"]
"""Of a model: predictions, the second class's logit, or a logit for each class."""

Targets = Shaped[np.ndarray, " rows"]
"""Labels in the outputs' units, 0 or 1, or class numbers."""


def _sklearn() -> ModuleType:
    """Return scikit-learn's metrics."""
    # Slow to import; secondaries measure nothing.
    from sklearn import metrics

    return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetric:
    """One figure of a set of rows."""

    name: str
    """What files, tables and ``training.metric`` call it."""

    meaning: str
    """What it is, for people."""

    unit: str = "none"
    """``"label"``: the labels' own units."""

    values: str
    """Where it can lie."""

    higher_is_better: bool = True

    needs: str = "a row"
    """What the rows must have for it to be defined."""

    defined: Callable[[Targets, int], bool] = lambda targets, _classes: len(targets) > 0
    """Whether these labels have it; the number is that of the outputs."""

    measure: Callable[[Outputs, Targets, float], float]
    """Returns it, by scikit-learn's definition; the last argument is the logit above which a row of
    a binary task counts as one of the second class."""


def _labels_differ(targets: Targets, _outputs: int) -> bool:
    return len(np.unique(targets)) > 1


def _has_second_class(targets: Targets, _outputs: int) -> bool:
    return bool((targets == 1).any())


def _has_every_class(targets: Targets, outputs: int) -> bool:
    return len(np.unique(targets)) == outputs


_REGRESSION: Final = (
    TaskMetric(
        name="rmse",
        meaning="root of the mean squared error",
        unit="label",
        values="0 and above",
        higher_is_better=False,
        measure=lambda out, true, _cut: _sklearn().root_mean_squared_error(true, out[:, 0]),
    ),
    TaskMetric(
        name="mae",
        meaning="mean absolute error",
        unit="label",
        values="0 and above",
        higher_is_better=False,
        measure=lambda out, true, _cut: _sklearn().mean_absolute_error(true, out[:, 0]),
    ),
    TaskMetric(
        name="r2",
        meaning="share of the labels' variance that is explained (R²); 0 for their mean",
        values="up to 1",
        needs="labels that differ",
        defined=_labels_differ,
        measure=lambda out, true, _cut: _sklearn().r2_score(true, out[:, 0]),
    ),
)
_BINARY: Final = (
    TaskMetric(
        name="auc",
        meaning="area under the ROC curve; ties count one half",
        values="0 to 1",
        needs="rows of both classes",
        defined=_labels_differ,
        measure=lambda out, true, _cut: _sklearn().roc_auc_score(true, out[:, 0]),
    ),
    TaskMetric(
        name="accuracy",
        meaning="share of the rows whose class is right; the second one above the threshold",
        values="0 to 1",
        measure=lambda out, true, cut: _sklearn().accuracy_score(true, out[:, 0] > cut),
    ),
    TaskMetric(
        name="f1",
        meaning="F1 of the second class: harmonic mean of precision and recall above the threshold",
        values="0 to 1",
        needs="a row of the second class",
        defined=_has_second_class,
        measure=lambda out, true, cut: _sklearn().f1_score(true, out[:, 0] > cut),
    ),
    TaskMetric(
        name="log_loss",
        meaning="mean negative logarithm of the true class's probability, which is cut at 2e-16",
        unit="nats",
        values="0 to 36",
        higher_is_better=False,
        measure=lambda out, true, _cut: _sklearn().log_loss(
            true, scipy.special.expit(out[:, 0]), labels=[0, 1]
        ),
    ),
    TaskMetric(
        name="balanced_accuracy",
        meaning="mean over the classes that are there of the share of their rows that is right",
        values="0 to 1",
        measure=lambda out, true, cut: _mean_recall(true, out[:, 0] > cut),
    ),
    TaskMetric(
        name="brier",
        meaning="mean squared error of the second class's probability (Brier score)",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: float(
            np.square(scipy.special.expit(out[:, 0]) - true).mean()
        ),
    ),
    TaskMetric(
        name="ece",
        meaning="expected calibration error: mean distance between the second class's probability "
        "and its share, over ten bins of equal width",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: calibration_error(*confidences(out, true)),
    ),
)
_MULTICLASS: Final = (
    TaskMetric(
        name="accuracy",
        meaning="share of the rows whose most probable class is right (top 1)",
        values="0 to 1",
        measure=lambda out, true, _cut: _sklearn().accuracy_score(true, out.argmax(axis=1)),
    ),
    TaskMetric(
        name="macro_f1",
        meaning="mean F1 over the classes that are there or predicted",
        values="0 to 1",
        measure=lambda out, true, _cut: _sklearn().f1_score(
            true, out.argmax(axis=1), average="macro"
        ),
    ),
    TaskMetric(
        name="macro_auc",
        meaning="mean over the classes of the area under the ROC curve, each against the rest",
        values="0 to 1",
        needs="rows of every class",
        defined=_has_every_class,
        measure=lambda out, true, _cut: _one_against_the_rest(
            scipy.special.softmax(out, axis=1), true
        ),
    ),
    TaskMetric(
        name="balanced_accuracy",
        meaning="mean over the classes that are there of the share of their rows that is right",
        values="0 to 1",
        measure=lambda out, true, _cut: _mean_recall(true, out.argmax(axis=1)),
    ),
    TaskMetric(
        name="log_loss",
        meaning="mean negative logarithm of the true class's probability, which is cut at 2e-16",
        unit="nats",
        values="0 to 36",
        higher_is_better=False,
        measure=lambda out, true, _cut: _sklearn().log_loss(
            true, scipy.special.softmax(out, axis=1), labels=range(out.shape[1])
        ),
    ),
    TaskMetric(
        name="brier",
        meaning="mean over the rows of the squared errors of all classes' probabilities, added up "
        "(Brier score)",
        values="0 to 2",
        higher_is_better=False,
        measure=lambda out, true, _cut: float(
            np.square(scipy.special.softmax(out, axis=1) - np.eye(out.shape[1])[true])
            .sum(axis=1)
            .mean()
        ),
    ),
    TaskMetric(
        name="ece",
        meaning="expected calibration error: mean distance between the probability of the most "
        "probable class and the share of rows where it is right, over ten bins of equal width",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: calibration_error(*confidences(out, true)),
    ),
)

CALIBRATION_BINS: Final = 10
"""Bins of equal width that probabilities are sorted into to see how well calibrated they are."""


def confidences(
    outputs: Outputs, targets: Targets
) -> tuple[Float64[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return every row's probability that calibration is about, and whether it came true.

    That is the second class's in a binary task, and else the most probable class's.
    """
    if outputs.shape[1] == 1:
        return scipy.special.expit(outputs[:, 0]), targets == 1
    probabilities = scipy.special.softmax(outputs, axis=1)
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == targets


def calibration_bins(
    probabilities: Float64[np.ndarray, " rows"],
) -> Int64[np.ndarray, " rows"]:
    """Return the bin of every row, counted from 0."""
    places = (probabilities * CALIBRATION_BINS).astype(np.int64)
    return np.minimum(places, CALIBRATION_BINS - 1)


def calibration_error(
    probabilities: Float64[np.ndarray, " rows"], came_true: Bool[np.ndarray, " rows"]
) -> float:
    """Return the expected calibration error.

    References:
        Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 3.
    """
    missed = np.bincount(calibration_bins(probabilities), weights=probabilities - came_true)
    return float(np.abs(missed).sum() / len(probabilities))


def _mean_recall(targets: Targets, predicted: Shaped[np.ndarray, " rows"]) -> float:
    """Return the balanced accuracy; scikit-learn's own warns of predicted classes without rows."""
    right = targets == predicted
    return float(np.mean([right[targets == one].mean() for one in np.unique(targets)]))


def _one_against_the_rest(probabilities: Outputs, targets: Targets) -> float:
    return float(
        np.mean(
            [
                _sklearn().roc_auc_score(targets == number, column)
                for number, column in enumerate(probabilities.T)
            ]
        )
    )


TASK_METRICS: Final[Mapping[Task, tuple[TaskMetric, ...]]] = {
    "regression": _REGRESSION,
    "binary": _BINARY,
    "multiclass": _MULTICLASS,
}
"""The metrics of every task; the first one chooses the best epoch unless a run says otherwise.

[FedSim] reports RMSE, R² and accuracy (of game, a binary task), [FeT] RMSE and accuracy, [FedHSSL]
top-1 accuracy, AUC and F1.
"""


def metrics_of(
    task: Task, first: str | None, *, named: str = "training.metric"
) -> tuple[TaskMetric, ...]:
    """Return the metrics of a task.

    Args:
        task: What the label is.
        first: Name of the one that comes first; None: the one that is usual for the task.
        named: What the message calls ``first``.

    Raises:
        ConfigError: If the task has no such metric.
    """
    own = TASK_METRICS[task]
    names = [metric.name for metric in own]
    if first is not None and first not in names:
        near = checks.did_you_mean(first, names)
        raise ConfigError(f"{named}: a {task} task has {', '.join(names)}; got {first!r}{near}")
    return tuple(sorted(own, key=lambda metric: metric.name != (first or names[0])))
