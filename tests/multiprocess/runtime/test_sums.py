"""Rows averaged on CrypTen's shares, and a secondary that sends rows longer than its clip."""

import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import altered_party
from helpers.warm import Program

import securevfl as sv
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2")


def with_engine(folder: Path, engine: str, *, secondaries: int = 2, **sections: Any) -> Path:
    path = write_federation(folder, secondaries=secondaries, **sections)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    return save_federation(folder, {**source, "mpc": {"engine": engine}})


def test_losses_are_those_of_masked_sums(tmp_path: Path) -> None:
    """On shares; of some secondaries in a round, with averaged encodings."""
    sections = {
        "rows": 60,
        "model": {"party_dropout": 0.4, "average_positions_every": 1},
        "training": {"epochs": 2},
    }
    simulated = sv.simulate(write_federation(tmp_path, secondaries=3, **sections))
    charges = [line["round"] for line in simulated.ledger if line["kind"] == "charge"]
    assert len(simulated.losses) == 4
    path = with_engine(tmp_path, "crypten", secondaries=3, **sections)
    trained = sv.train(path, out=tmp_path / "run")
    masked = sv.train(
        with_engine(tmp_path, "masked", secondaries=3, **sections), out=tmp_path / "masked"
    )
    assert trained.losses == masked.losses
    path = with_engine(tmp_path, "crypten", secondaries=3, **sections)
    # As close as the ring's steps let sums of float32 be: test_simulated_equals_federated.py.
    assert trained.losses == pytest.approx(simulated.losses, abs=2**-14)
    assert [one["round"] for one in trained.ledger if one["kind"] == "charge"] == charges
    # A simulation of such a file computes the same sums.
    assert sv.simulate(path).losses == simulated.losses


def test_a_frozen_run_on_shares_predicts(tmp_path: Path) -> None:
    """Pooled rows behind noise, each released once; so are predictions. A dealer is enough."""
    path = write_federation(
        tmp_path,
        rows=60,
        model={"release": "pooled", "top": "additive", "hidden": 4},
        encoder={"method": "principal"},
        training={"epochs": 1},
        privacy={"epsilon": 20.0, "encoder": "frozen", "links_per_record": 4},
    )
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    for party in source["party"][1:3]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    source |= {"mpc": {}, "party": [*source["party"], {"name": "dealer", "role": "dealer"}]}
    trained = sv.train(save_federation(tmp_path, source), out=tmp_path / "run")
    assert trained.metrics["engine"] == "crypten"
    assert 0 < trained.metrics["privacy"]["epsilon"] <= 20.0
    new = pd.read_csv(tmp_path / "agency.csv").drop(columns="y")[:40]
    assert len(trained.predict(new).rows) == 40


@pytest.mark.parametrize("engine", ["masked", "crypten"])
def test_a_secondary_that_sends_longer_rows_ends_the_run_at_every_party(
    tmp_path: Path, port: int, engine: str
) -> None:
    """20 more on each row, after the clip and the noise; nothing is learned from the round."""
    path = with_engine(
        tmp_path,
        engine,
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
    path = save_federation(tmp_path, source)
    parties = {}
    try:
        for name in NAMES:
            parties[name] = Program(
                Path(altered_party.__file__),
                *("longer" if name == "bank-1" else "none", "party", path, "--name", name),
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
        assert "round 1: some secondary sent a longer vector than privacy.clip_norm" in words, name
    log = (tmp_path / "run/parties/agency/log.jsonl").read_text(encoding="utf-8")
    assert '"event": "epoch"' not in log
