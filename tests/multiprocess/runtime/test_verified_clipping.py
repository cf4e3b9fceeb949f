"""Rows averaged on CrypTen's shares, and secondaries that share more than the clip allows."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import altered_party
from helpers.federations import save, write_federation
from helpers.warm import Program

import securevfl as sv
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2", "dealer")


def with_engine(folder: Path, *, secondaries: int = 2, verify: bool, **sections: Any) -> Path:
    """Write a federation that averages on shares."""
    path = write_federation(folder, secondaries=secondaries, **sections)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["mpc"] = {"engine": "crypten"}
    if verify:
        source["privacy"]["verify_clip"] = True
        source["party"].append({"name": "dealer", "role": "dealer"})
    return save(folder, source)


def test_losses_are_those_of_masked_sums(tmp_path: Path) -> None:
    """On shares, checked or not; of some secondaries in a round, with averaged encodings."""
    sections = {
        "rows": 60,
        "model": {"party_dropout": 0.4, "average_positions_every": 1},
        "training": {"epochs": 2},
    }
    simulated = sv.simulate(write_federation(tmp_path, secondaries=3, **sections))
    charges = [line["round"] for line in simulated.ledger if line["kind"] == "charge"]
    assert len(simulated.losses) == 4
    for verify in (False, True):
        path = with_engine(tmp_path, secondaries=3, verify=verify, **sections)
        trained = sv.train(path, out=tmp_path / f"run-{verify}")
        # As close as the ring's steps let sums of float32 be: test_simulated_equals_federated.py.
        assert trained.losses == pytest.approx(simulated.losses, abs=2**-14)
        assert [one["round"] for one in trained.ledger if one["kind"] == "charge"] == charges
    log = (tmp_path / "run-True/parties/dealer/log.jsonl").read_text(encoding="utf-8")
    (dealt,) = (line for line in map(json.loads, log.splitlines()) if "checks" in line["event"])
    assert dealt["requests"] > 8 * len(trained.losses)
    # A simulation of such a file computes the same sums.
    assert sv.simulate(path).losses == simulated.losses


def test_a_frozen_run_behind_noise_is_verified(tmp_path: Path) -> None:
    """Pooled rows, whose limit is K times C; each is released once, at the epsilon planned.

    So are predictions of its model, one request after another in a session of their own.
    """
    path = with_engine(
        tmp_path,
        verify=True,
        rows=60,
        model={"release": "pooled", "top": "additive", "hidden": 4},
        encoder={"method": "principal"},
        training={"epochs": 1},
        privacy={"epsilon": 20.0, "encoder": "frozen", "links_per_record": 4},
    )
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    for party in source["party"][1:3]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    trained = sv.train(save(tmp_path, source), out=tmp_path / "run")
    assert 0 < trained.metrics["privacy"]["epsilon"] <= 20.0
    new = pd.read_csv(tmp_path / "agency.csv").drop(columns="y")[:40]
    assert len(trained.predict(new).rows) == 40
    log = (tmp_path / "run/parties/dealer/log.jsonl").read_text(encoding="utf-8")
    dealt = [line for line in map(json.loads, log.splitlines()) if "checks" in line["event"]]
    assert [line["requests"] > 8 for line in dealt] == [True, True]


def test_lying_secondaries_are_named_at_every_party(tmp_path: Path, port: int) -> None:
    """Ten times the clip, in rows and in noise: the round is refused before it is summed."""
    path = with_engine(
        tmp_path,
        verify=True,
        rows=60,
        model={"average_positions_every": 0},
        training={"epochs": 1},
        privacy={"encoder": "trained", "noise_multiplier": 0.05, "delta": 1e-4},
    )
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    pinned = provision(NAMES, tmp_path / "ids")
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    path = save(tmp_path, source)
    parties, lies = {}, {"bank-1": "longer", "bank-2": "louder"}
    try:
        for name in NAMES:
            parties[name] = Program(
                Path(altered_party.__file__),
                *(lies.get(name, "none"), "party", path, "--name", name),
                *("--identity", tmp_path / "ids" / name, "--out", tmp_path / "run"),
            )
        ended = {name: party.ended() for name, party in parties.items()}
    finally:
        for party in parties.values():
            party.kill()
    for name, (code, said) in ended.items():
        assert code == 3, f"{name}: {said}"
        assert "Traceback" not in said
        words = " ".join(said.split())
        assert "rows or noise of 'bank-1' and 'bank-2' are longer than privacy" in words, name
    log = (tmp_path / "run/parties/agency/log.jsonl").read_text(encoding="utf-8")
    assert '"event": "epoch"' not in log
