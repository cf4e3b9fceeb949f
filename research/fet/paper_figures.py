"""FeT by the figures of its paper: links, parties, parts, party dropout, noise; beside FedSim.

    [SECUREVFL_DATA=...] python research/fet/paper_figures.py FIGURE TABLE [--seeds 3]
        [--plot F.svg] [--rows 4000] [--only 'fet, 10 parties' ...] [--between]

FIGURE is one of

- ``neighbours``: K from 1 to 100 (Figure 6), FeT and FedSim, beside top1sim and solo;
- ``parties``: 10 to 50 of them (Figure 7), FeT as it comes and with the paper's ``party_dropout``,
  FedSim, top1sim and solo; TABLE is ``mnist``;
- ``parts``: without dynamic masks, without places, encodings averaged never or rarely, pooled
  releases, keys with more noise or none;
- ``dropout``: parties left out of a round at random, 0 to 0.9, between processes, with bytes sent;
- ``importance`` and ``correlation``: features dealt out unevenly as VertiBench does (appendix G,
  whose settings are not known here), by alpha and by beta; not for house_kc;
- ``privacy``: noise and sampling rate (Figure 8), each point with its epsilon, which is sound: for
  dp-trained encoders and pooled releases, one link a record.

TABLE is ``digits`` (five parties, FeT's protocol), ``mnist``, ``gisette`` (the same on 4,000 rows)
or ``house_kc`` (two parties, 4,000 rows). No base and no alone: the networks by themselves, as in
the paper. Each line is a mean and deviation over seeds; differences to the first are paired by
seed. ``--store`` keeps each run as a line and skips what is there. ``--between`` runs every line
between processes, as ``dropout`` does by itself: the metric is the simulation's.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import write_table
from research.common.panels import panels_of, save
from research.fet.tables import ROWS, federation, paired, spread, study_of
from securevfl.core.memory import keep_freed_memory
from securevfl.lab.pooled_methods import train_in_one_place
from securevfl.models.alone.margins import BaselineConfig
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

NEIGHBOURS = (1, 5, 10, 25, 50, 100)
PARTIES = (10, 20, 30, 40, 50)
PAPERS_DROPOUT = 0.6
DROPPED = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
NOISES = (0.5, 1.0, 2.0, 4.0)
RATES = (1.0, 0.5, 0.1)
# [VertiBench] evaluates at these values.
UNEVEN = {"importance": (0.1, 1.0, 10.0, 100.0), "correlation": (0.0, 0.3, 0.6, 1.0)}
TOP1SIM: dict[str, Any] = {"family": "top1sim", "neighbours": None}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One setting: what differs from the study's, and where it stands in a plot."""

    name: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`research.fet.tables.study_of`."""
    series: str = ""
    at: float | None = None
    """Where on the x axis; None draws a line across."""


def neighbours() -> list[Line]:
    """Figure 6."""
    lines = [
        Line(
            name=f"{family}, K = {k}",
            changed={"family": family, "neighbours": k},
            series=family,
            at=k,
        )
        for family in ("fet", "fedsim")
        for k in NEIGHBOURS
    ]
    return [
        *lines,
        Line(name="top1sim", changed=TOP1SIM, series="top1sim"),
        Line(name="solo", series="solo"),
    ]


def parties() -> list[Line]:
    """Figure 7."""
    kinds: dict[str, dict[str, Any]] = {
        "fet": {},
        "fet-dropout": {"party_dropout": PAPERS_DROPOUT},
        "fedsim": {"family": "fedsim"},
        "top1sim": TOP1SIM,
        "solo": {},
    }
    return [
        Line(
            name=f"{kind}, {number} parties",
            changed=changed,
            tables={"parties": number},
            series=kind,
            at=number,
        )
        for kind, changed in kinds.items()
        for number in PARTIES
    ]


def parts(table: str) -> list[Line]:
    """Each part of the model taken out; and keys, where they are made."""
    no_places = {"fourier_scale": 1e9, "keys_as_features": False}
    lines = [
        Line(name="as it is"),
        Line(name="no dynamic masks", changed={"dynamic_masking": False}),
        Line(name="keys in encodings alone", changed={"keys_as_features": False}),
        Line(name="no keys at all", changed=no_places),
        Line(name="encodings averaged every epoch", changed={"average_positions_every": 1}),
        Line(name="encodings averaged every 5 epochs", changed={"average_positions_every": 5}),
        Line(name="pooled releases", changed={"release": "pooled"}),
    ]
    if table != "house_kc":
        lines += [
            Line(name=f"key noise {noise}", tables={"key_noise": noise})
            for noise in (0.0, 0.1, 0.2, 0.4)
        ]
    return lines


def dropout() -> list[Line]:
    """Parties left out of a round at random."""
    return [
        Line(name=f"r_d = {rate}", changed={"party_dropout": rate}, series="fet", at=rate)
        for rate in DROPPED
    ]


def uneven(by: str, values: tuple[float, ...]) -> list[Line]:
    """Appendix G: the methods on tables that are dealt out as ``by`` and its setting say."""
    kinds: dict[str, dict[str, Any]] = {"fet": {}, "top1sim": TOP1SIM, "solo": {}}
    return [
        Line(name="fet, even", series="fet, even"),
        *(
            Line(
                name=f"{kind}, {value:g}",
                changed=changed,
                tables={"by": by, "weights": value},
                series=kind,
                at=value,
            )
            for kind, changed in kinds.items()
            for value in values
        ),
    ]


def privacy(bounds: tuple[float, float]) -> list[Line]:
    """Figure 8, with a promise that holds."""
    kept = {
        "release": "pooled",
        "party.scaling": "bounds",
        "party.bounds": list(bounds),
    }
    lines = [Line(name="no noise", changed=kept, series="no noise")]
    for rate in RATES:
        for noise in NOISES:
            changed = {
                **kept,
                "privacy.mechanism": "gaussian",
                "privacy.encoder": "dp-trained",
                "privacy.noise_multiplier": noise,
                "privacy.sampling_rate": rate,
                "privacy.links_per_record": 1,
            }
            name = f"q = {rate}, noise {noise}"
            lines.append(Line(name=name, changed=changed, series=f"q = {rate}", at=noise))
    return [*lines, Line(name="solo", series="solo")]


def lines_of(figure: str, table: str) -> list[Line]:
    """Return the lines of a figure.

    Raises:
        SystemExit: If the table is none for this figure.
    """
    if figure == "parties":
        if table != "mnist":
            raise SystemExit("paper_figures.py: parties takes the table mnist, which has columns")
        return parties()
    if figure in UNEVEN:
        if table == "house_kc":
            raise SystemExit(f"paper_figures.py: {figure} deals out one table; house_kc is two")
        return uneven(figure, UNEVEN[figure])
    if figure == "privacy":
        bounds = study_of(table, seed=0).bounds
        if bounds is None:
            raise SystemExit(f"paper_figures.py: privacy needs declared bounds; {table} has none")
        return privacy(bounds)
    makers: dict[str, Callable[[], list[Line]]] = {"neighbours": neighbours, "dropout": dropout}
    return parts(table) if figure == "parts" else makers[figure]()


def measure(line: Line, table: str, seed: int, rows: int, *, processes: bool) -> dict[str, Any]:
    """Return what one line's run gives with one seed."""
    study = study_of(table, seed=seed, rows=rows, **line.tables)
    config = federation(study, line.changed, seed=seed)
    tables = {one.name: one for one in study.tables}
    cpu = torch.device("cpu")
    if line.series == "solo":
        solo, _ = train_in_one_place(config, tables, "solo", BaselineConfig(), cpu)
        return {"test": solo.test}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if processes:
            for one in study.tables:
                # Without the true match, which a party would take for a column like others.
                write_table(folder, one.name, replace(one, entities=None))
            metrics = train_in_processes(
                config,
                RunOptions(
                    run_folder=folder / "run", data_root=folder, observe=lambda _event: None
                ),
            ).as_json()
        else:
            metrics = simulate_federation(
                config, tables, RunOptions(run_folder=folder, device=cpu), with_alone=False
            ).metrics
    secondaries = [row for name, row in metrics["bytes"].items() if name != config.primary.name]
    return {
        "test": metrics["test"],
        "epsilon": metrics["privacy"]["epsilon"],
        "bytes": sum(row["sent"] for row in secondaries) / max(1, len(secondaries)),
    }


