"""Metrics of each task, and their bootstrap intervals.

A resample is a weight for each row: the number of times that it was drawn. All metrics but the area
under the ROC curve are functions of weighted sums over rows, so a block of resamples needs only a
few matrix products.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Bool, Float64, Int64, Shaped

from securevfl.core import checks
from securevfl.core.conventions import Task, stream
from securevfl.core.errors import ConfigError, in_one_line

Outputs = Float64[np.ndarray, "rows outputs"]
"""A model's outputs: predictions, the second class's logit, or a logit for each class."""

Targets = Shaped[np.ndarray, " rows"]
"""Labels in the outputs' units, 0 or 1, or class numbers."""


Cumulated = Float64[np.ndarray, "resamples different"]
"""Number of rows down to each different score, from the highest."""

Weights = Float64[np.ndarray, "resamples rows"]
"""Number of times that each row was drawn."""

Resampled = Callable[[Weights], Float64[np.ndarray, " resamples"]]
"""Computes a metric of each resample; NaN where it is not defined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetric:
    """A metric: its name, meaning, unit and computation."""

    name: str
    """Name in files, tables and ``training.metric``."""

    meaning: str
    """Definition in words."""

    unit: str = "none"
    """``"label"``: the labels' own units."""

    values: str
    """Range of values."""

    higher_is_better: bool = True

    needs: str = "a row"
    """Condition on the rows under which it is defined."""

    defined: Callable[[Targets, int], bool] = lambda targets, _classes: len(targets) > 0
    """Called with labels and the number of outputs; returns whether the metric is defined."""

    measure: Callable[[Outputs, Targets, float], Resampled]
    """Returns it as a function of resamples, by scikit-learn's definition; the last argument is the
    logit above which a row of a binary task counts as the second class."""

    def value(self, outputs: Outputs, targets: Targets, cut: float) -> float:
        """Return the metric of the rows, each once; arguments as for ``measure``."""
        return float(self.measure(outputs, targets, cut)(np.ones((1, len(targets))))[0])


def _labels_differ(targets: Targets, _outputs: int) -> bool:
    return len(np.unique(targets)) > 1


def _has_second_class(targets: Targets, _outputs: int) -> bool:
    return bool((targets == 1).any())


def _has_every_class(targets: Targets, outputs: int) -> bool:
    return len(np.unique(targets)) == outputs


TOP: Final = 0.1
"""Share of the rows, those of highest score, that recall and lift are of."""

GROUP: Final = "securevfl.metrics"
"""Entry points of own metrics of classes: functions of labels and probabilities."""

_REGRESSION: Final = (
    TaskMetric(
        name="rmse",
        meaning="root of the mean squared error",
        unit="label",
        values="0 and above",
        higher_is_better=False,
        measure=lambda out, true, _cut: _root(_mean(np.square(out[:, 0] - true))),
    ),
    TaskMetric(
        name="mae",
        meaning="mean absolute error",
        unit="label",
        values="0 and above",
        higher_is_better=False,
        measure=lambda out, true, _cut: _mean(np.abs(out[:, 0] - true)),
    ),
    TaskMetric(
        name="r2",
        meaning="share of the labels' variance that is explained (R²); 0 for their mean",
        values="up to 1",
        needs="labels that differ",
        defined=_labels_differ,
        measure=lambda out, true, _cut: _explained_variance(out[:, 0], true),
    ),
)

_LOG_LOSS: Final = TaskMetric(
    name="log_loss",
    meaning="mean negative logarithm of the true class's probability, which is cut at 2e-16",
    unit="nats",
    values="0 to 36",
    higher_is_better=False,
    measure=lambda out, true, _cut: _log_loss(_probabilities(out), true.astype(np.int64)),
)

_BALANCED_ACCURACY: Final = TaskMetric(
    name="balanced_accuracy",
    meaning="mean over the classes that are there of the share of their rows that is right",
    values="0 to 1",
    measure=lambda out, true, cut: _mean_recalls(
        true.astype(np.int64), predicted_classes(out, cut), max(2, out.shape[1])
    ),
)

