"""The report's plots, as inline SVG: no file, no script, no font from elsewhere."""

import html
import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

SIZE: Final = (6.4, 2.9)
"""Inches of most plots."""

# Each has a contrast of 3 and more with a white page and with a dark one (#14181d).
BLUE: Final = "#3f7fbf"
ORANGE: Final = "#c8661a"
GREY: Final = "#8a8f98"
INK: Final = "#1d2733"
"""Colour of text on a light cell, on any page."""

_GROUP: Final = re.compile(r'<g id="[^"]*">')
"""Opens a group with a name that nothing refers to, and that other plots have too."""

_STYLE: Final = '<style type="text/css">'
_PAGE_COLOURS: Final = (
    "svg{color:#1d2733}@media screen and (prefers-color-scheme:dark){svg{color:#dfe4ea}}"
    "text{fill:currentColor}"
)
"""Axes and text have the colour of the page's text, light or dark."""


def svg(figure: Figure, *, alt: str | None = None) -> str:
    """Return a figure as an SVG element without a ground; equal figures give equal texts.

    Args:
        figure: The plot.
        alt: Text alternative of the plot; None: its title.
    """
    buffer = io.StringIO()
    titles = [figure.get_suptitle(), *(axes.get_title(loc="left") for axes in figure.axes)]
    label = next((title for title in titles if title), "plot")
    # Text stays text (smaller, selectable). A salt of the plot's own makes equal runs give equal
    # files, and two plots of a page no equal ids.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"securevfl {label}"}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue().replace("#000000", "currentColor")
    text = _GROUP.sub("<g>", text[text.index("<svg") :])
    named = f'<svg role="img" aria-label="{html.escape(alt or label)}"'
    return text.replace("<svg", named, 1).replace(_STYLE, _STYLE + _PAGE_COLOURS, 1)


def new_axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled and labelled."""
    figure = Figure(figsize=SIZE, layout="constrained")
    return figure, title_axes(figure.subplots(), title, x, y)


def by_count(axes: Axes, counts: Sequence[float]) -> dict[str, Any]:
    """Give an axis of epochs or rounds whole numbers, and return the style of its lines.

    Args:
        axes: Axes whose horizontal axis counts.
        counts: Values on it; a single one gets a marker.
    """
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(set(counts)) == 1:
        axes.set_xlim(counts[0] - 1, counts[0] + 1)
    return {"marker": "o"} if len(counts) == 1 else {}


def title_axes(axes: Axes, title: str, x: str, y: str) -> Axes:
    """Title and label axes, and return them."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return axes


# Larger tables of mistakes are colours alone.
_NUMBERED_CLASSES = 12
_DARK = 0.5
_LONGEST_NAME = 18


def metric_figure(
    history: Sequence[Mapping[str, float]], *, metric: str, alone: float | None, name: str
) -> Figure:
    """Return a figure of the metric over epochs, with the primary alone as a line called `name`."""
    figure, axes = new_axes(f"{metric} by epoch", "epoch", metric)
    epochs = [row["epoch"] for row in history]
    style = by_count(axes, epochs)
    for part, colour, label in (("train", GREY, "training"), ("validation", BLUE, "validation")):
        axes.plot(epochs, [row[part] for row in history], color=colour, label=label, **style)
    if alone is not None:
        axes.axhline(alone, color=ORANGE, linestyle="--", label=name)
    axes.legend(fontsize=8, frameon=False)
    return figure


def loss_plot(history: Sequence[Mapping[str, float]]) -> str:
    """Return a plot of the training loss over epochs."""
    figure, axes = new_axes("training loss by epoch", "epoch", "loss")
    epochs = [row["epoch"] for row in history]
    style = by_count(axes, epochs)
    axes.plot(epochs, [row["loss"] for row in history], color=BLUE, **style)
    return svg(figure)


