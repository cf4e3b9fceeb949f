"""The figures of a run in words, for the console and the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.core import progress
from securevfl.core.formatting import format_figure
from securevfl.models.tasks import HALF, Metrics


def models_measured(figures: Mapping[str, Any]) -> dict[str, Metrics]:
    """Return the metrics of every model that a run has measured, by words for people.

    Args:
        figures: What ``metrics.json`` holds.
    """
    family = figures["family"]
    alone = figures["alone"]
    measured = {
        f"{family} (joint)": figures["test_metrics"],
        f"{family}, validation rows": figures["validation_metrics"],
        alone_in_words(figures): alone and alone["metrics"],
    }
    return {text: metrics for text, metrics in measured.items() if metrics}


def alone_in_words(figures: Mapping[str, Any]) -> str:
    """Return the name of the local baseline with its model; empty without one."""
    return "" if figures["alone"] is None else f"local baseline ({figures['alone']['chosen']})"


def candidates_in_words(figures: Mapping[str, Any]) -> str:
    """Return the figures of every candidate of the local baseline, in a line."""
    alone = figures["alone"]
    each = [
        f"{name} {format_figure(candidate['test'])} ({format_figure(candidate['validation'])})"
        for name, candidate in alone["candidates"].items()
    ]
    return (
        f"local baseline, {figures['metric']} of test (validation) rows: {', '.join(each)}; models "
        f"with level validation loss are averaged by least loss, whatever their {figures['metric']}"
    )


def placebos_in_words(figures: Mapping[str, Any]) -> str:
    """Return what the same training gains without what partners know; empty without a placebo."""
    words = {"own": "without partners", "permuted": "with partners' rows permuted"}
    each = [
        f"{format_figure(placebo[figures['metric']])} {words[name]}"
        for name, placebo in figures["placebos"].items()
    ]
    return f"placebo, {figures['metric']} of test rows: {', '.join(each)}" if each else ""


def noise_in_words(figures: Mapping[str, Any]) -> str:
    """Return what noise costs in a simulation; empty where it was not measured."""
    if figures["without_noise"] is None:
        return ""
    name, noised = figures["metric"], figures.get("joint_test_metrics") or figures["test_metrics"]
    plain, measured = (format_figure(of[name]) for of in (figures["without_noise"], noised))
    return f"joint model, {name} of test rows: {measured}; {plain} without noise"


def engine_in_words(figures: Mapping[str, Any]) -> str:
    """Return what adds up the secondaries' rows, by the name that the federation file gives it."""
    words = {
        "crypten": "rows are CrypTen tensors that the secondaries share and add up",
        "masked": "CrypTen adds up rows under pairwise masks",
    }
    how = words[figures["engine"]]
    if figures["privacy"]["secondaries"] == 1:
        how = "of one secondary there is nothing to add up"
    place = "; simulated here, in clear" if figures["mode"] == "simulated" else ""
    return f"engine {figures['engine']}: {how}{place}"


def top_in_words(figures: Mapping[str, Any]) -> str:
    """Return what boosted trees add to the top model; empty where they were not tried."""
    top = (figures.get("base") or {}).get("top")
    if top is None:
        return ""
    gain = f"they lower the loss by {top['gain']:.3g} ± {top['error']:.2g}"
    return (
        f"partners' scores are added by a linear model and boosted trees, the trees with weight "
        f"{top['trees']:g} of 1: on rows that they were not fitted to, {gain}"
    )


def links_of_run(figures: Mapping[str, Any]) -> list[str]:
    """Return how many rows are linked, as each secondary has said; in simulations also exactly."""
    counts = [
        progress.LinkedRowsCounted(**content) for content in figures.get("linked_rows", {}).values()
    ]
    exact = [progress.LinksCounted(**content) for content in figures.get("links", {}).values()]
    return [*map(progress.linked_rows_in_words, counts), *map(progress.links_in_words, exact)]


def interval_heading(evaluation: Mapping[str, Any]) -> str:
    """Return what stands above the intervals of a run's test metrics.

    Args:
        evaluation: What ``metrics.json`` holds under that name.
    """
    return f"{evaluation['bootstrap']['level']:.0%} interval"


def interval_in_words(interval: Sequence[float] | None) -> str:
    """Return an interval in words; empty for None."""
    return (
        ""
        if interval is None
        else " to ".join(format_figure(end, beside=interval) for end in interval)
    )


def threshold_in_words(evaluation: Mapping[str, Any]) -> str:
    """Return where a row counts as one of the positive class, by name, and why there.

    Args:
        evaluation: Of a binary task.
    """
    threshold, confusion = evaluation["threshold"], evaluation["confusion"]
    positive, counts = confusion["classes"][1], confusion["counts"]
    why = {
        "half": "training.threshold",
        "auto": "that class is not rare",
        "fixed": "training.threshold",
        "f1": "the best F1 on validation rows",
        "youden": "the best Youden index on validation rows",
    }
    rule = threshold["rule"]
    if rule == "auto" and threshold["value"] != HALF:
        rule = "f1"
    share = sum(counts[1]) / max(1, sum(map(sum, counts)))
    none = "" if counts[0][1] + counts[1][1] else "; no test row is above it"
    return (
        f"positive class: {positive!r} ({share:.1%} of test rows), above its probability "
        f"{threshold['value']:.4g}: {why[rule]}{none}"
    )