_BINARY: Final = (
    TaskMetric(
        name="auc",
        meaning="area under the ROC curve; ties count one half",
        values="0 to 1",
        needs="rows of both classes",
        defined=_labels_differ,
        measure=lambda out, true, _cut: _area(out[:, 0], true == 1),
    ),
    TaskMetric(
        name="average_precision",
        meaning="precision at each row of the second class, averaged from the highest score down; "
        "that class's share for scores by chance",
        values="0 to 1",
        needs="a row of the second class",
        defined=_has_second_class,
        measure=lambda out, true, _cut: _mean_over_hits(out[:, 0], true == 1, _precision),
    ),
    TaskMetric(
        name="recall_at_top",
        meaning=f"share of the second class's rows that are among the {TOP:.0%} of highest score",
        values="0 to 1",
        needs="a row of the second class",
        defined=_has_second_class,
        measure=lambda out, true, _cut: _mean_over_hits(out[:, 0], true == 1, _share_in_top),
    ),
    TaskMetric(
        name="lift_at_top",
        meaning=f"how many times more rows of the second class are among the {TOP:.0%} of highest "
        f"score than among as many at random",
        values=f"0 to {1 / TOP:g}",
        needs="a row of the second class",
        defined=_has_second_class,
        measure=lambda out, true, _cut: _mean_over_hits(
            out[:, 0], true == 1, lambda rows, hits: _share_in_top(rows, hits) / TOP
        ),
    ),
    TaskMetric(
        name="accuracy",
        meaning="share of the rows whose class is right; the second one above the threshold",
        values="0 to 1",
        measure=lambda out, true, cut: _mean(predicted_classes(out, cut) == true),
    ),
    TaskMetric(
        name="f1",
        meaning="F1 of the second class: harmonic mean of precision and recall above the threshold",
        values="0 to 1",
        needs="a row of the second class",
        defined=_has_second_class,
        measure=lambda out, true, cut: _f1(true == 1, out[:, 0] > cut),
    ),
    _LOG_LOSS,
    _BALANCED_ACCURACY,
    TaskMetric(
        name="brier",
        meaning="mean squared error of the second class's probability (Brier score)",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: _mean(np.square(_probabilities(out)[:, 1] - true)),
    ),
    TaskMetric(
        name="ece",
        meaning="expected calibration error: mean distance between the second class's probability "
        "and its share, over ten bins of equal width",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: _calibration_error(*confidences(out, true)),
    ),
)

_MULTICLASS: Final = (
    TaskMetric(
        name="accuracy",
        meaning="share of the rows whose most probable class is right (top 1)",
        values="0 to 1",
        measure=lambda out, true, cut: _mean(predicted_classes(out, cut) == true),
    ),
    TaskMetric(
        name="macro_f1",
        meaning="mean F1 over the classes that are there or predicted",
        values="0 to 1",
        measure=lambda out, true, cut: _mean_of(
            _f1(true == label, predicted_classes(out, cut) == label)
            for label in range(out.shape[1])
        ),
    ),
    TaskMetric(
        name="macro_auc",
        meaning="mean over the classes of the area under the ROC curve, each against the rest",
        values="0 to 1",
        needs="rows of every class",
        defined=_has_every_class,
        measure=lambda out, true, _cut: _mean_of(
            (_area(own, true == label) for label, own in enumerate(_probabilities(out).T)),
            all_of_them=True,
        ),
    ),
    _BALANCED_ACCURACY,
    _LOG_LOSS,
    TaskMetric(
        name="brier",
        meaning="mean over the rows of the squared errors of all classes' probabilities, added up "
        "(Brier score)",
        values="0 to 2",
        higher_is_better=False,
        measure=lambda out, true, _cut: _mean(
            np.square(_probabilities(out) - np.eye(out.shape[1])[true]).sum(axis=1)
        ),
    ),
    TaskMetric(
        name="ece",
        meaning="expected calibration error: mean distance between the probability of the most "
        "probable class and the share of rows where it is right, over ten bins of equal width",
        values="0 to 1",
        higher_is_better=False,
        measure=lambda out, true, _cut: _calibration_error(*confidences(out, true)),
    ),
)

CALIBRATION_BINS: Final = 10
"""Bins of equal width for calibration."""


