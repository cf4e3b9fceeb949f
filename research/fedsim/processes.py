"""FedSim on hdb between processes, with and without noise, beside the simulator.

    SECUREVFL_DATA=DIR python research/fedsim/processes.py [--rows 20000] [--epochs 8]
        [--noise 0.0002] [--json FILE]

With two parties (flats and schools) and with four (the schools' columns dealt out to three). Noise
is on by its multiplier and as published, which promises nothing, as no epsilon covers similarities:
the question here is whether secure averages and their noise work between processes, not what they
protect. The test RMSE of each run, its difference to the simulator's without noise, bytes of a
secondary, and time; and, for the spread that fresh noise alone makes, the simulator's with it.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import places, write_table
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation


def federation(secondaries: int, privacy: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return the federation file of flats and that many owners of schools' columns."""
    keys = ["key_lon", "key_lat"]
    names = ["flats", *(f"schools-{number + 1}" for number in range(secondaries))]
    parties = [
        {
            "name": name,
            "role": "secondary",
            "data": f"{name}.csv",
            "key": keys,
            "scaling": "clamped",
        }
        for name in names
    ]
    parties[0] |= {"role": "primary", "label": "y", "address": "127.0.0.1:0"}
    return {
        "federation": {"name": "hdb", "task": "regression", "seed": 0},
        "model": {"family": "fedsim", "neighbours": 50, "keys_as_features": False},
        "training": {"epochs": epochs, "batch_size": 128, "learning_rate": 3e-3},
        "base": {"estimator": "none"},
        "privacy": privacy,
        "linkage": {"protection": "none"},
        "party": parties,
    }


def write_tables(folder: Path, secondaries: int, rows: int) -> None:
    """Write flats, and schools with their columns dealt out."""
    flats, schools = places("hdb", rows=rows, key_noise=0).parties
    write_table(folder, "flats", flats)
    dealt = np.array_split(np.arange(schools.features.shape[1]), secondaries)
    for number, columns in enumerate(dealt):
        part = dataclasses.replace(
            schools,
            features=schools.features[:, columns],
            feature_names=tuple(schools.feature_names[column] for column in columns),
        )
        write_table(folder, f"schools-{number + 1}", part)


def between_processes(config: FederationConfig, folder: Path, out: Path) -> dict[str, Any]:
    """Train with every party its own process."""
    begin = time.monotonic()
    figures = train_in_processes(
        config, RunOptions(run_folder=out, data_root=folder, observe=lambda _event: None)
    )
    metrics = figures.as_json()
    traffic = metrics["bytes"]["schools-1"]
    return {
        "test": metrics["test"],
        "alone_test": metrics["alone_test"],
        "sent_megabytes": traffic["sent"] / 1e6,
        "received_megabytes": traffic["received"] / 1e6,
        "seconds": time.monotonic() - begin,
    }


def simulated(config: FederationConfig, folder: Path, out: Path) -> float:
    """Train in one process and return the test RMSE."""
    tables = read_tables(config, folder)
    result = simulate_federation(config, tables, RunOptions(run_folder=out), with_alone=False)
    return float(result.metrics["test"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.0002, help="noise multiplier")
    parser.add_argument("--parties", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="simulations with fresh noise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    privacies = {
        "no noise": {"mechanism": "none", "encoder": "trained"},
        "noise": {
            "mechanism": "gaussian",
            "noise_multiplier": options.noise,
            "delta": 1e-5,
            "unit": "linked-row",
            "encoder": "trained",
            "accounting": "as-published",
        },
    }
    found: dict[str, Any] = {}
    for count in options.parties:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_tables(folder, count - 1, options.rows)
            quiet = 0.0
            for label, privacy in privacies.items():
                source = federation(count - 1, privacy, options.epochs)
                config = parse_federation(source, file="fedsim between processes")
                repeats = options.repeats if label == "noise" else 1
                in_one = [
                    simulated(config, folder, folder / f"{label} {number}")
                    for number in range(repeats)
                ]
                quiet = quiet or in_one[0]
                one = between_processes(config, folder, folder / label)
                one |= {"simulated": in_one, "apart_percent": 100 * (one["test"] / quiet - 1)}
                found[f"{count} parties, {label}"] = one
                print(f"{count} parties, {label}: {json.dumps(one)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
