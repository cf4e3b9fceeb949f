"""Accuracy against epsilon, beside what the primary reaches alone: over seeds, resumed, plotted.

    python benchmarks/frontier.py --store frontier.jsonl --plot docs/frontier.svg

Every run is a whole simulated federation: linkage, fitting of encoders, one release a row,
training. ``--store`` keeps each run as a line and skips what is there, so that a call that was cut
off goes on. ``mnist`` needs ``SECUREVFL_DATA``, ``digits`` nothing. Gains over alone are
paired by seed. Seed 0 was used to choose the settings, so the seeds start at 1.
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from securevfl.cli.demo import combined
from securevfl.config.reading import parse_federation
from securevfl.data.builtin import load_builtin, load_full
from securevfl.data.partition import split_table
from securevfl.data.tables import PartyTable
from securevfl.runtime.simulation import simulate_federation

# At epsilon 0.01 the aggregate says nothing: what is gained there, the top model gains by itself.
EPSILONS = ("0.01", "1", "2", "4", "8", "none")
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {
        "parties": 28,
        "rows": 6_000,
        "key_dim": 8,
        "bounds": [0.0, 255.0],
        "hidden": 54,
        "training": {"epochs": 30, "batch_size": 128, "learning_rate": 1e-3, "patience": 5},
        "what": "MNIST, 28 parties with 28 pixels each, 6,000 rows",
    },
    "digits": {
        "parties": 5,
        "rows": 1_797,
        "key_dim": 4,
        "bounds": [-6.0, 16.0],
        "hidden": 8,
        "training": {"epochs": 60, "batch_size": 64, "learning_rate": 1e-3, "patience": 15},
        "what": "digits, 5 parties with 12 or 13 pixels each, 1,797 rows",
    },
}


def tables_of(data: str, seed: int) -> list[PartyTable]:
    """Deal a table out by FeT's protocol; every seed draws rows, columns, keys and split anew."""
    chosen = SETTINGS[data]
    table = load_builtin("digits") if data == "digits" else load_full(data)
    rows = np.random.default_rng(seed).permutation(len(table.y))[: chosen["rows"]]
    return split_table(
        table.X[rows],
        np.asarray(table.y)[rows],
        parties=chosen["parties"],
        key_dim=chosen["key_dim"],
        seed=seed,
    )


def federation_of(data: str, tables: list[PartyTable], seed: int, epsilon: str) -> dict[str, Any]:
    """Return the federation file of one run."""
    chosen = SETTINGS[data]
    if epsilon == "none":
        privacy: dict[str, Any] = {"mechanism": "none"}
    else:
        privacy = {"epsilon": float(epsilon), "delta": 1e-5, "unit": "secondary-record"}
    parties = [
        {
            "name": table.name,
            "role": "secondary" if number else "primary",
            "data": f"{table.name}.csv",
            "key": list(table.key_names),
            "scaling": "bounds",
            "bounds": chosen["bounds"],
            **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
        }
        for number, table in enumerate(tables)
    ]
    return {
        "federation": {"name": data, "task": "multiclass", "seed": seed},
        "model": {
            "family": "fet",
            "neighbours": 4,
            "hidden": chosen["hidden"],
            "heads": 1,
            "release": "pooled",
            "top": "additive",
            "average_positions_every": 0,
        },
        "encoder": {"method": "principal", "layout": "blocks"},
        "training": {**chosen["training"], "split": "random"},
        "base": {"estimator": "none"},
        "privacy": {**privacy, "encoder": "frozen", "links_per_record": 1},
        "linkage": {"protection": "none", "choose": "records", "truth": "entity"},
        "party": parties,
    }


class Store:
    """Results by what made them: a line of JSON each, kept on disk if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict[str, float]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.found[entry["key"]] = entry["result"]

    def get(
        self, name: str, source: dict[str, Any], make: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return a result that is there, or make and keep it."""
        text = json.dumps([name, source], sort_keys=True)
        key = f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if key not in self.found:
            self.found[key] = make()
            if self.path is not None:
                line = json.dumps({"key": key, "result": self.found[key]})
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
        return self.found[key]


def joint(
    source: dict[str, Any], tables: list[PartyTable], *, with_alone: bool
) -> dict[str, float]:
    """Simulate one federation; return its test accuracy, and that of alone if asked for."""
    config = parse_federation(source, file="frontier")
    with tempfile.TemporaryDirectory() as folder:
        metrics = simulate_federation(
            config,
            {table.name: table for table in tables},
            Path(folder),
            device=torch.device("cpu"),
            with_alone=with_alone,
        ).metrics
    found = {"joint": metrics["test"], "spent": metrics["privacy"]["epsilon"]}
    return found | ({"alone": metrics["alone_test"]} if with_alone else {})


