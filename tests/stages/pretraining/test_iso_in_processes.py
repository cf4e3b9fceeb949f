"""ISO noise between processes: what it reaches differs from a silent simulation, the rest does not.

Equal is up to the order of float32 additions. Noise as small as what counts as equal here has a
probability below 1e-9.
"""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from securevfl.config.reading import read_federation
from securevfl.core.progress import unheard
from securevfl.runtime.launching import pretrain_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.stages.pretraining.stage import load_encoders
from securevfl.testing import write_federation

pytestmark = pytest.mark.multiprocess

Encoders = dict[str, dict[str, Tensor]]

# Whose gradient is a rounding error; see test_pretraining_in_processes.py.
CANCELLED = ("0.bias", "1.running_mean")
PRETRAINING = {"iterations": 1, "batch_size": 128, "projector": [8, 8, 8], "predictor": 8}


def federation(folder: Path, family: str, **sections: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    return write_federation(
        folder,
        rows=120,
        secondaries=1,
        model={"family": family, "hidden": 8, "encoder_hidden": 8},
        pretraining={**PRETRAINING, **sections.get("pretraining", {})},
        training={
            "epochs": 1,
            "batch_size": 16,
            "labelled_rows": 48,
            **sections.get("training", {}),
        },
    )


def simulated(path: Path, out: Path, **kinds: Any) -> RunResult:
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    return simulate_federation(
        config, tables, RunOptions(run_folder=out), with_alone=False, **kinds
    )


def pretrained(
    folder: Path, family: str, setting: str, scale: float = 1.0, **more: Any
) -> dict[str, tuple[Encoders, Encoders]]:
    """Return each party's encoders: without noise, simulated; and with it, between processes."""
    silent, noised = folder / "silent", folder / "noised"
    simulated(federation(silent, family), silent / "run", ends_after="pretraining")
    path = federation(noised, family, pretraining={setting: scale, **more})
    pretrain_in_processes(
        read_federation(path),
        RunOptions(run_folder=noised / "run", data_root=noised, observe=unheard),
    )
    return {
        party: (load_encoders(silent / "run", party), load_encoders(noised / "run", party))
        for party in ("agency", "bank-1")
    }


def distance(one: Encoders, other: Encoders, encoder: str, part: str = "") -> float:
    """Return how far weights of an encoder's part lie apart at most."""
    names = [
        name
        for name in one[encoder]
        if name.startswith(part) and not name.endswith((*CANCELLED, "num_batches_tracked"))
    ]
    assert names
    return max(float((one[encoder][n] - other[encoder][n]).abs().max()) for n in names)


def test_noised_projections_reach_secondaries_and_nobody_else(tmp_path: Path) -> None:
    """What the primary learns from has no noise; what a secondary learns from has."""
    found = pretrained(tmp_path, "fedcssl", "iso_projections")
    assert distance(*found["agency"], "cross") < 1e-5
    assert distance(*found["bank-1"], "cross") > 1e-4


def test_noised_weights_reach_the_mean_and_nothing_else(tmp_path: Path) -> None:
    """Both parties take one mean; what is not averaged is what it was."""
    found = pretrained(tmp_path, "fedhssl", "iso_weights")
    for pair in found.values():
        assert distance(*pair, "cross") < 1e-5
        assert distance(*pair, "local", "bottom") < 1e-5
        assert distance(*pair, "local", "top") > 1e-2
    (_, one), (_, other) = found.values()
    assert distance(one, other, "local", "top") == 0


def test_parties_agree_on_the_step_of_means_that_grow(tmp_path: Path) -> None:
    """At the paper's strongest noise, ten iterations end with one mean at both parties."""
    found = pretrained(tmp_path, "fedhssl", "iso_weights", 5.0, iterations=10)
    (_, one), (_, other) = found.values()
    assert distance(one, other, "local", "top") == 0
    assert max(float(one["local"][name].abs().max()) for name in one["local"]) > 128