class Store:
    """What each run gave, a line of JSON each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
        self._found = dict(json.loads(line) for line in text.splitlines())

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what is kept, or make and keep it."""
        if key not in self._found:
            self._found[key] = make()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self._found[key]]) + "\n")
        found: dict[str, Any] = self._found[key]
        return found


def draw(
    found: list[tuple[Line, list[float]]], what: str, figure_name: str, table: str, path: Path
) -> None:
    """Draw differences to the first line, by series; bars are deviations over seeds.

    Lines without an x go across; where none has one, each gets a bar.
    """
    (first, own), *_ = found
    gaps = [[one - other for one, other in zip(values, own, strict=True)] for _, values in found]
    means = [statistics.mean(values) for values in gaps]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in gaps]
    figure, (axes,) = panels_of(1, most=1, size=(6.2, 3.4))
    label = f"test {what}, minus {first.name}"
    series = list(dict.fromkeys(line.series for line, _ in found))
    if all(line.at is None for line, _ in found):
        axes.barh([line.name for line, _ in found][::-1], means[::-1], xerr=spreads[::-1])
        axes.axvline(0, color="0.2", linewidth=1)
        axes.set_xlabel(label)
        axes.tick_params(labelsize=8)
        series = []
    for number, name in enumerate(series):
        points = [
            (line.at, mean, spread)
            for (line, _), mean, spread in zip(found, means, spreads, strict=True)
            if line.series == name
        ]
        at = [place for place, _, _ in points if place is not None]
        if at:
            _, heights, bars = zip(*points, strict=True)
            axes.errorbar(at, heights, yerr=bars, marker="o", capsize=2, label=name)
        else:
            axes.axhline(points[0][1], color=f"C{number}", linestyle="--", label=name)
    if series:
        axes.set_ylabel(label)
        axes.set_xlabel(ACROSS[figure_name])
        axes.set_xscale("log" if figure_name == "importance" else "linear")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_title(f"{table}: {figure_name}", fontsize=9)
    save(figure, path)


