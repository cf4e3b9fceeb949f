"""Draw epsilon against noise for one plan, counted in several ways (FeT's Figure 8, right)."""

import io
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from securevfl.core.errors import ConfigError
from securevfl.core.files import write_bytes
from securevfl.dp.budget import Budget, curves

_POINTS = 17
# From a fifth of the asked noise to ten times it, in equal ratios.
_LEAST, _MOST = 0.2, 10.0


def draw(budget: Budget, *, path: Path, around: float) -> None:
    """Write an SVG file with one curve a method, the noise multiplier on the horizontal axis.

    Raises:
        ConfigError: If the file's name does not end in ``.svg``.
        StorageError: If it cannot be written.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"--plot: the file's name must end in .svg, got {path}")
    multipliers = [float(x) for x in np.geomspace(_LEAST * around, _MOST * around, _POINTS)]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (label, epsilons) in curves(budget, multipliers).items():
        points = [
            (x, y) for x, y in zip(multipliers, epsilons, strict=True) if y is not None and y > 0
        ]
        if points:
            style = "--" if name == "as-published" else "-"
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.axvline(around, color="0.7", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("noise multiplier of one round, z")
    axes.set_ylabel(f"epsilon at delta = {budget.delta:g}")
    axes.set_title(
        f"{budget.unit}, {budget.encoder} encoder, {budget.steps} steps, "
        f"q = {budget.sampling_rate:g}, k = {budget.secondaries}"
    )
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize="small")
    buffer = io.BytesIO()
    # A fixed salt and no date: the same plan gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "securevfl", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_bytes(path, buffer.getvalue(), for_others=True)
