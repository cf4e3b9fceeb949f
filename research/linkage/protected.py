"""The same downstream model over links found under every protection: does it cost accuracy?

    SECUREVFL_DATA=DIR python research/linkage/protected.py [--seeds 5] [--fast] [--json FILE]

Simulated, without noise or cryptography: shares and Paillier give the same links, those of keys
rounded to 16 bits (tests hold the protocols to that), so ``shares`` stands for both. Test RMSE, and
its difference to unprotected linkage with the same seed: split, initialisation and order of rows
are equal, the links alone differ. ``--fast`` shows that the script runs, no more.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import RANGES
from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation

FAMILIES = {
    "top1sim": {"family": "top1sim"},
    "fet": {"family": "fet", "neighbours": 20, "hidden": 32},
}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {"protection": "none"},
    "shares": {"protection": "shares"},
    # Nobody reads the file: parties in one process draw a secret of their own.
    "bloom": {"protection": "bloom"},
    "bloom, long": {"protection": "bloom", "code_bits": 16_384},
}
HOUSING = Path(__file__).parents[2] / "examples" / "housing.toml"


def federation(
    data: str, family: str, protection: str, *, seed: int, epochs: int
) -> dict[str, Any]:
    """Return the housing example with another table, family and protection."""
    source = tomllib.loads(HOUSING.read_text(encoding="utf-8"))
    source["federation"]["seed"] = seed
    source["model"] = FAMILIES[family]
    source["base"] = {"estimator": "none"}
    source["training"] |= {"epochs": epochs, "batch_size": 64}
    # Ranges also scale the keys that models see, so they are given without protection too.
    source["linkage"] = {**PROTECTIONS[protection], "ranges": RANGES[data]}
    for party in source["party"]:
        party["data"] = party["data"].replace("house_kc", data)
    return source


def some_rows(table: PartyTable, rows: int) -> PartyTable:
    chosen = np.random.default_rng(0).permutation(table.num_rows)[:rows]
    return table.take(np.sort(chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.fast:
        arguments.seeds, arguments.rows, arguments.epochs = 2, 400, 1
    torch.set_num_threads(1)
    root = Path(os.environ["SECUREVFL_DATA"])
    found: dict[str, Any] = {}
    for data in RANGES:
        for family in arguments.families:
            tests: dict[str, list[float]] = {name: [] for name in PROTECTIONS}
            start = time.process_time()
            for seed in range(arguments.seeds):
                for protection, values in tests.items():
                    config = parse_federation(
                        federation(data, family, protection, seed=seed, epochs=arguments.epochs),
                        file="protected linkage",
                    )
                    tables = read_tables(config, root)
                    tables["agency"] = some_rows(tables["agency"], arguments.rows)
                    with tempfile.TemporaryDirectory() as folder:
                        result = simulate_federation(
                            config, tables, RunOptions(run_folder=Path(folder))
                        )
                    values.append(float(result.metrics["test"]))
            found[f"{data}, {family}"] = summary(tests)
            print(data, family, f"{time.process_time() - start:.0f} CPU-s", flush=True)
            print(json.dumps(found[f"{data}, {family}"], indent=2), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def summary(tests: dict[str, list[float]]) -> dict[str, Any]:
    """Return mean and deviation over seeds, of the metric and of its difference to ``none``."""
    rows = {}
    for name, values in tests.items():
        differences = [one - other for one, other in zip(values, tests["none"], strict=True)]
        rows[name] = {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values),
            "difference": statistics.mean(differences),
            "difference_std": statistics.stdev(differences),
            "seeds": values,
        }
    return rows


if __name__ == "__main__":
    main()