def epsilon_plot(rounds: Sequence[int], epsilon: Sequence[float], *, budget: float | None) -> str:
    """Return a plot of epsilon after each round, with the budget as a line."""
    figure, axes = new_axes("privacy spent by round", "round", "epsilon")
    style = by_count(axes, rounds)
    axes.step(rounds, epsilon, where="post", color=BLUE, label="spent", **style)
    if budget is not None:
        axes.axhline(budget, color=ORANGE, linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def bytes_plot(traffic: Mapping[str, Mapping[str, int]]) -> str:
    """Return a plot of the megabytes that each party sent and received."""
    figure, axes = new_axes("bytes on the wire", "megabytes", "")
    names = list(traffic)
    places = range(len(names))
    height = 0.38
    for side, (kind, colour) in zip((-1, 1), (("sent", BLUE), ("received", GREY)), strict=True):
        lines = [place + side * height / 2 for place in places]
        values = [traffic[name][kind] / 1e6 for name in names]
        axes.barh(lines, values, height, color=colour, label=kind)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def confusion_plot(counts: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Return the confusion matrix: counts of rows by true and predicted class.

    Args:
        counts: A list for each true class, with a number for each predicted one.
        classes: Names of the classes, in that order.
    """
    figure, axes = new_axes("confusion matrix of test rows", "", "")
    size = len(classes)
    figure.set_size_inches(min(SIZE[0], 2.4 + 0.7 * size), min(8.0, 1.4 + 0.5 * size))
    # Colours are shares of a true class, so that a rare class is seen.
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
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
    """Return the observed share over the predicted probability, a dot for each bin.

    Args:
        bins: Each with ``predicted``, ``observed`` and ``rows``.
    """
    figure, axes = new_axes("calibration (dashes: perfect)", "probability given", "share")
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--")
    most = max(group["rows"] for group in bins)
    axes.scatter(
        [group["predicted"] for group in bins],
        [group["observed"] for group in bins],
        s=[12 + 60 * group["rows"] / most for group in bins],
        color=BLUE,
        zorder=3,
    )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    return svg(figure)


def models_plot(measured: Mapping[str, tuple[float, Sequence[float] | None]], *, title: str) -> str:
    """Return a plot with a row for each model: its figure as a dot, with its interval.

    Args:
        measured: Figure and interval of each model, by its name; None: no interval.
        title: Title of the plot.
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


def contribution_plot(measured: Mapping[str, Any]) -> str:
    """Return a plot of each partner's worth: bars with intervals, without it and by Shapley.

    Args:
        measured: Content of ``contribution.json``.
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
        chosen_figures = [partners[name][kind][metric] for name in names]
        places = [place + (number - (len(bars) - 1) / 2) * height for place in range(len(names))]
        values = [partner_figure["value"] for partner_figure in chosen_figures]
        axes.barh(places, values, height, color=colour, label=label)
        for place, partner_figure in zip(places, chosen_figures, strict=True):
            if partner_figure["interval"] is not None:
                axes.plot(partner_figure["interval"], [place, place], color="black", linewidth=1)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def attacks_plot(best: Mapping[str, Mapping[str, Any]], *, covered: Collection[str]) -> str:
    """Return a plot with a row for each attack: its success, the trivial guess and the ceiling.

    Args:
        best: Finding of each attack, by its name.
        covered: Names of attacks on channels that a guarantee covers.
    """
    figure, axes = new_axes(
        "what attacks guess, each next to its trivial guess",
        "share of right guesses, AUC, or share of variance (R2)",
        "",
    )
    figure.set_figheight(1.5 + 0.34 * len(best))
    kinds: dict[bool, dict[str, Any]] = {
        True: {"color": BLUE, "marker": "o", "label": "a guarantee covers the channel"},
        False: {"color": ORANGE, "marker": "D", "label": "none covers it"},
    }
    for place, (name, finding) in enumerate(best.items()):
        kind = kinds[name in covered]
        axes.plot([finding["floor"], finding["value"]], [place, place], color=GREY, linewidth=1)
        axes.plot(finding["interval"], [place, place], color=kind["color"], linewidth=3)
        axes.plot(finding["value"], place, linestyle="none", **kind)
        axes.plot(finding["floor"], place, "|", color="black", markersize=13, markeredgewidth=2)
        if finding["ceiling"] is not None:
            axes.plot(finding["ceiling"], place, "<", color=GREY, markerfacecolor="none")
    # All of them, also where this run has none.
    marks = [Line2D([], [], linestyle="none", **kind) for kind in kinds.values()]
    marks.append(Line2D([], [], linestyle="none", color="black", marker="|", label="trivial guess"))
    marks.append(
        Line2D(
            [],
            [],
            linestyle="none",
            color=GREY,
            marker="<",
            markerfacecolor="none",
            label="the same without noise",
        )
    )
    figure.legend(handles=marks, fontsize=8, frameon=False, ncols=2, loc="outside lower left")
    lowest = min(finding["interval"][0] for finding in best.values())
    axes.set_xlim(min(-0.02, max(-0.25, lowest)), 1.02)
    axes.set_yticks(range(len(best)), list(best))
    axes.set_ylim(-0.6, len(best) - 0.4)
    axes.invert_yaxis()
    beaten = ", ".join(name for name, finding in best.items() if finding["beats_floor"]) or "none"
    return svg(
        figure,
        alt=f"A row for each of {len(best)} attacks; the table below has all figures. Clearly "
        f"above the trivial guess: {beaten}",
    )
