"""Plots and tables of experiments."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.data.tables import PartyTable
from securevfl.desk.report.plots import BLUE, ORANGE, new_axes, svg
from securevfl.runtime.run_tables import read_party, read_tables


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


class TableStore:
    """Tables of federation files that differ in settings; equal tables are read and kept once.

    Args:
        data_root: Folder at which relative data paths start.
        given: Every party's table by name, which all files share; None: they are read.
    """

    def __init__(self, data_root: Path, given: Mapping[str, PartyTable] | None = None) -> None:
        self._data_root = data_root
        self._given = given
        self._digests: dict[str, str] = {}
        self.by_digest: dict[str, Mapping[str, PartyTable]] = {}
        """Every party's table, by the digest of all of them."""

    def digest_for(self, config: FederationConfig, *, whole: bool = True) -> str:
        """Return the digest of a federation's tables, which are read if they are not kept yet.

        Args:
            config: The federation.
            whole: Whether to read all parties' tables, and not the primary's alone.

        Raises:
            DataError: As :func:`securevfl.runtime.run_tables.read_party`.
        """
        settings = _reading_settings(config)
        if settings not in self._digests:
            tables = self._given or self._read(config, whole=whole)
            digest = self._digests[settings] = digest_of_tables(tables.values())
            self.by_digest.setdefault(digest, tables)
        return self._digests[settings]

    def _read(self, config: FederationConfig, *, whole: bool) -> Mapping[str, PartyTable]:
        if whole:
            return read_tables(config, self._data_root)
        return {config.primary.name: read_party(config, config.primary, self._data_root)}


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
