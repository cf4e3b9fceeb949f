"""Figures of several panels, written as SVG."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels_of(number: int, *, most: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels, at most ``most`` in a line, each of a size in inches."""
    columns = min(most, number)
    lines = -(-number // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines), layout="constrained")
    panels = list(np.atleast_1d(figure.subplots(lines, columns)).ravel())
    for axes in panels[number:]:
        axes.set_visible(False)
    return figure, panels[:number]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, byte for byte the same for the same figures."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "securevfl"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
