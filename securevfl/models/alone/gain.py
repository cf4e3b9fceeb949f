"""Gain of a joint model over the local baseline, and the partners' part of the gain.

A **placebo** is the same training without the partners' information: with each partner's rows
permuted against its keys, or with the primary's network and no partner. The placebo's gain is not
due to the partners.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float32, Float64, Shaped
from torch import Tensor

from securevfl.core.formatting import format_figure
from securevfl.models import task_metrics
from securevfl.models.alone.choice import AVERAGE, CONSTANT, Alone, Decision, Used
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.tasks import Metrics, TaskHead, as_logit, on_cpu

Outcome = Literal["better", "unclear", "worse"]
"""Position of a gain's interval: above zero, around it, or below it."""

_MODEL_IN_WORDS = {
    CONSTANT: "a constant, without columns of its own",
    "linear": "the linear model",
    "network": "the network",
    AVERAGE: "an average of its models",
}
Placebo = Literal["permuted", "own"]
"""Partners' rows permuted against their keys, or the primary's network without partners."""

_PLACEBO_IN_WORDS: Final[dict[Placebo, str]] = {
    "permuted": "the same training with partners' rows permuted",
    "own": "the same network without partners",
}
_METRIC_IN_WORDS = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "auc": "AUC", "f1": "F1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceboGain:
    """The joint model's test metric minus a placebo's; positive is better."""

    placebo: Placebo
    value: float
    """The gain, in the metric's own unit."""
    interval: task_metrics.Interval | None
    """Interval from paired resamples of the test rows; None if too few of them define the
    metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The joint model's test metric minus the local baseline's; positive is better."""

    metric: str
    """Metric that is compared: the one that training optimises, in its own unit."""
    value: float
    """The gain."""
    interval: task_metrics.Interval | None
    """Interval from paired resamples of the test rows; None if too few of them define the
    metric."""
    outcome: Outcome
    """``"better"`` only if the joint model is used, and both the gain and the partners' part of it
    are above zero."""
    used: Used
    """``"alone"`` if the run's predictions are the local baseline's."""
    placebo: Placebo | None
    """The placebo with the best test metric; None if the family has no placebo."""
    partners: float
    """The joint model's test metric minus that placebo's, or minus the local baseline's."""
    partners_interval: task_metrics.Interval | None
    """Interval of :attr:`partners`."""
    verdict: str
    """The result in words."""

    def as_json(self) -> dict[str, Any]:
        """Return the object under ``gain`` in ``metrics.json``."""
        ends = {"interval": self.interval, "partners_interval": self.partners_interval}
        listed = {
            name: None if interval is None else list(interval) for name, interval in ends.items()
        }
        return {**asdict(self), **listed}


@dataclass(frozen=True, kw_only=True, slots=True)
class AloneMeasured:
    """The local baseline on test rows, and the joint model's gain over it."""

    chosen: str
    """Name of the chosen candidate."""
    candidates: Mapping[str, Mapping[str, Any]]
    """Figures by candidate: the metric that training optimises on ``validation`` and ``test`` rows,
    and its bootstrap ``interval`` on test rows."""
    metrics: Metrics
    """Every metric of the chosen candidate on the test rows."""
    gain: Gain
    """Gain of the joint model."""

    def as_json(self) -> dict[str, Any]:
        """Return the object under ``alone`` in ``metrics.json``; ``gain`` is next to it."""
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
    decision: Decision | None = None,
    placebos: Mapping[Placebo, Float32[Tensor, "rows outputs"]] = MappingProxyType({}),
) -> AloneMeasured:
    """Measure the local baseline on test rows, and the joint model against it and its placebos.

    All models share the resamples of the rows, which narrows the intervals of differences.

    Args:
        alone: The local baseline; its choice does not change here.
        inputs: The test rows.
        targets: Their labels, as the head takes them.
        joint: The joint model's outputs.
        threshold: The joint model's threshold in a binary task.
        seed: Run seed of the bootstrap.
        decision: The choice of the model whose predictions the run uses; None: the joint one.
        placebos: Outputs of each placebo; the one with the best test metric counts. Binary metrics
            take the joint model's threshold.

    Raises:
        DataError: If the metric that training optimises is not defined for these labels.

    References:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13, with paired rows.
    """
    head = alone.head
    measured = alone.measure(inputs, targets.cpu().numpy())
    _, true = on_cpu(joint, targets)

    def resample_metric(
        outputs: Float64[np.ndarray, "rows outputs"], cut: float
    ) -> task_metrics.Resampled:
        metrics = task_metrics.resampled_metrics(head.task, outputs, true, cut=as_logit(cut))
        return metrics[head.metric_name]

    models: dict[str, task_metrics.Resampled] = {
        name: resample_metric(
            candidate.model.margins(inputs).astype(np.float64), candidate.threshold
        )
        for name, candidate in alone.candidates.items()
    }
    sign = 1.0 if head.higher_is_better else -1.0
    value = head.metric(joint, targets, threshold=threshold)
    tested = measured[alone.chosen]
    of_placebos = {
        name: head.metric(outputs, targets, threshold=threshold)
        for name, outputs in placebos.items()
    }
    placebo = max(of_placebos, key=lambda name: sign * of_placebos[name], default=None)

    # No candidate has one of these names.
    others = {"joint": joint} if placebo is None else {"joint": joint, "placebo": placebos[placebo]}
    for name, outputs in others.items():
        models[name] = resample_metric(on_cpu(outputs, targets)[0], threshold)
    drawn = task_metrics.bootstrap_draws(
        models,
        rows=len(true),
        resamples=task_metrics.resamples_for(len(true), head.outputs),
        seed=seed,
    )

    def interval(values: Float64[np.ndarray, " resamples"]) -> task_metrics.Interval | None:
        return head.in_label_units(head.metric_name, task_metrics.percentile_interval(values))

    partners = None
    if placebo is not None:
        partners = PlaceboGain(
            placebo=placebo,
            value=sign * (value - of_placebos[placebo]),
            interval=interval(sign * (drawn["joint"] - drawn["placebo"])),
        )
    return AloneMeasured(
        chosen=alone.chosen,
        candidates={
            name: {
                "validation": head.headline(candidate.validation),
                "test": head.headline(measured[name]),
                "interval": None if (ends := interval(drawn[name])) is None else list(ends),
            }
            for name, candidate in alone.candidates.items()
        },
        metrics=tested,
        gain=gain_in_words(
            head,
            sign * (value - head.headline(tested)),
            interval(sign * (drawn["joint"] - drawn[alone.chosen])),
            chosen=alone.chosen,
            decision=decision,
            partners=partners,
        ),
    )


