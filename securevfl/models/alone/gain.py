"""What a joint model adds to the local baseline, and how much of it partners bring.

A **placebo** is the same training without what partners know: with each partner's rows permuted
against its keys, or with the primary's own network and no partner. What a placebo gains as well is
not the partners'.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float32, Float64, Shaped
from torch import Tensor

from securevfl.core.formatting import written
from securevfl.models.alone.choice import AVERAGE, CONSTANT, Alone, Used
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.task_metrics import (
    LEVEL,
    Interval,
    Resampled,
    Weights,
    bootstrap_intervals,
    resampled_metrics,
    resamples_for,
)
from securevfl.models.tasks import Metrics, TaskHead, as_logit, on_cpu

Outcome = Literal["better", "unclear", "worse"]
"""Where the interval of a gain lies: above zero, around it, below it."""

_MODEL_IN_WORDS = {
    CONSTANT: "a constant, without columns of its own",
    "linear": "the linear model",
    "network": "the network",
    AVERAGE: "an average of its models",
}
Placebo = Literal["permuted", "own"]
"""Partners' rows permuted against their keys, or the primary's own network without partners."""

_PLACEBO_IN_WORDS: Final[dict[Placebo, str]] = {
    "permuted": "the same training with partners' rows permuted",
    "own": "the same network without partners",
}
_METRIC_IN_WORDS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "auc": "AUC", "f1": "F1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The joint model's test metric minus the local baseline's; positive is better."""

    metric: str
    """What is compared: the metric that training goes by, in its own unit."""
    value: float
    interval: Interval | None
    """Of paired resamples of the test rows; None where too few of them define the metric."""
    outcome: Outcome
    """``"better"`` only where the joint model answers, and both the gain and what of it is the
    partners' are above zero."""
    used: Used
    """``"alone"`` where the run's own predictions are the local baseline's."""
    placebo: Placebo | None
    """The placebo that did best on the test rows; None: the family has none but the base."""
    partners: float
    """The joint model's test metric minus that placebo's, or minus the local baseline's."""
    partners_interval: Interval | None
    """As :attr:`interval`, of :attr:`partners`."""
    verdict: str
    """All of it in words."""

    def as_json(self) -> dict[str, Any]:
        """Return what ``metrics.json`` has under ``gain``."""
        ends = {"interval": self.interval, "partners_interval": self.partners_interval}
        listed = {name: None if one is None else list(one) for name, one in ends.items()}
        return {**asdict(self), **listed}


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
    placebos: Mapping[Placebo, Float32[Tensor, "rows outputs"]] = MappingProxyType({}),
) -> AloneMeasured:
    """Measure the local baseline on test rows, and the joint model against it and its placebos.

    All are measured on the same resamples of the rows, so that rows which are hard for all of
    them do not blur a difference.

    Args:
        alone: Fitted and chosen; nothing here changes the choice.
        inputs: The test rows.
        targets: Their labels, as the head takes them.
        joint: What the head reads of the joint model.
        threshold: The joint model's, of a binary task.
        seed: Run seed of the bootstrap.
        used: Whose predictions the run's are.
        placebos: What the head reads of each; the one with the best test metric counts. A binary
            metric that needs a threshold takes the joint model's.

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
    value = head.metric(joint, targets, threshold=threshold)
    tested = measured[alone.chosen]
    of_placebos = {
        name: head.metric(outputs, targets, threshold=threshold)
        for name, outputs in placebos.items()
    }
    placebo = max(of_placebos, key=lambda name: sign * of_placebos[name], default=None)
    without = (
        by_itself
        if placebo is None
        else resampled(on_cpu(placebos[placebo], targets)[0], threshold)
    )

    def less(other: Resampled) -> Resampled:
        def difference(weights: Weights) -> Float64[np.ndarray, " resamples"]:
            return sign * (together(weights) - other(weights))

        return difference

    # No candidate is called like these.
    drawn = bootstrap_intervals(
        {**models, "gain": less(by_itself), "partners": less(without)},
        rows=len(true),
        resamples=resamples_for(len(true), head.outputs),
        seed=seed,
    )
    intervals = {name: head.in_label_units(head.metric_name, one) for name, one in drawn.items()}
    partners = value - (head.headline(tested) if placebo is None else of_placebos[placebo])
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
        gain=gain_in_words(
            head,
            sign * (value - head.headline(tested)),
            intervals["gain"],
            chosen=alone.chosen,
            used=used,
            placebo=placebo,
            partners=sign * partners,
            partners_interval=intervals["partners"],
        ),
    )


def gain_in_words(
    head: TaskHead,
    value: float,
    interval: Interval | None,
    *,
    chosen: str,
    used: Used,
    placebo: Placebo | None = None,
    partners: float | None = None,
    partners_interval: Interval | None = None,
) -> Gain:
    """Return a gain with its verdict.

    Args:
        head: The task.
        value: The gain; positive is better.
        interval: Of it.
        chosen: The local baseline's model.
        used: Whose predictions the run's are.
        placebo: What the partners' part is counted from; None: the local baseline.
        partners: What of the gain the partners bring; None: all of it.
        partners_interval: Of that.
    """
    if partners is None:
        partners, partners_interval = value, interval
    outcome = _outcome(interval)
    of_partners = _outcome(partners_interval)
    name = _METRIC_IN_WORDS.get(head.metric_name, head.metric_name.replace("_", " "))
    turned = -1.0 if outcome == "worse" else 1.0
    sign = "+" if outcome == "unclear" else ""
    ends = () if interval is None else interval
    largest = max(abs(number) for number in (value, *ends))
    amount = f"{_written(turned * value, largest, sign)} {name}"
    within = _within(interval, turned, largest, sign, head=head, name=name)
    who = f"the local baseline is {_MODEL_IN_WORDS.get(chosen, chosen)}"
    text = f"no clear gain over the local baseline: {amount} ({within}); {who}"
    if used == "alone":
        text = (
            f"no clear gain on validation rows: predictions are the local baseline's, which is "
            f"{_MODEL_IN_WORDS.get(chosen, chosen)}"
        )
        outcome = "unclear"
    elif outcome == "worse":
        text = (
            f"joint is worse than the local baseline by {amount} ({within}): use the local "
            f"baseline; {who}"
        )
    elif outcome == "better":
        part = _written(partners, largest, "+" if of_partners != "better" else "")
        bounds = _within(partners_interval, 1.0, largest, "+" if of_partners != "better" else "")
        if placebo is None:
            text = f"joint improves on the local baseline by {amount} ({within}); {who}"
        elif of_partners == "better":
            text = (
                f"joint improves on the local baseline by {amount} ({within}), of which {part} "
                f"({bounds}) from the partners; {who}"
            )
        else:
            outcome = "unclear"
            text = (
                f"no clear gain from the partners: joint improves on the local baseline by "
                f"{amount} ({within}), and on {_PLACEBO_IN_WORDS[placebo]} by {part} ({bounds}); "
                f"{who}"
            )
    return Gain(
        metric=head.metric_name,
        value=value,
        interval=interval,
        outcome=outcome,
        used=used,
        placebo=placebo,
        partners=partners,
        partners_interval=partners_interval,
        verdict=text,
    )


def _outcome(interval: Interval | None) -> Outcome:
    if interval is not None and interval[0] > 0:
        return "better"
    return "worse" if interval is not None and interval[1] < 0 else "unclear"


def _written(number: float, largest: float, sign: str) -> str:
    """Return a figure with three digits that say something of the largest one next to it."""
    digits = 0 if largest >= 100 else 2 if largest >= 2 else 3 if largest >= 0.01 else 5
    return written(number, sign=sign, beside=(largest,), digits=digits)


def _within(
    interval: Interval | None,
    turned: float,
    largest: float,
    sign: str,
    *,
    head: TaskHead | None = None,
    name: str = "",
) -> str:
    """Return an interval in words; with a head, also which way its metric is better."""
    if interval is None:
        text = "too few test rows for an interval"
    else:
        low, high = sorted(turned * end for end in interval)
        ends = f"{_written(low, largest, sign)} to {_written(high, largest, sign)}"
        text = f"{LEVEL:.0%} interval ".replace("%", " %") + ends if head is not None else ends
    if head is None or head.higher_is_better:
        return text
    return f"{text}; lower {name} is better"