def _probabilities(outputs: Outputs) -> Float64[np.ndarray, "rows classes"]:
    if outputs.shape[1] > 1:
        return np.asarray(scipy.special.softmax(outputs, axis=1))
    chance = scipy.special.expit(outputs[:, 0])
    return np.stack([1 - chance, chance], axis=1)


def predicted_classes(outputs: Outputs, cut: float) -> Int64[np.ndarray, " rows"]:
    """Return each row's class: the second of two if above the logit ``cut``, else the likeliest."""
    if outputs.shape[1] == 1:
        return (outputs[:, 0] > cut).astype(np.int64)
    return outputs.argmax(axis=1)


def confidences(
    outputs: Outputs, targets: Targets
) -> tuple[Float64[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return the probability of each row's prediction, and whether it is right.

    The prediction is the second class in a binary task, otherwise the most probable class.
    """
    probabilities = _probabilities(outputs)
    if outputs.shape[1] == 1:
        return probabilities[:, 1], targets == 1
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == targets


def calibration_bins(
    probabilities: Float64[np.ndarray, " rows"],
) -> Int64[np.ndarray, " rows"]:
    """Return the calibration bin of each row, counted from 0."""
    places = (probabilities * CALIBRATION_BINS).astype(np.int64)
    return np.minimum(places, CALIBRATION_BINS - 1)


TASK_METRICS: Final[Mapping[Task, tuple[TaskMetric, ...]]] = {
    "regression": _REGRESSION,
    "binary": _BINARY,
    "multiclass": _MULTICLASS,
}
"""Metrics by task; the first one chooses the best epoch by default.

[FedSim] reports RMSE, R² and accuracy (of game, a binary task), [FeT] RMSE and accuracy, [FedHSSL]
top-1 accuracy, AUC and F1.
"""


def metrics_of(
    task: Task, first: str | None, *, named: str = "training.metric"
) -> tuple[TaskMetric, ...]:
    """Return the metrics of a task.

    Args:
        task: Kind of label.
        first: Name of the first metric; None: the default of the task.
        named: Name of ``first`` in the message.

    Raises:
        ConfigError: If the task has no such metric.
    """
    own = (*TASK_METRICS[task], *(() if task == "regression" else _installed_metrics()))
    names = [metric.name for metric in own]
    if first is not None and first not in names:
        near = checks.did_you_mean(first, names)
        raise ConfigError(f"{named}: a {task} task has {', '.join(names)}; got {first!r}{near}")
    return tuple(sorted(own, key=lambda metric: metric.name != (first or names[0])))


@functools.cache
def _installed_metrics() -> tuple[TaskMetric, ...]:
    """Return the metrics of installed packages, each a function as scikit-learn's are.

    It is called with class numbers and the second class's probabilities, of several classes with
    those of all. More is better unless its attribute ``higher_is_better`` is false.

    Raises:
        ConfigError: If one can't be imported; one line.
    """
    made = []
    for entry in metadata.entry_points(group=GROUP):
        try:
            function = entry.load()
        except Exception as error:
            reason = f"{GROUP}: {entry.name!r}, {entry.value}: can't be loaded"
            raise ConfigError(f"{reason}: {in_one_line(error)}") from error
        made.append(
            TaskMetric(
                name=entry.name,
                meaning=f"{entry.value} of an installed package",
                values="any number",
                higher_is_better=getattr(function, "higher_is_better", True),
                needs="rows of every class",
                defined=lambda true, outputs: len(np.unique(true)) == max(2, outputs),
                measure=functools.partial(_by_function, function),
            )
        )
    return tuple(made)


def _by_function(
    function: Callable[[Any, Any], float], outputs: Outputs, targets: Targets, _cut: float
) -> Resampled:
    scores = _probabilities(outputs)
    scores = scores[:, 1] if outputs.shape[1] == 1 else scores
    labels = targets.astype(np.int64)

    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        drawn = [np.repeat(np.arange(len(labels)), own.astype(np.int64)) for own in weights]
        classes = len(np.unique(labels))
        return np.array(
            [
                function(labels[rows], scores[rows])
                if len(np.unique(labels[rows])) == classes
                else np.nan
                for rows in drawn
            ],
            dtype=np.float64,
        )

    return measure


def _explained_variance(
    predicted: Float64[np.ndarray, " rows"], targets: Float64[np.ndarray, " rows"]
) -> Resampled:
    centred = targets - targets.mean()
    moments = np.stack([np.square(predicted - targets), centred, np.square(centred)], axis=1)

    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        missed, mean, square = (weights @ moments / weights.shape[1]).T
        variance = square - np.square(mean)
        # Equal labels leave nothing but rounding errors.
        return 1 - _ratio(missed, np.where(variance > 1e-12 * square, variance, 0))

    return measure


def _root(measure: Resampled) -> Resampled:
    return lambda weights: np.sqrt(measure(weights))


def _mean(values: Shaped[np.ndarray, " rows"]) -> Resampled:
    numbers = values.astype(np.float64)
    return lambda weights: weights @ numbers / len(numbers)


def _log_loss(
    probabilities: Float64[np.ndarray, "rows classes"], labels: Int64[np.ndarray, " rows"]
) -> Resampled:
    own = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    tiny = np.finfo(np.float64).eps
    return _mean(-np.log(np.clip(own, tiny, 1 - tiny)))


def _mean_recalls(
    labels: Shaped[np.ndarray, " rows"], predicted: Shaped[np.ndarray, " rows"], classes: int
) -> Resampled:
    there = np.eye(classes)[labels]
    right = there * (labels == predicted)[:, None]
    return lambda weights: _nanmean(list(_ratio(weights @ right, weights @ there).T))


def _f1(labels: Bool[np.ndarray, " rows"], predicted: Bool[np.ndarray, " rows"]) -> Resampled:
    hits = (labels & predicted).astype(np.float64)
    named = labels.astype(np.float64) + predicted
    return lambda weights: _ratio(2 * weights @ hits, weights @ named)


def _calibration_error(
    probabilities: Float64[np.ndarray, " rows"], came_true: Bool[np.ndarray, " rows"]
) -> Resampled:
    """Return the expected calibration error.

    References:
        Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 3.
    """
    rows = np.arange(len(probabilities))
    missed = np.zeros((len(probabilities), CALIBRATION_BINS))
    missed[rows, calibration_bins(probabilities)] = probabilities - came_true
    return lambda weights: np.abs(weights @ missed).sum(axis=1) / len(probabilities)


def _area(scores: Float64[np.ndarray, " rows"], positive: Bool[np.ndarray, " rows"]) -> Resampled:
    """Return the area under the ROC curve; ties count one half."""
    order = np.argsort(scores, kind="stable")
    ends = np.searchsorted(scores[order], scores[order], side="right")
    starts = np.searchsorted(scores[order], scores[order], side="left")
    ahead = positive[order]
    starts, ends = starts[ahead], ends[ahead]

    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        sorted_weights = weights[:, order]
        own = sorted_weights[:, ahead]
        below = np.zeros((len(weights), len(scores) + 1))
        np.cumsum(np.where(ahead, 0, sorted_weights), axis=1, out=below[:, 1:])
        pairs = own.sum(axis=1) * below[:, -1]
        won = (own * (below[:, starts] + below[:, ends])).sum(axis=1) / 2
        return _ratio(won, pairs)

    return measure


def _mean_over_hits(
    scores: Float64[np.ndarray, " rows"],
    positive: Bool[np.ndarray, " rows"],
    worth: Callable[[Cumulated, Cumulated], Cumulated],
) -> Resampled:
    """Return the mean worth of the positive rows, from the highest score down.

    Args:
        scores: Scores of the rows; those of equal ones are worth the same.
        positive: Which rows are positive.
        worth: Called with the numbers of rows and of positive ones down to each different score.
    """
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))

    def measure(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        rows = weights[:, order].cumsum(axis=1)[:, ends]
        hits = (weights * positive)[:, order].cumsum(axis=1)[:, ends]
        worths = np.diff(hits, prepend=0, axis=1) * worth(rows, hits)
        return _ratio(worths.sum(axis=1), hits[:, -1])

    return measure


def _precision(rows: Cumulated, hits: Cumulated) -> Cumulated:
    return np.nan_to_num(_ratio(hits, rows))


def _share_in_top(rows: Cumulated, _hits: Cumulated) -> Cumulated:
    """Return 1 for scores among the top rows, and a part of 1 for the score at their end."""
    own = np.diff(rows, prepend=0, axis=1)
    return np.clip(np.nan_to_num(_ratio(TOP * rows[:, -1:] - rows + own, own)), 0, 1)


def _ratio(
    above: Float64[np.ndarray, "*shape"], below: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """Return the quotient; NaN where the divisor is zero."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0)


def _mean_of(measures: Iterable[Resampled], *, all_of_them: bool = False) -> Resampled:
    """Return the mean over the classes that define it; with ``all_of_them``, NaN unless all do."""
    several = list(measures)
    if all_of_them:
        return lambda weights: np.stack([measure(weights) for measure in several]).mean(axis=0)
    return lambda weights: _nanmean([measure(weights) for measure in several])


def _nanmean(values: list[Float64[np.ndarray, " resamples"]]) -> Float64[np.ndarray, " resamples"]:
    """Return the mean of the defined values of each column; each column needs at least one."""
    table = np.stack(values)
    known = ~np.isnan(table)
    return np.where(known, table, 0).sum(axis=0) / known.sum(axis=0)


LEVEL: Final = 0.95
"""Share of the resamples inside an interval."""

_MOST: Final = 1000
_FEWEST: Final = 200
# Rows times outputs times resamples: a third of a second.
_DRAWN_AT_MOST: Final = 20_000_000
_BLOCK: Final = 1_000_000
# A metric that fewer resamples than this share define has no interval.
_DEFINED: Final = 0.5

Interval = tuple[float, float]


def resamples_for(rows: int, outputs: int) -> int:
    """Return the number of resamples: 1000, or fewer for very many rows."""
    return min(_MOST, max(_FEWEST, _DRAWN_AT_MOST // max(1, rows * outputs)))


def bootstrap_intervals(
    metrics: Mapping[str, Resampled], *, rows: int, resamples: int, seed: int
) -> dict[str, Interval | None]:
    """Return a percentile interval of every metric; None if too few resamples define it.

    Args:
        metrics: Result of :func:`resampled_metrics`.
        rows: Number of rows.
        resamples: Number of resamples.
        seed: Run seed.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    drawn = bootstrap_draws(metrics, rows=rows, resamples=resamples, seed=seed)
    return {name: percentile_interval(values) for name, values in drawn.items()}


def bootstrap_draws(
    metrics: Mapping[str, Resampled], *, rows: int, resamples: int, seed: int
) -> dict[str, Float64[np.ndarray, " resamples"]]:
    """Return every metric on the same resamples, so that differences between metrics are paired.

    Calls with equal numbers of rows and resamples and an equal seed draw equal resamples. Arguments
    as in :func:`bootstrap_intervals`.
    """
    random = stream(seed, "bootstrap")
    drawn: dict[str, list[Float64[np.ndarray, " _"]]] = {name: [] for name in metrics}
    left = resamples
    while left:
        block = min(left, max(1, _BLOCK // rows))
        left -= block
        places = random.integers(0, rows, size=(block, rows))
        places += np.arange(block)[:, None] * rows
        counts = np.bincount(places.ravel(), minlength=block * rows)
        weights = counts.reshape(block, rows).astype(np.float64)
        for name, measure in metrics.items():
            drawn[name].append(measure(weights))
    return {name: np.concatenate(blocks) for name, blocks in drawn.items()}


def percentile_interval(values: Float64[np.ndarray, " resamples"]) -> Interval | None:
    """Return the interval with a :data:`LEVEL` share of the resamples; None if few are defined."""
    known = values[np.isfinite(values)]
    if len(known) < _DEFINED * len(values):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_metrics(
    task: Task, outputs: Outputs, targets: Targets, *, cut: float
) -> dict[str, Resampled]:
    """Return every metric of a task as a function of resamples, by name.

    Args:
        task: Kind of label.
        outputs: A model's outputs.
        targets: The labels, in the outputs' units.
        cut: The logit above which a row of a binary task counts as the second class.
    """
    return {metric.name: metric.measure(outputs, targets, cut) for metric in metrics_of(task, None)}
