"""What leaks: attacks on recorded runs, with and without noise, each next to a trivial guess.

    SECUREVFL_DATA=... python benchmarks/leaks.py [SET ...] [--runs plain,averaged,...] [--seeds 3]
        [--training-seeds 1] [--defences] [--out runs/leaks] [--all]

Prints a line a run: of each kind of attack what gains most over its trivial guess (in brackets),
over all secondaries; ``--all`` prints each. Runs: ``plain`` (one secondary, encoders that are
trained, no noise: split learning), ``averaged`` (all secondaries, trained, no noise), ``first-2``
(the same of the first two), ``trained-8`` and so on (behind noise of that epsilon, ``dp-trained``),
``frozen-none``, ``frozen-8`` and so on (class means, released once). A defence follows a plus:
``averaged+iso-1``, ``+clip-0.1``, ``+marvell-4`` (two classes), ``+nopeek-2``, ``+label-4`` (its
epsilon). ``--defences`` runs those of notebook/leaks.md. ``joint`` is the test figure. A run that
is done is not run again. With several ``--training-seeds`` figures are means over them, with their
standard deviation; bold is what beats its guess with every seed. Sets: digits, mfeat6, fate_breast,
hdb, mnist10; digits11 has 10 secondaries.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from fedsim_tables import Tables
from frontier import DELTA, SETS, federation_of, pixels

from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.lab.attacks.run_audit import all_attacks, audit_run
from securevfl.runtime.run_folder import read_figures
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

EPSILONS = ("8", "4", "1")
RUNS = (
    "plain",
    "averaged",
    *(f"trained-{one}" for one in EPSILONS),
    "frozen-none",
    *(f"frozen-{one}" for one in EPSILONS),
)
NAMES = ("digits", "mfeat6", "fate_breast")
DEFENCES = {
    "iso": "iso_gradients",
    "clip": "clip_gradients",
    "marvell": "marvell",
    "nopeek": "distance_correlation",
    "label": "label_epsilon",
}
"""Names in runs, and their settings in ``[training]``."""
DEFENDED = (
    "averaged",
    "averaged+clip-0.1",
    "averaged+iso-1",
    "averaged+iso-4",
    "averaged+marvell-4",
    "averaged+marvell-16",
    "averaged+label-4",
    "averaged+label-2",
    "averaged+label-1",
    "averaged+nopeek-1",
    "averaged+nopeek-10",
)


def halves(table: PartyTable) -> list[PartyTable]:
    """Deal a secondary's columns to two, in turn."""
    found = []
    for number in range(2):
        columns = np.arange(number, table.num_features, 2)
        found.append(
            dataclasses.replace(
                table,
                name=f"{table.name}{number + 1}",
                features=table.features[:, columns],
                feature_names=tuple(table.feature_names[one] for one in columns),
            )
        )
    return found


def tables_of(name: str) -> Tables:
    """Return a set; the one secondary of two parties' tables is dealt to two."""
    found = pixels("digits", 11, 1_797, 4, (-6.0, 16.0)) if name == "digits11" else SETS[name]
    tables = found.make(0)
    if len(tables.parties) == 2:
        primary, secondary = tables.parties
        tables = dataclasses.replace(tables, parties=[primary, *halves(secondary)])
    return tables


def source_of(name: str, run: str, tables: Tables, *, seed: int) -> dict[str, Any]:
    """Return the federation file of a run."""
    run, _, defence = run.partition("+")
    kind, _, epsilon = run.partition("-")
    first = None
    if kind in ("plain", "first"):
        first, epsilon = int(epsilon or 1), ""
    source = federation_of(
        "digits" if name == "digits11" else name, tables, seed, epsilon or "none", "shares"
    )
    source["base"] = {"estimator": "linear" if kind == "frozen" else "none"}
    if kind == "frozen":
        return source
    del source["encoder"]
    source["party"] = [one for one in source["party"] if one["role"] != "dealer"]
    if first is not None:
        source["party"] = source["party"][: 1 + first]
    exact = source["model"]["neighbours"] == 1
    source["model"] = {
        "family": "fet",
        "neighbours": 1 if exact else 4,
        "hidden": 32,
        "heads": 2,
        "release": "pooled",
        "average_positions_every": 0,
    }
    source["training"] = {
        # Behind noise each epoch costs budget.
        "epochs": 5 if epsilon else 30,
        "patience": 30,
        "batch_size": 128,
        "learning_rate": 3e-3,
        "split": "random",
    }
    if defence:
        what, _, strength = defence.partition("-")
        source["training"][DEFENCES[what]] = float(strength)
    source["privacy"] = {"mechanism": "none", "encoder": "trained"}
    if epsilon:
        source["privacy"] = {
            "epsilon": float(epsilon),
            "delta": DELTA,
            "unit": "secondary-record",
            "links_per_record": 1,
            "encoder": "dp-trained",
        }
    source["linkage"].pop("choose")
    return source


