"""A budget of device operations a training round, for each family and regime.

What a GPU replays counts as what it is made of: kernels and views, by the stand-in for a GPU.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.labelled_cuda import labelled_cuda, operations
from helpers.labelled_runs import RUNS, run, write

from securevfl.core.progress import ProgressEvent, RoundDone

NOISE = {"noise_multiplier": 0.5, "delta": 1e-4, "encoder": "trained"}
REGIMES: Mapping[str, dict[str, Any]] = {
    **RUNS,
    "fet of one": {"secondaries": 1},
    "fet of four": {"secondaries": 4},
    "fet of four, noise": {"secondaries": 4, "privacy": NOISE},
    "top1sim of one": {**RUNS["top1sim"], "secondaries": 1},
}
BUDGETS = {
    "fet": 1047,
    "fet-noise": 1182,
    "fet-dp": 1989,
    "fedsim": 464,
    "fedsim-paper": 430,
    "fedsim-unsorted": 401,
    "exact": 332,
    "top1sim": 323,
    "avgsim": 324,
    "featuresim": 344,
    "fet-best": 946,
    "fedhssl": 416,
    "fedgssl": 428,
    "fedlocalssl": 312,
    "fet of one": 753,
    "fet of four": 1150,
    "fet of four, noise": 1200,
    "top1sim of one": 233,
}
"""Runs have two secondaries but where they say otherwise."""


@pytest.mark.parametrize("name", BUDGETS)
def test_a_training_round_keeps_to_its_budget(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, REGIMES[name])
    seen: list[int] = []
    rounds: list[int] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            if event.done > 1:
                rounds.append(operations() - seen[-1])
            seen.append(operations())

    with labelled_cuda():
        run(path, tmp_path / "run", device="cuda", observe=observe)
    assert 0 < max(rounds) <= BUDGETS[name]
