"""What all plots of a report share: inline SVG, without a file, script or font from elsewhere."""

import io
from collections.abc import Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

SIZE: Final = (6.4, 2.9)
"""Inches of most plots."""

BLUE: Final = "#2f5d8a"
ORANGE: Final = "#c8661a"
GREY: Final = "#8a8f98"


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element; equal figures give equal texts."""
    buffer = io.StringIO()
    # Text stays text (smaller, selectable); a fixed salt makes equal runs give equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "securevfl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


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
