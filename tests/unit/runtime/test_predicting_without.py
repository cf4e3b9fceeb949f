"""Predictions while secondaries are absent: what they say, what they cost, and who answers."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.command_line import securevfl

import securevfl as sv
from securevfl.core.errors import PartyTimeoutError
from securevfl.core.progress import ProgressEvent, Warned
from securevfl.data.tables import RowSplit
from securevfl.federation.run_plan import run_facts
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation
from securevfl.transport.identity import provision

POOLED = {"release": "pooled", "top": "additive", "hidden": 6, "neighbours": 1}
FROZEN = {"encoder": "frozen", "links_per_record": 1}
NOISY = {**FROZEN, "epsilon": 30.0, "delta": 1e-4, "unit": "secondary-record"}


def federation(folder: Path, *, base: str = "none", **sections: Any) -> Path:
    path = write_federation(
        folder,
        rows=200,
        secondaries=3,
        **{
            "model": POOLED,
            "encoder": {"method": "random"},
            "training": {"epochs": 4, "batch_size": 32, "learning_rate": 5e-3},
            "privacy": {"mechanism": "none", **FROZEN},
            "base": {"estimator": base},
            **sections,
        },
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def run(path: Path) -> tuple[sv.RunResult, RowSplit]:
    config = sv.read_federation(path)
    tables = read_tables(config, path.parent)
    split, _ = run_facts(config, tables["agency"])
    return run_in_process(config, path.parent / "run", tables=tables), split


def charged(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / "run" / "parties" / name / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_absent_block_is_zero_and_the_others_are_as_ever(tmp_path: Path) -> None:
    result, split = run(federation(tmp_path))
    rows = pd.read_csv(tmp_path / "agency.csv").iloc[split.test]
    # Measured now, since it is free, and then read from the file.
    now = result.predict(rows, without=["bank-2"])
    found = sv.contribution(result)
    later = sv.predict(tmp_path / "run", rows, without=["bank-2"], data_root=tmp_path)

    kept = found.gone.values[frozenset({"bank-1", "bank-3"})]
    for predictions in (now, later):
        assert predictions.without == ("bank-2",)
        assert predictions.frame()["without"].tolist() == ["bank-2"] * len(rows)
        assert predictions.metrics is not None
        # The released numbers with a block of zeros are what parties release without it.
        assert predictions.metrics["log_loss"] == pytest.approx(kept["log_loss"].value, rel=1e-5)
        measured = predictions.measured_without
        assert measured is not None
        assert measured["used"] == "joint"
        told = measured["metrics"]["log_loss"]
        assert told["value"] == pytest.approx(kept["log_loss"].value)
        assert told["interval"] == pytest.approx(kept["log_loss"].interval)
    assert result.predict(rows).without == ()
    assert result.predict(rows).measured_without is None
    # All three were asked twice, and bank-2 not when it was absent.
    requests = {
        name: sum(line["kind"] == "charge" for line in charged(tmp_path, name)[1:])
        for name in ("bank-1", "bank-2")
    }
    each = -(-len(rows) // 32)
    assert requests["bank-1"] - requests["bank-2"] == 2 * each


def test_ledgers_are_charged_for_those_that_answer(tmp_path: Path) -> None:
    result, split = run(federation(tmp_path, privacy=NOISY, prediction={"epsilon": 400.0}))
    rows = pd.read_csv(tmp_path / "agency.csv").iloc[split.test]
    before = {name: charged(tmp_path, name) for name in ("agency", "bank-1", "bank-2")}
    everybody = result.predict(rows).epsilon
    fewer = result.predict(rows, without=["bank-2", "bank-3"]).epsilon

    assert everybody is not None
    assert fewer is not None
    lines = charged(tmp_path, "bank-1")[len(before["bank-1"]) :]
    opened = [line for line in lines if line["kind"] == "open"]
    assert [line["plan"]["parties"] for line in opened] == [3, 1]
    assert [line["plan"]["min_active"] for line in opened] == [3, 1]
    assert len({line["noise_share_std"] for line in opened}) == 1
    # One share of noise instead of three: a multiplier that is smaller by the root of three.
    assert fewer > everybody * 1.5
    for name, asked in (("agency", 2), ("bank-1", 2), ("bank-2", 1)):
        lines = charged(tmp_path, name)[len(before[name]) :]
        assert sum(line["kind"] == "open" for line in lines) == asked


def test_too_few_and_unknown_secondaries_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_federation(tmp_path, rows=60, base={"estimator": "none"}, training={"epochs": 1})
    heard: list[ProgressEvent] = []
    result, _ = run(path)
    new = tmp_path / "new.csv"
    pd.read_csv(tmp_path / "agency.csv").iloc[:4].to_csv(new, index=False)
    ask = ("predict", tmp_path / "run", "--rows", new, "--out", tmp_path / "out.csv")
    ask += ("--data-root", tmp_path)

    few = securevfl(capfd, *ask, "--without", "bank-1")
    assert few.code == 2
    assert "least_secondaries = 1 in [prediction]" in few.complaint
    unknown = securevfl(capfd, *ask, "--without", "bnk-1")
    assert unknown.code == 2
    assert "did you mean 'bank-1'" in unknown.complaint
    assert not (tmp_path / "out.csv").exists()

    source = tomllib.loads((tmp_path / "run" / "federation.toml").read_text())
    source["prediction"] = {"least_secondaries": 1}
    agreed = save_federation(tmp_path, source)
    told = securevfl(capfd, *ask, "--without", "bank-1", "--federation", agreed, "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["without"] == ["bank-1"]
    assert json.loads(told.out)["measured_without"]["used"] == "joint"
    again = sv.predict(
        tmp_path / "run",
        new,
        federation=agreed,
        without=["bank-1"],
        data_root=tmp_path,
        observe=heard.append,
    )
    assert again.without == ("bank-1",)
    assert any(isinstance(one, Warned) and "party dropout" in one.text for one in heard)
    del result


def test_who_does_not_come_is_named_with_how_to_go_on(tmp_path: Path) -> None:
    path = write_federation(
        tmp_path,
        rows=60,
        base={"estimator": "none"},
        training={"epochs": 1},
        runtime={"join_timeout_s": 0.2},
    )
    source = tomllib.loads(path.read_text())
    homes = tmp_path / "identities"
    pinned = provision([party["name"] for party in source["party"]], homes)
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    run(save_federation(tmp_path, source))
    with pytest.raises(PartyTimeoutError) as refused:
        sv.predict(
            tmp_path / "run",
            pd.read_csv(tmp_path / "agency.csv").iloc[:4],
            identity=homes / "agency",
            data_root=tmp_path,
        )
    assert "bank-1, bank-2: did not join" in str(refused.value)
    assert str(refused.value).endswith("to predict without it: --without bank-1,bank-2")
