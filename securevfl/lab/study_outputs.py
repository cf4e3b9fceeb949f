"""Plots of experiments: comparisons, sweeps and similarities."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.desk.report.plots import BLUE, GREY, ORANGE, new_axes, svg
from securevfl.lab.methods import ALONE, method_family
from securevfl.runtime.run_tables import read_party, read_tables

_LOG_FROM: Final = 20
"""Least ratio of a setting's values from which its axis is logarithmic."""


def comparison_plot(values: Mapping[str, Sequence[float]], *, title: str) -> str:
    """Return a plot with a row for each method: a dot for each seed, a bar of one deviation.

    Args:
        values: The test metric of each seed, by method.
        title: Title of the plot.
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
    """Return a plot of a grid's test metric over one setting, a line for each value of the others.

    The setting is the first with several numbers. A bar is one deviation over seeds, and the
    primary alone is a line of its own. Without such a setting there is a row a point, as in
    :func:`comparison_plot`.

    Args:
        figures: Content of ``sweep.json``.
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
        rows = {
            _label(point["settings"]): point["seeds"]
            for point in points
            if point["mean"] is not None
        }
        alone = figures["alone"]
        rows |= {"alone": alone["seeds"]} if alone and alone["mean"] is not None else {}
        return comparison_plot(rows, title=title)
    figure, axes = new_axes(title, across, metric)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for point in points:
        others = {name: value for name, value in point["settings"].items() if name != across}
        place = (point["settings"][across], point["mean"], point["std"] or 0.0)
        if point["mean"] is not None:
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


def _label(settings: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in settings.items())
    return text or "as written"


def similarities_plot(curves: Mapping[str, Sequence[float]]) -> str:
    """Return a plot of sorted similarities (negative distances), a line for each secondary."""
    figure, axes = new_axes("similarity of all links, sorted", "share of the links", "similarity")
    for name, curve in curves.items():
        places = [number / max(1, len(curve) - 1) for number in range(len(curve))]
        axes.plot(places, list(curve), label=name, marker="o" if len(curve) == 1 else None)
    if curves:
        axes.legend(fontsize=8, frameon=False)
    return svg(figure)


_UNRELATED: Final = ("model", "encoder", "base", "pretraining", "prediction", "runtime", "methods")
"""Sections of a federation file that do not change how parties' tables are read."""


def tables_for(
    config: FederationConfig, methods: Sequence[str], data_root: Path
) -> dict[str, PartyTable]:
    """Read the tables that methods need: only the primary's if no method reads others.

    Raises:
        DataError: As :func:`securevfl.runtime.run_tables.read_party`.
    """
    if all(method_family(config.source, name) in ALONE for name in methods):
        return {config.primary.name: read_party(config, config.primary, data_root)}
    return read_tables(config, data_root)


class TableStore:
    """Tables of federation files that differ in settings; equal tables are read and kept once.

    Args:
        data_root: Folder at which relative data paths start.
    """

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._digests: dict[str, str] = {}
        self.by_digest: dict[str, Mapping[str, PartyTable]] = {}
        """Every party's table, by the digest of all of them."""

    def digest_for(self, config: FederationConfig) -> str:
        """Return the digest of a federation's tables, which are read if they are not kept yet.

        Raises:
            DataError: As :func:`securevfl.runtime.run_tables.read_party`.
        """
        settings = _reading_settings(config)
        if settings not in self._digests:
            self._digests[settings] = self.keep(read_tables(config, self._data_root))
        return self._digests[settings]

    def keep(self, tables: Mapping[str, PartyTable]) -> str:
        """Keep tables, and return their digest."""
        digest = digest_of_tables(tables.values())
        self.by_digest.setdefault(digest, tables)
        return digest


def _reading_settings(config: FederationConfig) -> str:
    """Return all settings that may change how tables are read; too many rather than too few."""
    kept = {name: value for name, value in config.source.items() if name not in _UNRELATED}
    kept["federation"] = {
        name: value for name, value in config.source["federation"].items() if name != "seed"
    }
    return json.dumps(kept, sort_keys=True, default=repr)


def digest_of_tables(tables: Iterable[PartyTable]) -> str:
    """Return a digest of tables' contents: a database may hold other rows tomorrow."""
    total = hashlib.sha256()
    for table in tables:
        names = (table.name, table.key_names, table.feature_names, table.classes)
        total.update(repr(names).encode())
        keys = {} if table.link_columns is None else table.link_columns.columns
        arrays = (
            table.keys,
            table.features,
            table.labels,
            table.labelled,
            table.entities,
            table.split_by,
        )
        for values in (*arrays, *keys.values()):
            if values is None or values.dtype == object:
                total.update(repr(None if values is None else values.tolist()).encode())
            else:
                total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()
