"""What leaks: attacks on recorded runs, with and without noise, each next to a trivial guess.

    SECUREVFL_DATA=... python benchmarks/leaks.py [SET ...] [--runs plain,averaged,...] [--seeds 3]
        [--out runs/leaks] [--json]

Prints a line an attack and run. Runs: ``plain`` (one secondary, encoders that are trained, no
noise: split learning), ``averaged`` (all secondaries, trained, no noise), ``trained-8`` and so on
(the same behind noise of that epsilon, ``dp-trained``), ``frozen-none``, ``frozen-8`` and so on
(class means, released once). ``joint`` is the test figure. A run that is done is not run again.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from fedsim_tables import Tables
from frontier import DELTA, SETS, federation_of

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
    tables = SETS[name].make(0)
    if len(tables.parties) == 2:
        primary, secondary = tables.parties
        tables = dataclasses.replace(tables, parties=[primary, *halves(secondary)])
    return tables


def source_of(name: str, run: str, tables: Tables) -> dict[str, Any]:
    """Return the federation file of a run."""
    kind, _, epsilon = run.partition("-")
    source = federation_of(name, tables, 0, epsilon or "none", "shares")
    source["base"] = {"estimator": "linear" if kind == "frozen" else "none"}
    if kind == "frozen":
        return source
    del source["encoder"]
    source["party"] = [one for one in source["party"] if one["role"] != "dealer"]
    if kind == "plain":
        source["party"] = source["party"][:2]
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


def measured(name: str, run: str, folder: Path, *, seeds: int) -> dict[str, Any]:
    """Train and attack a run, or read what was found before."""
    tables = tables_of(name)
    place = folder / f"{name}-{run}"
    if not (place / "metrics.json").exists():
        config = parse_federation(source_of(name, run, tables), file="leaks")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"of {', '.join(NAMES)}, which are the default")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/leaks"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print("| set, run | joint | attack | on | measure | found | trivial guess | ceiling |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.sets or NAMES:
        for run in options.runs.split(","):
            found = measured(name, run, options.out, seeds=options.seeds)
            if options.json:
                print(json.dumps(found))
                continue
            for one in found["findings"]:
                low, high = one["interval"]
                mark = "**" if one["beats_floor"] else ""
                ceiling = "" if one["ceiling"] is None else f"{one['ceiling']:.3f}"
                print(
                    f"| {name}, {run} | {found['joint']:.3f} | {one['attack']} | {one['about']} "
                    f"| {one['measure'].partition(';')[0]} | {mark}{one['value']:.3f}{mark} "
                    f"({low:.3f} to {high:.3f}) | {one['floor']:.3f} | {ceiling} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