def measured(name: str, run: str, folder: Path, *, seed: int, seeds: int) -> dict[str, Any]:
    """Train and attack a run, or read what was found before."""
    tables = tables_of(name)
    place = folder / f"{name}-{run}{f'-seed{seed}' if seed else ''}"
    if not (place / "metrics.json").exists():
        config = parse_federation(source_of(name, run, tables, seed=seed), file="leaks")
        own = {one.name: one for one in tables.parties}
        own = {party.name: own[party.name] for party in config.table_parties}
        options = RunOptions(run_folder=place, record_mib=1024)
        simulate_federation(config, own, options, with_alone=False)
    figures = read_figures(place)
    audit = audit_run(place, list(all_attacks()), seeds=seeds)
    return {
        "set": name,
        "run": run,
        "metric": figures["metric"],
        "joint": figures["test"],
        "epsilon": audit.epsilon,
        "findings": audit.findings,
        "violations": audit.violations,
        "seconds": audit.seconds,
    }


COLUMNS = {
    "labels, gradients": ("gradient-norm", "gradient-direction", "gradient-clusters"),
    "labels, own encoder": ("model-completion",),
    "columns (R2)": ("reconstruction",),
    "links (AUC)": ("linked-or-not",),
    "member": ("membership",),
}
"""Headings of the brief table, and the attacks below them."""


def brief(of_seeds: list[list[dict[str, Any]]], attacks: tuple[str, ...]) -> str:
    """Return what gains most over its trivial guess, of some attacks on all parties."""
    best = []
    for findings in of_seeds:
        tried = [one for one in findings if one["attack"] in attacks]
        if not tried:
            return "-"
        best.append(max(tried, key=lambda one: one["value"] - one["floor"]))
    mark = "**" if all(one["beats_floor"] for one in best) else ""
    value = spread([one["value"] for one in best])
    return f"{mark}{value}{mark} ({np.mean([one['floor'] for one in best]):.2f})"


def spread(values: list[float]) -> str:
    """Return a mean, with the standard deviation of several."""
    return f"{np.mean(values):.2f}" + (
        f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    )


def print_all(name: str, found: dict[str, Any]) -> None:
    """Print a line an attack and party."""
    for one in found["findings"]:
        low, high = one["interval"]
        mark = "**" if one["beats_floor"] else ""
        ceiling = "" if one["ceiling"] is None else f"{one['ceiling']:.3f}"
        print(
            f"| {name} | {one['attack']} | {one['about']} | {one['measure'].partition(';')[0]} "
            f"| {mark}{one['value']:.3f}{mark} ({low:.3f} to {high:.3f}) | {one['floor']:.3f} "
            f"| {ceiling} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--training-seeds", type=int, default=1)
    parser.add_argument("--defences", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/leaks"))
    parser.add_argument("--all", action="store_true", help="a line an attack and party")
    options = parser.parse_args()
    heads = ["set, run", "joint", *COLUMNS]
    if options.all:
        heads = ["set, run", "attack", "on", "measure", "found", "trivial guess", "ceiling"]
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---" for _ in heads), "|")
    for name in options.sets or NAMES:
        for run in DEFENDED if options.defences else options.runs.split(","):
            if "marvell" in run and SETS[name].make(0).task != "binary":
                continue
            found = [
                measured(name, run, options.out, seed=seed, seeds=options.seeds)
                for seed in range(options.training_seeds)
            ]
            if options.all:
                print_all(f"{name}, {run}", found[0])
                continue
            joint = spread([one["joint"] for one in found])
            findings = [one["findings"] for one in found]
            cells = [brief(findings, attacks) for attacks in COLUMNS.values()]
            print(f"| {name}, {run} | {joint} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