def more_cells(figure: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return what a figure's table says beside the metric."""
    if figure == "dropout":
        return [f"{statistics.mean(run['bytes'] for run in runs) / 1e6:.1f}"]
    if figure == "privacy":
        epsilon = runs[0].get("epsilon")
        return ["" if epsilon is None else f"{epsilon:.3g}"]
    return []


ACROSS = {
    "neighbours": "links a row, K",
    "parties": "parties",
    "dropout": "share of the secondaries left out of a round",
    "privacy": "noise multiplier",
    "importance": "alpha of every party's share",
    "correlation": "beta: 0 keeps correlated features together",
}
MORE_HEADS = {"dropout": ["MB sent by a secondary"], "privacy": ["epsilon"]}


def main() -> None:
    """Run what is not kept yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    figures = ("neighbours", "parties", "parts", "dropout", "privacy", *UNEVEN)
    parser.add_argument("figure", choices=figures)
    parser.add_argument("table", choices=["digits", "mnist", "gisette", "house_kc"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the primary, at most")
    parser.add_argument("--only", nargs="+", metavar="LINE", help="lines by name; default: all")
    parser.add_argument("--between", action="store_true", help="between processes; not for solo")
    parser.add_argument("--store", type=Path, help="a file that keeps what is done")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    lines, store = lines_of(options.figure, options.table), Store(options.store)
    if options.only:
        if unknown := set(options.only) - {line.name for line in lines}:
            parser.error(f"no such line: {', '.join(sorted(unknown))}")
        lines = [line for line in lines if line.name in options.only]
    metric = "RMSE" if options.table == "house_kc" else "accuracy"
    heads = [options.figure, f"test {metric}", "minus the first"]
    heads += MORE_HEADS.get(options.figure, [])
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    found: list[tuple[Line, list[float]]] = []
    for line in lines:
        runs = []
        for seed in range(options.seeds):
            processes = options.between or options.figure == "dropout"
            key = f"{options.figure} {options.table} {options.rows} {line} seed {seed}"
            key += " between" if options.between else ""
            make = partial(measure, line, options.table, seed, options.rows, processes=processes)
            runs.append(store.get(key, make))
        values = [float(run["test"]) for run in runs]
        found.append((line, values))
        first = found[0][1]
        cells = [line.name, spread(values), paired(values, first)]
        print(f"| {' | '.join([*cells, *more_cells(options.figure, runs)])} |", flush=True)
    if options.plot is not None:
        draw(found, metric, options.figure, options.table, options.plot)


if __name__ == "__main__":
    main()
