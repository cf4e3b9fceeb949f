"""FedHSSL between processes: the simulator's losses, and going on after a party was killed."""

import json
import os
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import COMMON_IDS, write_overlapping
from helpers.launched import processes_of
from helpers.learners import encoders_of

from securevfl.config.reading import read_federation
from securevfl.core.errors import PartyFailedError
from securevfl.core.progress import PretrainingIteration, ProgressEvent, RoundDone, Warned, unheard
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.testing import save_federation, write_federation

pytestmark = pytest.mark.multiprocess

MODEL = {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8}
# Batch norm subtracts the bias before it, whose gradient is therefore a rounding error: AdamW makes
# a whole step of it, whose direction the order of float32 additions decides. Nothing else feels it
# but the running mean, which follows.
CANCELLED = ("0.bias", "1.running_mean")
PRETRAINING = {"iterations": 3, "batch_size": 64, "projector": [8, 8, 8], "predictor": 8}


def federation(folder: Path, *, secondaries: int = 2, **pretraining: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_federation(
        folder,
        rows=120,
        secondaries=secondaries,
        model=MODEL,
        pretraining={**PRETRAINING, **pretraining},
        training={"epochs": 2, "labelled_rows": 30},
    )


def federated(path: Path, out: Path, observe: Any, **kinds: Any) -> dict[str, Any]:
    figures = train_in_processes(
        read_federation(path),
        RunOptions(run_folder=out, data_root=path.parent, observe=observe, **kinds),
    )
    return figures.as_json()


def simulated(path: Path, out: Path, **kinds: Any) -> RunResult:
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    return simulate_federation(
        config, tables, RunOptions(run_folder=out), with_alone=False, **kinds
    )


def test_processes_pretrain_the_encoders_that_the_simulator_does(tmp_path: Path) -> None:
    """In a plain exchange, with several updates from each; what was learned is compared."""
    path = federation(
        tmp_path, secondaries=1, algorithm="moco", exchange="plain", local_updates=2, queue=32
    )
    metrics = federated(path, tmp_path / "federated", unheard)
    simulated(path, tmp_path / "simulated")
    assert metrics["pretraining"]["steps"] == ["cross", "local", "aggregate"]
    for party in ("agency", "bank-1"):
        one, other = (encoders_of(tmp_path / kind, party) for kind in ("federated", "simulated"))
        assert one.keys() == other.keys() == {"cross", "local"}
        for name, weights in one.items():
            assert weights.keys() == other[name].keys()
            for key, value in weights.items():
                if not key.endswith(CANCELLED):
                    # The order of float32 additions in torch is all that differs.
                    assert torch.allclose(value, other[name][key], atol=2e-6), (party, name, key)


def test_processes_agree_on_which_rows_are_aligned(tmp_path: Path) -> None:
    """Of 240 rows the 100 that everybody knows: in pretraining, and in training where asked for."""
    path = write_overlapping(tmp_path, training={"rows": "aligned"})
    alone = simulated(path, tmp_path / "simulated")
    losses: list[float] = []

    def hear(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)

    metrics = federated(path, tmp_path / "federated", hear)
    assert metrics["alignment"] == alone.metrics["alignment"]
    assert metrics["alignment"]["aligned"] == COMMON_IDS
    assert 0 < metrics["alignment"]["training_rows"] < 60
    for name in ("aligned_rows", "own_rows", "labelled_rows"):
        assert metrics["pretraining"][name] == alone.metrics["pretraining"][name]
    assert losses == pytest.approx(alone.losses, abs=1e-3)


def test_parties_warn_of_links_that_may_be_wrong(tmp_path: Path) -> None:
    """Under a protection too, where the coordinator alone knows distances: one line and one bit.

    Of two numbers: one number is an id, and linked where it is equal.
    """
    ranges = [[-0.5, 1000.0], [-1.0, 1.0]]
    path = write_overlapping(tmp_path, linkage={"protection": "shares", "ranges": ranges})
    source = tomllib.loads(path.read_text())
    for party in source["party"]:
        party["key"] = ["id", "x0"]
    source["party"] += [{"name": role, "role": role} for role in ("coordinator", "dealer")]
    events: list[ProgressEvent] = []
    metrics = federated(save_federation(tmp_path, source), tmp_path / "run", events.append)
    (warning,) = [event.text for event in events if isinstance(event, Warned)]
    assert "linkage.max_distance is not set" in warning
    assert "bank-1, bank-2" in warning
    assert metrics["alignment"]["warning"] == warning
    lines = (tmp_path / "run/parties/agency/log.jsonl").read_text().splitlines()
    (logged,) = [line for line in map(json.loads, lines) if line["event"] == "aligned"]
    assert logged["warning"] == warning


def test_pretraining_goes_on_after_a_party_was_killed(tmp_path: Path) -> None:
    """And ends, through secure averages, with the losses of the simulator's undisturbed run."""
    path = federation(tmp_path)
    whole = simulated(path, tmp_path / "simulated")
    out = tmp_path / "run"

    def kill(event: ProgressEvent) -> None:
        if isinstance(event, PretrainingIteration) and event.iteration == 2:
            os.kill(processes_of(out)["bank-2"], signal.SIGKILL)

    with pytest.raises(PartyFailedError, match="bank-2"):
        federated(path, out, kill)
    events: list[Mapping[str, Any]] = []
    metrics = federated(path, out, events.append, resume=True)
    iterations = [event.iteration for event in events if isinstance(event, PretrainingIteration)]
    assert iterations in ([2, 3], [3])
    losses = [event.loss for event in events if isinstance(event, RoundDone)]
    assert losses == pytest.approx(whole.losses, abs=1e-3)
    assert metrics["pretraining"]["iterations"] == 3
    lines = (out / "parties" / "bank-1" / "log.jsonl").read_text().splitlines()
    logged = [entry for entry in map(json.loads, lines) if entry["event"] == "pretrained"]
    assert logged[-1]["iterations"] == 3
