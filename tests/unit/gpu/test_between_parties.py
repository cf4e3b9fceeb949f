"""Parties that compute on a GPU and meet over TLS, as threads: what crosses is on the CPU."""

import json
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import FROZEN, write_overlapping
from helpers.labelled_cuda import labelled_cuda, waits, watched
from helpers.star import together

from securevfl import read_federation
from securevfl.federation.session.party_files import LOG_FILE
from securevfl.runtime.launching import Outcome, run_party
from securevfl.runtime.run_options import PartyJob, PredictionJob
from securevfl.runtime.trained_run import trained_run
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision

SMALL = {"epochs": 1, "batch_size": 16}
SSL = {"batch_size": 32, "projector": [8, 8, 8], "predictor": 8, "iterations": 1}
RUNS: Mapping[str, dict[str, Any]] = {
    # Two epochs: the second begins from averaged positional encodings.
    "positions": {
        "model": {"average_positions_every": 1},
        "training": {"epochs": 2, "batch_size": 16},
    },
    "released": {
        "model": {"release": "pooled", "top": "additive"},
        "privacy": FROZEN,
        "training": SMALL,
    },
    "pretraining": {
        "model": {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8},
        "pretraining": {**SSL, "exchange": "plain"},
        "training": {**SMALL, "labelled_rows": 30},
    },
}


def write(folder: Path, sections: dict[str, Any]) -> Path:
    """Write a federation whose parties know one another, and where the primary listens."""
    if "pretraining" in sections:
        path = write_overlapping(folder, **sections)
    else:
        path = write_federation(folder, rows=40, **sections)
    source = tomllib.loads(path.read_text())
    pinned = provision([party["name"] for party in source["party"]], folder / "ids")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        source["party"][0]["address"] = f"127.0.0.1:{free.getsockname()[1]}"
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    for party in source["party"][1:]:
        if sections.get("privacy") is FROZEN:
            party |= {"scaling": "bounds", "bounds": [-5.0, 5.0]}
    return save_federation(folder, source)


def run(path: Path, out: Path, **more: Any) -> Outcome:
    """Run every party on the device in a thread of its own; return what the primary has."""
    config = read_federation(path)

    def party(name: str) -> Any:
        job = PartyJob(
            config=config,
            name=name,
            run_folder=out,
            identity_folder=path.parent / "ids" / name,
            data_root=path.parent,
            device=torch.device("cuda"),
            resume=False,
            **({**more, "prediction": None} if name != config.primary.name else more),
        )
        with watched():
            return run_party(job)

    names = [one.name for one in config.parties]
    results = together([lambda name=name: party(name) for name in names])
    for name, result in zip(names, results, strict=True):
        if isinstance(result, Exception):
            log = (out / "parties" / name / LOG_FILE).read_text().splitlines()
            raise AssertionError(json.loads(log[-1])) from result
    return results[0]


def test_each_party_waits_once_a_round(tmp_path: Path) -> None:
    """Four rounds of training, one of validation and one of test, at three parties."""
    counts = []
    for epochs in (2, 3):
        folder = tmp_path / str(epochs)
        folder.mkdir()
        path = write(folder, {"training": {"epochs": epochs, "batch_size": 8}})
        with labelled_cuda():
            run(path, folder / "run")
            counts.append(waits())
    an_epoch = counts[1] - counts[0]
    assert 0 < an_epoch["synchronize"] <= 3 * (4 + 2)


@pytest.mark.parametrize("name", RUNS)
def test_parties_on_gpus_meet(name: str, tmp_path: Path) -> None:
    """They train, keep their halves, and predict new rows with them."""
    path = write(tmp_path, RUNS[name])
    with labelled_cuda():
        figures = run(path, tmp_path / "run")
        named = trained_run(tmp_path / "run").name_rows(tmp_path / "agency.csv")
        new = PredictionJob(named=named, out=tmp_path / "predicted.csv")
        predicted = run(path, tmp_path / "run", serves=True, prediction=new)

    assert 0 <= figures.as_json()["test_metrics"]["accuracy"] <= 1
    assert len(predicted.rows) == len((tmp_path / "agency.csv").read_text().splitlines()) - 1
