"""Write, or compare with, ``losses.json``: every loss of small runs under fixed seeds.

The file was written by the code of 21 November 2026, before its packages were rebuilt; FedSim's,
its baselines' and FedHSSL's runs again on 22 November, when their gradients and defaults changed,
and all but FedHSSL's when dropout began to draw bytes and the clip got its gradient in closed form;
FeT's with trained encoders again on 23 November, when frequencies of its encodings were spread, and
all with noise, when its sampler read other bits and three numbers went into a word; FedSim's and
FeT's with trained encoders once more on 24 November, when near links started ahead; those behind
noise with a cap on 27 November, when the number of linked rows took a part of epsilon.
A change that should change nothing must leave it as it is. On the machine that wrote it all figures
are equal to the last bit; elsewhere float32 sums may round differently.

    python tests/vectors/make_losses.py --check            # the simulator
    python tests/vectors/make_losses.py --check --between  # between processes, too
"""

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.fixed_entropy import fixed_entropy

from securevfl import read_federation
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.testing import run_in_process, save_federation, write_federation

FILE = Path(__file__).with_name("losses.json")

FET = {"party_dropout": 0.5, "average_positions_every": 2, "dropout": 0.2}
FEDSIM = {
    "family": "fedsim",
    "neighbours": 4,
    "kernel": 2,
    "hidden": 8,
    "layer_width": 16,
    "party_dropout": 0.5,
}
FEDHSSL = {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8}
PROMISE = {"delta": 1e-4, "links_per_record": 2}
RUNS: dict[str, dict[str, Any]] = {
    "fet": {"model": FET, "training": {"epochs": 4}},
    "fet-frozen": {
        "model": {"release": "pooled", "top": "additive", "hidden": 4},
        "encoder": {"method": "principal"},
        "privacy": {**PROMISE, "epsilon": 50.0, "encoder": "frozen", "unit": "secondary-record"},
        "linkage": {"choose": "records"},
    },
    "fet-dp-trained": {
        "model": {"release": "pooled", "dropout": 0.2, "average_positions_every": 1},
        "privacy": {**PROMISE, "epsilon": 40.0, "encoder": "dp-trained"},
    },
    "fet-dp-trained-sampled": {
        "model": {"release": "pooled", "dropout": 0.1},
        "privacy": {**PROMISE, "epsilon": 40.0, "encoder": "dp-trained", "sampling_rate": 0.6},
    },
    "fet-trained": {"privacy": {"epsilon": 1e6, "delta": 1e-4, "encoder": "trained"}},
    "fedsim": {"model": FEDSIM},
    "fedsim-shares": {
        "model": FEDSIM,
        "linkage": {"protection": "shares", "ranges": [[-1.0, 11.0], [-1.0, 11.0]]},
    },
    "top1sim": {"model": {"family": "top1sim", "hidden": 8}},
    "avgsim": {"model": {"family": "avgsim", "neighbours": 4, "hidden": 8}},
    "fedhssl": {
        "model": FEDHSSL,
        "pretraining": {
            "iterations": 2,
            "batch_size": 64,
            "projector": [8, 8, 8],
            "predictor": 8,
        },
        "training": {"labelled_rows": 30},
    },
    "fedhssl-moco": {
        "model": FEDHSSL,
        "pretraining": {
            "iterations": 2,
            "batch_size": 64,
            "projector": [8, 8, 8],
            "predictor": 8,
            "algorithm": "moco",
            "queue": 32,
            "local_updates": 2,
        },
        "training": {"labelled_rows": 30},
    },
}
# Noise is fresh between processes, so that these have no losses to compare there; and third parties
# have no part in the simulator.
ALONE = ("fet-frozen", "fet-dp-trained", "fet-dp-trained-sampled", "fet-trained")


def write_run(folder: Path, name: str) -> Path:
    """Write a run's tables and its federation file."""
    sections = RUNS[name]
    path = write_federation(folder, rows=120, **sections)
    if sections.get("privacy", {}).get("encoder") in ("frozen", "dp-trained"):
        source = tomllib.loads(path.read_text(encoding="utf-8"))
        for party in source["party"][1:]:
            party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
        path = save_federation(folder, source)
    return path


def simulated_losses(name: str) -> list[float]:
    """Return every round's loss of a simulated run, then its test metric."""
    with tempfile.TemporaryDirectory() as temporary, fixed_entropy():
        folder = Path(temporary)
        result = run_in_process(write_run(folder, name), folder / "run")
        return [*result.losses, result.metrics["test"]]


def federated_losses(name: str) -> list[float]:
    """Return the same of a run between processes."""
    losses: list[float] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        figures = train_in_processes(
            read_federation(write_run(folder, name)),
            RunOptions(run_folder=folder / "run", data_root=folder, observe=observe),
        )
        metrics = figures.as_json()
    return [*losses, metrics["test"]]


def main() -> int:
    """Write the file, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--between", action="store_true", help="between processes, too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = {"simulated": {name: simulated_losses(name) for name in RUNS}}
    if chosen.between:
        found["federated"] = {
            name: federated_losses(name)
            for name in RUNS
            if name not in ALONE and "shares" not in name
        }
    if not chosen.check:
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    wrong = [
        f"{kind} {name}"
        for kind, runs in found.items()
        for name, losses in runs.items()
        if kept[kind][name] != losses
    ]
    print("\n".join(wrong) or f"{sum(map(len, found.values()))} runs: every loss is equal")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
