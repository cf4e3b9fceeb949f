"""The report's plots, as inline SVG: no file, no script, no font from elsewhere."""

import io
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# What all plots of a report share: inline SVG, without a file, script or font from elsewhere.

SIZE: Final = (6.4, 2.9)
"""Inches of most plots."""

# Each has a contrast of 3 and more with a white page and with a dark one (#14181d).
BLUE: Final = "#3f7fbf"
ORANGE: Final = "#c8661a"
GREY: Final = "#8a8f98"
INK: Final = "#1d2733"
"""Colour of text on a light cell, on any page."""

_STYLE: Final = '<style type="text/css">'
_PAGE_COLOURS: Final = (
    "svg{color:#1d2733}@media (prefers-color-scheme:dark){svg{color:#dfe4ea}}"
    "text{fill:currentColor}"
)
"""Axes and text have the colour of the page's text, light or dark."""


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element without a ground; equal figures give equal texts."""
    buffer = io.StringIO()
    # Text stays text (smaller, selectable); a fixed salt makes equal runs give equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "securevfl"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue().replace("#000000", "currentColor")
    return text[text.index("<svg") :].replace(_STYLE, _STYLE + _PAGE_COLOURS, 1)


def new_axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled and labelled."""
    figure = Figure(figsize=SIZE, layout="constrained")
    return figure, titled(figure.subplots(), title, x, y)


def by_count(axes: Axes, counts: Sequence[float]) -> dict[str, Any]:
    """Give an axis of epochs or rounds whole numbers, and return how its lines are drawn.

    A line of one point is nothing without a marker, and its axis no place without ends.

    Args:
        axes: Whose horizontal axis counts.
        counts: What it counts.
    """
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(set(counts)) == 1:
        axes.set_xlim(counts[0] - 1, counts[0] + 1)
    return {"marker": "o"} if len(counts) == 1 else {}