def measure(data: str, *, epsilons: list[str], seeds: range, store: Store) -> dict[str, Any]:
    """Return mean and deviation over seeds at every epsilon; alone and combine once a seed."""
    rows: dict[str, list[dict[str, float]]] = {epsilon: [] for epsilon in epsilons}
    for seed in seeds:
        tables = tables_of(data, seed)
        for epsilon, row in measure_seed(data, tables, seed, epsilons, store).items():
            rows[epsilon].append(row)
    return {epsilon: summary(found) for epsilon, found in rows.items()}


def measure_seed(
    data: str, tables: list[PartyTable], seed: int, epsilons: list[str], store: Store
) -> dict[str, dict[str, float]]:
    """Return one seed's accuracies at every epsilon, with those that know no epsilon beside."""
    rows: dict[str, dict[str, float]] = {}
    beside: dict[str, float] = {}
    for epsilon in epsilons:
        source = federation_of(data, tables, seed, epsilon)
        first = not beside
        kind = "with alone" if first else "joint"
        found = store.get(
            f"{data} seed {seed} epsilon {epsilon} {kind}",
            source,
            partial(joint, source, tables, with_alone=first),
        )
        if first:
            combined = store.get(
                f"{data} seed {seed} combine", source, partial(combine, source, tables)
            )
            beside = {"alone": found["alone"], **combined}
        rows[epsilon] = {
            "joint": found["joint"],
            **beside,
            "gain": found["joint"] - beside["alone"],
        }
    return rows


def combine(source: dict[str, Any], tables: list[PartyTable]) -> dict[str, float]:
    """Return the accuracy of one network on all features, joined by the true matches."""
    return {"combine": combined(parse_federation(source, file="frontier"), tables).test}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean, deviation and single values of every column."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "seeds": values,
        }
        for name, values in columns.items()
    }


def print_table(data: str, found: dict[str, Any]) -> None:
    print(f"\n{SETTINGS[data]['what']}\n")
    print("| epsilon | joint | gain over alone | gain / deviation | gain by seed |")
    print("| --- | --- | --- | --- | --- |")
    for epsilon, columns in found.items():
        gain = columns["gain"]
        ratio = f"{gain['mean'] / gain['std']:.1f}" if gain["std"] else ""
        seeds = " ".join(f"{value:+.3f}" for value in gain["seeds"])
        print(
            f"| {epsilon} | {columns['joint']['mean']:.3f} ± {columns['joint']['std']:.3f} | "
            f"{gain['mean']:+.3f} ± {gain['std']:.3f} | {ratio} | {seeds} |"
        )
    last = next(reversed(found.values()))
    for name in ("alone", "combine"):
        print(f"\n{name}: {last[name]['mean']:.3f} ± {last[name]['std']:.3f}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw accuracy against epsilon, a panel a data set; bars are deviations over seeds."""
    figure = Figure(figsize=(4.6 * len(results), 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(results)))
    for axes, (data, found) in zip(panels, results.items(), strict=True):
        words = list(found)
        places = range(len(words))
        axes.errorbar(
            places,
            [found[word]["joint"]["mean"] for word in words],
            [found[word]["joint"]["std"] for word in words],
            marker="o",
            capsize=3,
            label="joint",
        )
        for name, colour in (("alone", "0.4"), ("combine", "tab:green")):
            level, spread = (found[words[-1]][name][part] for part in ("mean", "std"))
            axes.axhline(level, color=colour, linewidth=1, label=name)
            axes.axhspan(level - spread, level + spread, color=colour, alpha=0.15, linewidth=0)
        axes.set_xticks(list(places), ["0.01\n(noise)" if w == "0.01" else w for w in words])
        axes.set_xlabel("epsilon at delta 1e-5, one record of one secondary, m = 1", fontsize=8)
        axes.set_ylabel("test accuracy")
        axes.set_title(SETTINGS[data]["what"], fontsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "securevfl"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on")
    parser.add_argument("--epsilons", nargs="+", default=list(EPSILONS), help="numbers, or none")
    parser.add_argument("--store", type=Path, help="file that keeps every run, to go on from")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = Store(options.store)
    results = {
        data: measure(
            data,
            epsilons=options.epsilons,
            seeds=range(1, options.seeds + 1),
            store=store,
        )
        for data in options.data
    }
    if options.plot is not None:
        draw(results, options.plot)
    if options.json:
        print(json.dumps({data: results[data] for data in results}))
        return
    for data, found in results.items():
        print_table(data, found)


if __name__ == "__main__":
    main()
