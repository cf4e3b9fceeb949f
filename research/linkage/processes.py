"""Real tables linked under every protection between processes, and one model trained on each.

    SECUREVFL_DATA=DIR python research/linkage/processes.py [--rows 2000] [--seeds 1]
        [--family top1sim] [--data hdb house_kc] [--protections none bloom ...] [--json FILE]

Every party is its own process, third parties too, over TLS; ciphertexts have 2,048 bits. For each
protection: how long linking took, what the data parties sent and received, the test RMSE, whether
a simulation, which has no cryptography, comes to the very same RMSE (but for Bloom codes: it draws
a linkage secret of its own), and how far it is from the unprotected one with the same seed (split,
initialisation and order of rows are equal).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import RANGES
from research.linkage.protected import FAMILIES, federation
from securevfl.config.reading import parse_federation
from securevfl.core.progress import ProgressEvent, RoundDone, Stage
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation

PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {"protection": "none"},
    "bloom": {"protection": "bloom"},
    "shares": {"protection": "shares"},
    "shares, cells": {"protection": "shares", "cell": 0.005},
    "paillier, cells": {"protection": "paillier", "cell": 0.005},
}
THIRD_PARTIES = {"bloom": ["coordinator"], "shares": ["coordinator", "dealer"]}


def write_federation(
    folder: Path, data: str, family: str, protection: str, *, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Write some rows of the primary and the linkage secret; return the federation file."""
    source = federation(data, family, "none", seed=seed, epochs=options.epochs)
    settings = PROTECTIONS[protection]
    source["linkage"] = {**settings, "ranges": RANGES[data]}
    roles = THIRD_PARTIES.get(settings["protection"], ["coordinator"])
    if settings["protection"] != "none":
        source["party"] += [{"name": role, "role": role} for role in roles]
    (folder / data).mkdir(exist_ok=True)
    for party in source["party"][:2]:
        table = pd.read_csv(Path(os.environ["SECUREVFL_DATA"]) / party["data"])
        if party["role"] == "primary":
            table = table.sample(min(options.rows, len(table)), random_state=0).sort_index()
        party["data"] = f"{data}/{party['role']}.csv"
        table.to_csv(folder / party["data"], index=False)
    (folder / "linkage.secret").write_text("5e" * 32, encoding="utf-8")
    return source


def measure(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train between processes and in one; return times, bytes and both RMSEs."""
    config = parse_federation(source, file="linkage between processes")
    at: dict[str, float] = {}

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, Stage) and event.text == "linking":
            at["linking"] = time.monotonic()
        elif isinstance(event, RoundDone):
            at.setdefault("round", time.monotonic())

    figures = train_in_processes(
        config, RunOptions(run_folder=folder / "run", data_root=folder, observe=observe)
    )
    metrics = figures.as_json()
    tables = read_tables(config, folder)
    simulated = None
    if config.linkage.protection != "bloom":
        simulated = simulate_federation(
            config, tables, RunOptions(run_folder=folder / "simulated")
        ).metrics["test"]
    return {
        "linking_seconds": at["round"] - at["linking"],
        "megabytes": {
            name: round((traffic["sent"] + traffic["received"]) / 1e6, 1)
            for name, traffic in metrics["bytes"].items()
        },
        "test": metrics["test"],
        "simulated": simulated,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--family", choices=FAMILIES, default="top1sim")
    parser.add_argument("--data", nargs="+", choices=RANGES, default=list(RANGES))
    parser.add_argument("--protections", nargs="+", choices=PROTECTIONS, default=list(PROTECTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for data in options.data:
        tests: dict[str, list[float]] = {name: [] for name in options.protections}
        for seed in range(options.seeds):
            for protection, values in tests.items():
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    source = write_federation(
                        folder, data, options.family, protection, seed=seed, options=options
                    )
                    one = measure(source, folder)
                values.append(one["test"])
                found[f"{data}, {protection}, seed {seed}"] = one
                print(f"{data}, {protection}, seed {seed}: {json.dumps(one)}", flush=True)
        for protection, values in tests.items():
            apart = [
                one - other
                for one, other in zip(values, tests[options.protections[0]], strict=True)
            ]
            spread = f" ± {statistics.stdev(apart):.3f}" if len(apart) > 1 else ""
            print(f"{data}, {protection}: {statistics.mean(apart):+.3f}{spread}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
