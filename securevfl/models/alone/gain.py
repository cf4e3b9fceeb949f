"""What a joint model adds to the primary alone: a paired interval, and a verdict in words."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Float64, Shaped
from torch import Tensor

from securevfl.models.alone.choice import CONSTANT, Alone
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.alone.rule import Used
from securevfl.models.bootstrap import (
    LEVEL,
    Interval,
    Resampled,
    Weights,
    bootstrap_intervals,
    resampled_metrics,
    resamples_for,
)
from securevfl.models.tasks import Metrics, TaskHead, on_cpu
from securevfl.models.threshold import as_logit

Outcome = Literal["better", "unclear", "worse"]
"""Where the interval of a gain lies: above zero, around it, below it."""

_MODEL_IN_WORDS = {
    CONSTANT: "a constant, without columns of its own",
    "linear": "the linear model",
    "network": "the network",
}
_METRIC_IN_WORDS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "auc": "AUC", "f1": "F1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The joint model's test metric minus alone's, counted so that positive is better."""

    metric: str
    """What is compared: the metric that training goes by, in its own unit."""
    value: float
    interval: Interval | None
    """Of paired resamples of the test rows; None where too few of them define the metric."""
    outcome: Outcome
    used: Used
    """``"alone"`` where the run's own predictions are alone's."""
    verdict: str
    """All of it in words."""

    def as_json(self) -> dict[str, Any]:
        """Return what ``metrics.json`` has under ``gain``."""
        return {**asdict(self), "interval": None if self.interval is None else list(self.interval)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AloneMeasured:
    """The primary alone on test rows, and what the joint model adds."""

    chosen: str
    candidates: Mapping[str, Mapping[str, Any]]
    """For each its ``validation``, its ``test`` and its bootstrap ``interval`` there, of the metric
    that training goes by."""
    metrics: Metrics
    """Every metric of the test rows, of the chosen one."""
    gain: Gain

    def as_json(self) -> dict[str, Any]:
        """Return what ``metrics.json`` has under ``alone``, where ``gain`` stands beside it."""
        figures = asdict(self)
        del figures["gain"]
        return figures


def measure_alone(
    alone: Alone,
    inputs: OwnInputs,
    targets: Shaped[Tensor, " rows"],
    joint: Float32[Tensor, "rows outputs"],
    *,
    threshold: float,
    seed: int,
    used: Used = "joint",
) -> AloneMeasured:
    """Measure the primary alone on test rows, and the joint model against it.

    Both are measured on the same resamples of the rows, so that rows which are hard for both do
    not blur the difference.

    Args:
        alone: Fitted and chosen; nothing here changes the choice.
        inputs: The test rows.
        targets: Their labels, as the head takes them.
        joint: What the head reads of the joint model.
        threshold: The joint model's, of a binary task.
        seed: Run seed of the bootstrap.
        used: Whose predictions the run's are.

    Raises:
        DataError: If the metric that training goes by is not defined for these labels.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13; the rows of both
        models are drawn together.
    """
    head = alone.head
    measured = alone.measured(inputs, targets.cpu().numpy())
    _, true = on_cpu(joint, targets)

    def resampled(outputs: Float64[np.ndarray, "rows outputs"], cut: float) -> Resampled:
        metrics = resampled_metrics(head.task, outputs, true, cut=as_logit(cut))
        return metrics[head.metric_name]

    models = {
        name: resampled(one.model.margins(inputs).astype(np.float64), one.threshold)
        for name, one in alone.candidates.items()
    }
    together, by_itself = resampled(on_cpu(joint, targets)[0], threshold), models[alone.chosen]
    sign = 1.0 if head.higher_is_better else -1.0

    def difference(weights: Weights) -> Float64[np.ndarray, " resamples"]:
        return sign * (together(weights) - by_itself(weights))

    # No candidate is called like this.
    drawn = bootstrap_intervals(
        {**models, "gain": difference},
        rows=len(true),
        resamples=resamples_for(len(true), head.outputs),
        seed=seed,
    )
    intervals = {name: head.in_label_units(head.metric_name, one) for name, one in drawn.items()}
    tested = measured[alone.chosen]
    value = head.metric(joint, targets, threshold=threshold) - head.headline(tested)
    return AloneMeasured(
        chosen=alone.chosen,
        candidates={
            name: {
                "validation": head.headline(one.validation),
                "test": head.headline(measured[name]),
                "interval": None if (ends := intervals[name]) is None else list(ends),
            }
            for name, one in alone.candidates.items()
        },
        metrics=tested,
        gain=gain_in_words(head, sign * value, intervals["gain"], chosen=alone.chosen, used=used),
    )


def gain_in_words(
    head: TaskHead, value: float, interval: Interval | None, *, chosen: str, used: Used
) -> Gain:
    """Return a gain with its verdict.

    Args:
        head: The task.
        value: The gain; positive is better.
        interval: Of it.
        chosen: Alone's model.
        used: Whose predictions the run's are.
    """
    outcome: Outcome = "unclear"
    if interval is not None and interval[0] > 0:
        outcome = "better"
    elif interval is not None and interval[1] < 0:
        outcome = "worse"
    name = _METRIC_IN_WORDS.get(head.metric_name, head.metric_name.replace("_", " "))
    turned = -1.0 if outcome == "worse" else 1.0
    ends = None if interval is None else sorted(turned * end for end in interval)
    sign = "+" if outcome == "unclear" else ""
    digits = _digits([value, *(ends or ())])

    def written(number: float) -> str:
        # Not "-0.000".
        return f"{round(number, digits) + 0.0:{sign}.{digits}f}"

    amount = f"{written(turned * value)} {name}"
    if ends is None:
        within = "too few test rows for an interval"
    else:
        within = f"{LEVEL:.0%} interval {written(ends[0])} to {written(ends[1])}".replace("%", " %")
    within += "" if head.higher_is_better else f"; lower {name} is better"
    who = f"alone is {_MODEL_IN_WORDS.get(chosen, chosen)}"
    if used == "alone":
        text = f"no clear gain on validation rows: predictions are alone's; {who}"
    elif outcome == "better":
        text = f"joint beats alone by {amount} ({within}); {who}"
    elif outcome == "worse":
        text = f"joint is worse than alone by {amount} ({within}): use alone; {who}"
    else:
        text = f"no clear gain over alone: {amount} ({within}); {who}"
    return Gain(
        metric=head.metric_name,
        value=value,
        interval=interval,
        outcome=outcome,
        used=used,
        verdict=text,
    )


def _digits(numbers: list[float]) -> int:
    """Return so many decimals that the largest of these has three digits that say something."""
    largest = max(abs(number) for number in numbers)
    if largest >= 100:
        return 0
    if largest >= 2:
        return 2
    return 3 if largest >= 0.01 else 5