def titled(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Title and label axes, and return them."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return axes


# The report's plots, as inline SVG: no file, no script, no font from elsewhere.

# Larger tables of mistakes are colours alone.
_NUMBERED_CLASSES = 12
_DARK = 0.5
_LONGEST_NAME = 18
# Settings that span as much are drawn by their logarithm.
_LOG_FROM = 20


def metric_plot(
    history: Sequence[Mapping[str, float]], *, metric: str, alone: float | None, name: str
) -> str:
    """Return the metric's curves over epochs, with the primary alone, called so, as a line."""
    figure, axes = new_axes(f"{metric} by epoch", "epoch", metric)
    epochs = [row["epoch"] for row in history]
    style = by_count(axes, epochs)
    for part, colour, label in (("train", GREY, "training"), ("validation", BLUE, "validation")):
        axes.plot(epochs, [row[part] for row in history], color=colour, label=label, **style)
    if alone is not None:
        axes.axhline(alone, color=ORANGE, linestyle="--", label=name)
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def loss_plot(history: Sequence[Mapping[str, float]]) -> str:
    """Return the training loss over epochs."""
    figure, axes = new_axes("training loss by epoch", "epoch", "loss")
    epochs = [row["epoch"] for row in history]
    style = by_count(axes, epochs)
    axes.plot(epochs, [row["loss"] for row in history], color=BLUE, **style)
    return svg(figure)


def epsilon_plot(rounds: Sequence[int], epsilon: Sequence[float], *, budget: float | None) -> str:
    """Return the privacy spent after each round, with the budget as a line."""
    figure, axes = new_axes("privacy spent by round", "round", "epsilon")
    style = by_count(axes, rounds)
    axes.step(rounds, epsilon, where="post", color=BLUE, label="spent", **style)
    if budget is not None:
        axes.axhline(budget, color=ORANGE, linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def bytes_plot(traffic: Mapping[str, Mapping[str, int]]) -> str:
    """Return the bytes that each party sent and received, in megabytes."""
    figure, axes = new_axes("bytes on the wire", "megabytes", "")
    names = list(traffic)
    places = range(len(names))
    height = 0.38
    axes.barh(
        [place - height / 2 for place in places],
        [traffic[name]["sent"] / 1e6 for name in names],
        height,
        color=BLUE,
        label="sent",
    )
    axes.barh(
        [place + height / 2 for place in places],
        [traffic[name]["received"] / 1e6 for name in names],
        height,
        color=GREY,
        label="received",
    )
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def confusion_plot(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Return how many rows of each true class were taken for which one.

    Args:
        counts: A list for each true class, with a number for each predicted one.
        classes: What they are called, in that order.
    """
    figure, axes = new_axes("confusion matrix of test rows", "", "")
    size = len(classes)
    figure.set_size_inches(min(SIZE[0], 2.4 + 0.7 * size), min(8.0, 1.4 + 0.5 * size))
    # Colours are shares of a true class, so that a rare class is seen.
    shares = [[one / max(1, sum(row)) for one in row] for row in counts]
    axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= _NUMBERED_CLASSES:
        for row, numbers in enumerate(counts):
            for column, number in enumerate(numbers):
                colour = "white" if shares[row][column] > _DARK else INK
                place = (column + 0.5, row + 0.5)
                axes.annotate(
                    f"{number:,}", place, ha="center", va="center", fontsize=8, color=colour
                )
    ticks = [number + 0.5 for number in range(size)]
    axes.set_xticks(ticks, [_short(name) for name in classes], rotation=90 if size > 6 else 0)
    axes.set_yticks(ticks, [_short(name) for name in classes])
    axes.set_xlabel("predicted", fontsize=9)
    axes.set_ylabel("true", fontsize=9)
    axes.invert_yaxis()
    axes.grid(visible=False)
    return svg(figure)


def _short(name: str) -> str:
    # A dollar would start a formula.
    text = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}\u2026"
    return text.replace("$", r"\$")


def calibration_plot(bins: Sequence[Mapping[str, float]]) -> str:
    """Return the share that came true over the probability that was given, a dot a bin.

    Args:
        bins: Each with ``predicted``, ``observed`` and ``rows``.
    """
    figure, axes = new_axes("calibration (dashes: perfect)", "probability given", "share")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    most = max(one["rows"] for one in bins)
    axes.scatter(
        [one["predicted"] for one in bins],
        [one["observed"] for one in bins],
        s=[12 + 60 * one["rows"] / most for one in bins],
        color=BLUE,
        zorder=3,
    )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    return svg(figure)


def models_plot(measured: Mapping[str, tuple[float, Sequence[float] | None]], *, title: str) -> str:
    """Return one row a model: its figure as a dot, with its interval; a line through the first.

    Args:
        measured: Figure and interval of each model, by what it is called; None: no interval.
        title: What is measured.
    """
    figure, axes = new_axes(title, "", "")
    figure.set_figheight(0.9 + 0.34 * len(measured))
    for place, (value, interval) in enumerate(measured.values()):
        colour = ORANGE if place else BLUE
        if interval is not None:
            axes.plot(interval, [place, place], color=colour, linewidth=2)
        axes.plot(value, place, "o", color=colour)
    axes.axvline(next(iter(measured.values()))[0], color=BLUE, alpha=0.4, linewidth=1)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.set_ylim(-0.6, len(measured) - 0.4)
    axes.invert_yaxis()
    return svg(figure)


def comparison_plot(values: Mapping[str, Sequence[float]], *, title: str) -> str:
    """Return one row a method: a dot for each seed, a bar of one deviation around their mean.

    Args:
        values: The test metric of each seed, by method.
        title: What is compared, and by which metric.
    """
    figure, axes = new_axes(title, "", "")
    figure.set_figheight(0.9 + 0.34 * len(values))
    for place, seeds in enumerate(values.values()):
        deviation = statistics.stdev(seeds) if len(seeds) > 1 else 0.0
        mean = statistics.fmean(seeds)
        axes.errorbar(mean, place, xerr=deviation, fmt="|", color=BLUE, capsize=3, markersize=12)
        axes.plot(seeds, [place] * len(seeds), "o", color=ORANGE, alpha=0.55, markersize=4)
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(-0.6, len(values) - 0.4)
    axes.invert_yaxis()
    return svg(figure)


def sweep_plot(figures: Mapping[str, Any]) -> str:
    """Return a grid's test metric against one setting, a line for each value of the others.

    The setting is the first with several numbers. A bar is one deviation over seeds, and the
    primary alone is a line of its own. Without such a setting there is a row a point, as in
    :func:`comparison_plot`.

    Args:
        figures: What ``sweep.json`` holds.
    """
    points, metric = figures["points"].values(), figures["metric"]
    title = f"{figures['federation']}: test {metric}"
    across = next(
        (
            name
            for name, values in figures["settings"].items()
            if len(values) > 1 and all(type(value) in (int, float) for value in values)
        ),
        None,
    )
    if across is None:
        rows = {_label(one["settings"]): one["seeds"] for one in points if one["mean"] is not None}
        alone = figures["alone"]
        rows |= {"alone": alone["seeds"]} if alone and alone["mean"] is not None else {}
        return comparison_plot(rows, title=title)
    figure, axes = new_axes(title, across, metric)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for one in points:
        others = {name: value for name, value in one["settings"].items() if name != across}
        place = (one["settings"][across], one["mean"], one["std"] or 0.0)
        if one["mean"] is not None:
            lines.setdefault(_label(others), []).append(place)
    for number, (label, places) in enumerate(lines.items()):
        x, y, deviation = zip(*sorted(places), strict=True)
        axes.errorbar(
            x,
            y,
            yerr=deviation,
            marker="o",
            markersize=4,
            capsize=3,
            color=f"C{number}",
            label=label if len(lines) > 1 else "joint",
        )
    if figures["alone"] is not None and figures["alone"]["mean"] is not None:
        axes.axhline(figures["alone"]["mean"], color=GREY, linestyle="--", label="alone")
    values = figures["settings"][across]
    if min(values) > 0 and max(values) >= _LOG_FROM * min(values):
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def search_plot(figures: Mapping[str, Any]) -> str:
    """Return a search's validation metric, a dot a trial, and the best so far as a line.

    Args:
        figures: What ``search.json`` holds.
    """
    metric = figures["metric"]
    figure, axes = new_axes(f"{figures['federation']}: validation {metric}", "trial", metric)
    trials = [one for one in figures["trials"] if one["validation"] is not None]
    numbers = [one["number"] for one in trials]
    values = [one["validation"] for one in trials]
    choose = max if figures["higher_is_better"] else min
    best = list(itertools.accumulate(values, choose))
    axes.plot(numbers, values, "o", color=ORANGE, alpha=0.55, markersize=4, label="trial")
    style = by_count(axes, numbers)
    axes.step(numbers, best, where="post", color=BLUE, label="best so far", **style)
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def _label(settings: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings.items())
    return text or "as written"


def contribution_plot(measured: Mapping[str, Any]) -> str:
    """Return what each partner is worth: bars with intervals, without it and by Shapley.

    Args:
        measured: What ``contribution.json`` holds.
    """
    metric, level = measured["metric"], measured["level"]
    bars = [
        ("gone", "leave_one_out", "gone tomorrow", BLUE),
        ("again", "leave_one_out", "trained again without it", ORANGE),
        ("again", "shapley", "Shapley, trained again", GREY),
    ]
    if measured["again"] is None:
        bars = [bars[0], ("gone", "shapley", "Shapley, by the kept model", GREY)]
    names = list(measured["gone"]["partners"])
    figure, axes = new_axes(
        f"what each partner adds to {metric} (positive is better; {level:.0%} intervals)",
        metric,
        "",
    )
    figure.set_figheight(1.3 + 0.5 * len(names))
    height = 0.8 / len(bars)
    for number, (reading, kind, label, colour) in enumerate(bars):
        partners = measured[reading]["partners"]
        found = [partners[name][kind][metric] for name in names]
        places = [place + (number - (len(bars) - 1) / 2) * height for place in range(len(names))]
        values = [one["value"] for one in found]
        axes.barh(places, values, height, color=colour, label=label)
        for place, one in zip(places, found, strict=True):
            if one["interval"] is not None:
                axes.plot(one["interval"], [place, place], color="black", linewidth=1)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def similarities_plot(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the links' similarities (negative distances) in falling order, a line a secondary."""
    figure, axes = new_axes("similarity of all links, sorted", "share of the links", "similarity")
    for name, curve in curves.items():
        places = [number / max(1, len(curve) - 1) for number in range(len(curve))]
        axes.plot(places, list(curve), label=name, marker="o" if len(curve) == 1 else None)
    if curves:
        axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def advice_plot(advice: Mapping[str, Any]) -> str:
    """Return the share that can survive over epsilon, next to the dry run.

    Args:
        advice: What ``securevfl lab advise --json`` prints.
    """
    rehearsal = advice["rehearsal"]
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(1, 1 if rehearsal is None else 2, squeeze=False)[0]
    words = _epsilons(advice["bounds"])
    lines = {
        "shared": (f"shared by {advice['secondaries']}", BLUE, "-"),
        "blocks": ("blocks, all in one number", ORANGE, "-"),
        "blocks_spread": ("blocks, all numbers alike", ORANGE, ":"),
    }
    for name, (label, colour, style) in lines.items():
        values = [one[name] for one in advice["bounds"]]
        panels[0].plot(words, values, style, marker="o", color=colour, label=label)
    panels[0].set_ylim(0, 1.05)
    panels[0].set_ylabel("share of the signal that survives", fontsize=8)
    panels[0].legend(fontsize=7, frameon=False, loc="upper left")
    if rehearsal is not None:
        rows = rehearsal["epsilons"]
        panels[1].errorbar(
            _epsilons(rows),
            [one["gain"] for one in rows],
            [one["deviation"] or 0.0 for one in rows],
            marker="o",
            capsize=3,
            color=BLUE,
        )
        panels[1].axhline(0, color=GREY, linewidth=1)
        panels[1].set_ylabel(f"rehearsed gain over alone, {rows[0]['metric']}", fontsize=8)
    for axes in panels:
        axes.set_xlabel(f"epsilon at delta {advice['delta']:g}", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return svg(figure)


def _epsilons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["none" if row["epsilon"] is None else f"{row['epsilon']:g}" for row in rows]