def gain_in_words(
    head: TaskHead,
    value: float,
    interval: task_metrics.Interval | None,
    *,
    chosen: str,
    decision: Decision | None = None,
    partners: PlaceboGain | None = None,
) -> Gain:
    """Return a gain with its verdict in words.

    Args:
        head: The task.
        value: The gain; positive is better.
        interval: Its interval.
        chosen: The local baseline's model.
        decision: The choice of the model whose predictions the run uses; None: the joint one.
        partners: The partners' part of the gain; None: all of it.
    """
    outcome = _outcome(interval)
    name = _METRIC_IN_WORDS.get(head.metric_name, head.metric_name.replace("_", " "))
    turned = -1.0 if outcome == "worse" else 1.0
    sign = "+" if outcome == "unclear" else ""
    ends = () if interval is None else interval
    largest = max(abs(number) for number in (value, *ends))
    amount = f"{_format_gain(turned * value, largest, sign)} {name}"
    within = _within(interval, turned, largest, sign, head=head, name=name)
    who = f"the local baseline is {_MODEL_IN_WORDS.get(chosen, chosen)}"
    text = f"no clear gain over the local baseline: {amount} ({within}); {who}"
    if decision is not None and decision.used == "alone":
        text = (
            f"{_refusal_in_words(decision)}: predictions are the local baseline's, which is "
            f"{_MODEL_IN_WORDS.get(chosen, chosen)}"
        )
        outcome = "unclear"
    elif outcome == "worse":
        text = (
            f"joint is worse than the local baseline by {amount} ({within}): use the local "
            f"baseline; {who}"
        )
    elif outcome == "better":
        improves = f"joint improves on the local baseline by {amount} ({within})"
        text = f"{improves}; {who}"
        if partners is not None:
            clear = _outcome(partners.interval) == "better"
            part = _format_gain(partners.value, largest, "" if clear else "+")
            bounds = _within(partners.interval, 1.0, largest, "" if clear else "+")
            text = f"{improves}, of which {part} ({bounds}) from the partners; {who}"
            if not clear:
                outcome = "unclear"
                placebo = _PLACEBO_IN_WORDS[partners.placebo]
                text = (
                    f"no clear gain from the partners: {improves}, and on {placebo} by {part} "
                    f"({bounds}); {who}"
                )
    return Gain(
        metric=head.metric_name,
        value=value,
        interval=interval,
        outcome=outcome,
        used="joint" if decision is None else decision.used,
        placebo=None if partners is None else partners.placebo,
        partners=value if partners is None else partners.value,
        partners_interval=interval if partners is None else partners.interval,
        verdict=text,
    )


def _refusal_in_words(decision: Decision) -> str:
    """Return why the joint model does not answer."""
    if decision.too_few_rows:
        return (
            f"{decision.rows:,} rows without the test rows are too few to tell whether joint is "
            f"better (loss lower by {decision.gain:.3f} ± {decision.error:.3f})"
        )
    return f"no clear gain on the {decision.rows:,} rows that decide"


def _outcome(interval: task_metrics.Interval | None) -> Outcome:
    if interval is not None and interval[0] > 0:
        return "better"
    return "worse" if interval is not None and interval[1] < 0 else "unclear"


def _format_gain(number: float, largest: float, sign: str) -> str:
    """Return a figure with the digits that matter next to the largest figure."""
    digits = 0 if largest >= 100 else 2 if largest >= 2 else 3 if largest >= 0.01 else 5
    return format_figure(number, sign=sign, beside=(largest,), digits=digits)


def _within(
    interval: task_metrics.Interval | None,
    turned: float,
    largest: float,
    sign: str,
    *,
    head: TaskHead | None = None,
    name: str = "",
) -> str:
    """Return an interval in words; with ``head``, also whether lower is better."""
    if interval is None:
        text = "too few test rows for an interval"
    else:
        low, high = sorted(turned * end for end in interval)
        ends = f"{_format_gain(low, largest, sign)} to {_format_gain(high, largest, sign)}"
        text = (
            f"{task_metrics.LEVEL:.0%} interval ".replace("%", " %") + ends
            if head is not None
            else ends
        )
    if head is None or head.higher_is_better:
        return text
    return f"{text}; lower {name} is better"
