"""Whole small runs of every family, top model and encoder, on a device."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.class_means import write_class_means
from helpers.federations import FROZEN, write_overlapping
from helpers.labelled_cuda import labelled_cuda, operations

from securevfl import RunResult, read_federation
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, unheard
from securevfl.testing import run_in_process, save_federation, write_federation

NARROW = {"hidden": 8, "layer_width": 8}
PAIRS = {"family": "fedsim", **NARROW, "neighbours": 5}
POOLED = {"release": "pooled", "hidden": 4}
DP = {
    "epsilon": 40.0,
    "delta": 1e-4,
    "encoder": "dp-trained",
    "links_per_record": 2,
    "gradient_clip_norm": 0.5,
}
ALIGNED = {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8}
_NOISE = {"noise_multiplier": 0.5, "delta": 1e-4, "encoder": "trained"}
SSL = {"batch_size": 32, "projector": [8, 8, 8], "predictor": 8, "iterations": 1}

RUNS: Mapping[str, dict[str, Any]] = {
    "fet": {"model": {"average_positions_every": 1}},
    "fet-noise": {
        "privacy": _NOISE,
        "training": {"optimizer": "lamb"},
        "federation": {"task": "regression"},
    },
    "fet-frozen": {"privacy": FROZEN},
    "fet-additive": {
        "model": {**POOLED, "top": "additive"},
        "encoder": {"method": "principal"},
        "privacy": FROZEN,
    },
    "fet-linear": {
        "model": {**POOLED, "top": "linear"},
        "encoder": {"method": "principal"},
        "privacy": FROZEN,
    },
    "fet-dp": {"model": {**POOLED, "average_positions_every": 1}, "privacy": DP},
    "fedsim": {"model": PAIRS, "base": {"estimator": "linear"}},
    "fedsim-paper": {
        "model": {**PAIRS, "weight": "learned", "sort": "weight", "merge": "convolution"}
    },
    "fedsim-unsorted": {"model": {**PAIRS, "sort": "none", "merge": "perceptron"}},
    "exact": {
        "model": {"family": "exact", **NARROW},
        # Places of two parties are never equal here, and devices are what is tested.
        "linkage": {"least_linked": 0.0},
    },
    "top1sim": {"model": {"family": "top1sim", **NARROW}},
    "avgsim": {"model": {"family": "avgsim", **NARROW, "neighbours": 3}},
    "featuresim": {"model": {"family": "featuresim", **NARROW, "neighbours": 3}},
    "fet-best": {
        "model": {"dynamic_masking": False, "ranked": False},
        "base": {"estimator": "best"},
    },
    "fedhssl": {"model": ALIGNED, "pretraining": {**SSL, "algorithm": "moco"}},
    "fedgssl": {
        "model": {**ALIGNED, "family": "fedgssl", "encoder": "embedding", "embedding": 4},
        "training": {"threshold": "f1"},
        "pretraining": {**SSL, "algorithm": "byol"},
    },
    "fedlocalssl": {"model": {**ALIGNED, "family": "fedlocalssl"}, "pretraining": SSL},
    "class-means": {"labels": "shares"},
}
"""Sections of a federation file, each for what it alone goes through."""

_WITHOUT_ROUNDS = ("assist", "class-means", "fet-frozen", "fet-additive", "fet-linear")
ROUNDS: Mapping[str, dict[str, Any]] = {
    **{name: run for name, run in RUNS.items() if not name.startswith(_WITHOUT_ROUNDS)},
    "fet of one": {"secondaries": 1},
    "fet of four": {"secondaries": 4},
    "fet of four, noise": {"secondaries": 4, "privacy": _NOISE},
    "top1sim of one": {**RUNS["top1sim"], "secondaries": 1},
}
"""Runs that train by rounds; the others release each row once, or fit.

There are two secondaries where a run does not say otherwise.
"""


def write(folder: Path, sections: dict[str, Any]) -> Path:
    """Write a federation."""
    if "labels" in sections:
        return write_class_means(folder, **sections)
    training = {"epochs": 1, "batch_size": 16, **sections.get("training", {})}
    given = {**sections, "training": training}
    if "pretraining" in sections:
        return write_overlapping(folder, **given)
    path = write_federation(folder, rows=40, **given)
    if sections.get("privacy") not in (FROZEN, DP):
        return path
    source = dict(read_federation(path).source)
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-5.0, 5.0]}
    return save_federation(folder, source)


def run(
    path: Path, out: Path, *, device: str, resume: bool = False, observe: Observer = unheard
) -> RunResult:
    return run_in_process(path, out, device=device, resume=resume, observe=observe)


def between_rounds(path: Path, out: Path, *, device: str, read: Callable[[], float]) -> list[float]:
    """Return by how much a counter rises in each training round but every epoch's first."""
    before = 0.0
    risen: list[float] = []

    def observe(event: ProgressEvent) -> None:
        nonlocal before
        if isinstance(event, RoundDone):
            if event.done > 1:
                risen.append(read() - before)
            before = read()

    run(path, out, device=device, observe=observe)
    return risen


def operations_a_round(path: Path, out: Path) -> float:
    """Return the device operations of a run's longest training round, on the stand-in GPU."""
    with labelled_cuda():
        return max(between_rounds(path, out, device="cuda", read=operations))
