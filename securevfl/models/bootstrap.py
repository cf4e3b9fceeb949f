"""Bootstrap intervals of all metrics of a task at once, over rows that are drawn with replacement.

A resample is a weight for each row: how often it was drawn. Every metric is a function of sums of
rows' numbers under these weights, but for the area under the ROC curve, which is one of ranks; so
a block of resamples is a few products of matrices.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import scipy  # special functions load when they are first named
from jaxtyping import Bool, Float64, Shaped

from securevfl.core.seeds import stream
from securevfl.core.task import Task
from securevfl.models.task_metrics import (
    CALIBRATION_BINS,
    Outputs,
    Targets,
    calibration_bins,
    confidences,
)

LEVEL: Final = 0.95
"""Share of the resamples that an interval holds."""

_MOST: Final = 1000
_FEWEST: Final = 200
# Rows times outputs times resamples: a third of a second.
_DRAWN_AT_MOST: Final = 20_000_000
_BLOCK: Final = 1_000_000
# A metric that fewer resamples than this share define has no interval.
_DEFINED: Final = 0.5

Weights = Float64[np.ndarray, "resamples rows"]
"""How often each row was drawn."""

Resampled = Callable[[Weights], Float64[np.ndarray, " resamples"]]
"""A metric of each resample; NaN where it is not defined."""

Interval = tuple[float, float]


def resamples_for(rows: int, outputs: int) -> int:
    """Return how many resamples are drawn: 1000, or fewer where there are very many rows."""
    return min(_MOST, max(_FEWEST, _DRAWN_AT_MOST // max(1, rows * outputs)))


def bootstrap_intervals(
    metrics: Mapping[str, Resampled], *, rows: int, resamples: int, seed: int
) -> dict[str, Interval | None]:
    """Return a percentile interval of every metric; None where too few resamples define it.

    Args:
        metrics: What :func:`resampled_metrics` returned.
        rows: Their number.
        resamples: How many are drawn.
        seed: Run seed.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    drawn = bootstrap_draws(metrics, rows=rows, resamples=resamples, seed=seed)
    return {name: percentile_interval(values) for name, values in drawn.items()}


def bootstrap_draws(
    metrics: Mapping[str, Resampled], *, rows: int, resamples: int, seed: int
) -> dict[str, Float64[np.ndarray, " resamples"]]:
    """Return every metric of every resample: the same resamples for all of them.

    Sums and differences of what is returned are therefore paired by rows. The same rows, number
    and seed give the same resamples in another call. Arguments as of :func:`bootstrap_intervals`.
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
    """Return the interval that holds :data:`LEVEL` of the resamples, None if few are defined."""
    known = values[np.isfinite(values)]
    if len(known) < _DEFINED * len(values):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_metrics(
    task: Task, outputs: Outputs, targets: Targets, *, cut: float
) -> dict[str, Resampled]:
    """Return every metric of a task as a function of resamples, by name.

    Under weights of one each is what :class:`securevfl.models.task_metrics.TaskMetric` measures.

    Args:
        task: What the label is.
        outputs: A model's.
        targets: The labels, in the outputs' units.
        cut: The logit above which a row of a binary task counts as one of the second class.
    """
    if task == "regression":
        return _of_numbers(outputs[:, 0], targets)
    if task == "binary":
        chance = scipy.special.expit(outputs[:, 0])
        probabilities = np.stack([1 - chance, chance], axis=1)
        predicted = (outputs[:, 0] > cut).astype(np.int64)
        brier = _mean(np.square(chance - targets))
        scores = outputs
    else:
        probabilities = scipy.special.softmax(outputs, axis=1)
        predicted = outputs.argmax(axis=1)
        brier = _mean(np.square(probabilities - np.eye(outputs.shape[1])[targets]).sum(axis=1))
        scores = probabilities
    labels = targets.astype(np.int64)
    own = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    tiny = np.finfo(np.float64).eps
    common = {
        "accuracy": _mean(labels == predicted),
        "balanced_accuracy": _mean_recall(labels, predicted, probabilities.shape[1]),
        "log_loss": _mean(-np.log(np.clip(own, tiny, 1 - tiny))),
        "brier": brier,
        "ece": _calibration_error(*confidences(outputs, targets)),
    }
    if task == "binary":
        return common | {
            "auc": _area(scores[:, 0], labels == 1),
            "f1": _f1(labels == 1, predicted == 1),
        }
    numbers = range(outputs.shape[1])
    f1s = [_f1(labels == one, predicted == one) for one in numbers]
    areas = [_area(scores[:, one], labels == one) for one in numbers]
    return common | {
        "macro_f1": lambda weights: _nanmean([f1(weights) for f1 in f1s]),
        "macro_auc": lambda weights: np.mean([area(weights) for area in areas], axis=0),
    }


def _of_numbers(
    predicted: Float64[np.ndarray, " rows"], targets: Float64[np.ndarray, " rows"]
) -> dict[str, Resampled]:
    squares = np.square(predicted - targets)
    centred = targets - targets.mean()
    moments = np.stack([squares, centred, np.square(centred)], axis=1)

    def explained(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        missed, mean, square = (weights @ moments / weights.shape[1]).T
        variance = square - np.square(mean)
        # Labels that do not differ leave nothing but rounding.
        return 1 - _ratio(missed, np.where(variance > 1e-12 * square, variance, 0))

    mean_square = _mean(squares)
    return {
        "rmse": lambda weights: np.sqrt(mean_square(weights)),
        "mae": _mean(np.abs(predicted - targets)),
        "r2": explained,
    }


def _mean(values: Shaped[np.ndarray, " rows"]) -> Resampled:
    numbers = values.astype(np.float64)
    return lambda weights: weights @ numbers / len(numbers)


def _mean_recall(
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
    rows = np.arange(len(probabilities))
    missed = np.zeros((len(probabilities), CALIBRATION_BINS))
    missed[rows, calibration_bins(probabilities)] = probabilities - came_true
    return lambda weights: np.abs(weights @ missed).sum(axis=1) / len(probabilities)


def _area(scores: Float64[np.ndarray, " rows"], positive: Bool[np.ndarray, " rows"]) -> Resampled:
    """Return the area under the ROC curve: how many of the others lie below, ties by half."""
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


def _ratio(
    above: Float64[np.ndarray, "*shape"], below: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """Return the quotient; NaN where the divisor is zero."""
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below != 0)


def _nanmean(values: list[Float64[np.ndarray, " resamples"]]) -> Float64[np.ndarray, " resamples"]:
    """Return the mean of the numbers that are there, column by column; each has one."""
    table = np.stack(values)
    known = ~np.isnan(table)
    return np.where(known, table, 0).sum(axis=0) / known.sum(axis=0)
