"""A model whose secondaries count releases: what a file may ask for, and what all of it costs."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from helpers.command_line import securevfl

from securevfl import Predictions, read_federation
from securevfl.core.errors import BudgetExceededError, ConfigError
from securevfl.desk.command_results import print_predictions
from securevfl.desk.report.verify import verify_run
from securevfl.federation.run_plan import PredictionBudget, predictions_in_words
from securevfl.ledger.ledger_file import summary_of
from securevfl.runtime.entry import simulate
from securevfl.runtime.trained_run import predict
from securevfl.testing import save_federation, write_federation

PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 2}


def write(folder: Path, **sections: Any) -> Path:
    """Write a federation whose secondaries count releases."""
    settings = {
        "model": {"release": "pooled", "top": "additive", "hidden": 6},
        "privacy": PRIVACY,
        "linkage": {"choose": "records"},
        "training": {"epochs": 1},
        **sections,
    }
    source = tomllib.loads(write_federation(folder, rows=60, **settings).read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-5, 5]}
    return save_federation(folder, source)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    simulate(write(folder), out=folder / "run")
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that has answered nothing yet."""
    shutil.copytree(kept, tmp_path / "copy")
    return tmp_path / "copy/run"


def asked(
    run: Path, some: slice, *, without: tuple[str, ...] = (), **prediction: Any
) -> Predictions:
    """Ask for some of the primary's rows, under other settings of what predictions may spend."""
    source = tomllib.loads((run / "federation.toml").read_text())
    source["prediction"] = prediction
    path = run.parent / "now.toml"
    path.write_text(tomli_w.dumps(source))
    rows = run.parent / "new.csv"
    pd.read_csv(run.parent / "agency.csv").iloc[some].drop(columns="y").to_csv(rows, index=False)
    config = read_federation(path)
    return predict(run, rows, federation=config, data_root=run.parent, without=without)


def totals(run: Path) -> list[float | None]:
    found = []
    for name in ("agency", "bank-1", "bank-2"):
        (unit,) = summary_of(run / f"parties/{name}/ledger.jsonl").units
        found.append(unit.epsilon)
    return found


def test_by_default_a_record_is_released_as_often_as_in_training(run: Path) -> None:
    """At the same noise that is the same epsilon once more, booked whole with one row."""
    assert read_federation(run / "federation.toml").releases_per_record == 2
    first = asked(run, slice(0, 1))
    assert first.epsilon is not None
    assert 7.99 < first.epsilon <= 8.0
    once = totals(run)
    for start in range(0, 60, 20):
        assert asked(run, slice(start, start + 20)).epsilon == first.epsilon
    assert totals(run) == once
    lines = [
        json.loads(line) for line in (run / "parties/bank-1/ledger.jsonl").read_text().splitlines()
    ]
    charges = [line for line in lines if line.get("purpose") == "predict"]
    assert sum(line["rows"] for line in charges) == 61
    assert len({line["counts"] for line in charges}) == len(charges)


def test_fewer_releases_cost_less_and_more_are_refused_with_advice(run: Path) -> None:
    one = asked(run, slice(0, 5), releases_per_record=1).epsilon
    assert one is not None
    assert one < 6.0
    with pytest.raises(BudgetExceededError, match=r"or lower releases_per_record = 3"):
        asked(run, slice(0, 5), releases_per_record=3)
    assert asked(run, slice(0, 5), releases_per_record=2).epsilon == pytest.approx(8.0, rel=1e-3)


def test_a_larger_promise_takes_the_place_of_the_smaller_one(run: Path) -> None:
    """They do not add up: no record is released more often than the larger one says."""
    first = asked(run, slice(0, 5), releases_per_record=1).epsilon
    second = asked(run, slice(0, 5), releases_per_record=4, epsilon=30.0).epsilon
    assert first is not None
    assert second is not None
    assert second > first
    trained_and_asked = totals(run)
    # A promise that is made smaller again spends nothing more, and takes nothing back.
    asked(run, slice(0, 5), releases_per_record=1, epsilon=30.0)
    assert totals(run) == trained_and_asked


def test_without_a_secondary_the_promise_costs_more_and_once(run: Path) -> None:
    """Half as many add half of the noise; requests to all are covered by it as well."""
    with pytest.raises(BudgetExceededError, match=r"raise prediction\.epsilon"):
        asked(run, slice(0, 5), without=("bank-2",))
    all_of_them = asked(run, slice(0, 5)).epsilon
    fewer = asked(run, slice(5, 9), without=("bank-2",), epsilon=30.0).epsilon
    assert all_of_them is not None
    assert fewer is not None
    assert fewer > all_of_them
    before = totals(run)
    asked(run, slice(0, 20), epsilon=30.0)
    asked(run, slice(0, 20), epsilon=30.0, without=("bank-2",))
    assert totals(run) == before


@pytest.mark.parametrize(
    "sections",
    [
        {"linkage": {"choose": "rows"}},
        {"privacy": {**PRIVACY, "unit": "linked-row"}},
        {"privacy": {**PRIVACY, "sampling_rate": 0.5}},
        {
            "privacy": {"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
        },
    ],
)
def test_elsewhere_every_request_is_charged(sections: dict[str, Any], tmp_path: Path) -> None:
    config = read_federation(write(tmp_path, **sections))
    assert config.releases_per_record is None
    with pytest.raises(ConfigError, match=r"prediction\.releases_per_record: goes with"):
        read_federation(write(tmp_path, prediction={"releases_per_record": 1}, **sections))


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (None, "left of the limit for predictions: epsilon 5 of 8"),
        (2, "no later prediction costs more; releases of a record in all of them: 2"),
    ],
)
def test_the_console_says_what_later_requests_may_cost(
    most: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Predictions(rows=[1], values=np.array([0.5]), probabilities=None, classes=None)
    left = PredictionBudget(
        party="bank-1",
        unit="secondary-record",
        delta=1e-5,
        spent=3.0,
        budget=8.0,
        rows=1,
        most_rows=None,
        releases_per_record=most,
    )
    print_predictions(answer, Path("out.csv"), before=None, left=left, as_json=False)
    assert said in capsys.readouterr().err


def test_a_second_request_is_not_said_to_cost_anew(run: Path, capfd) -> None:
    """What all predictions cost was booked with the first answer."""
    rows = run.parent / "new.csv"
    pd.read_csv(run.parent / "agency.csv").iloc[:3].drop(columns="y").to_csv(rows, index=False)
    said = []
    for _ in range(2):
        out = run.parent / "predictions.csv"
        ended = securevfl(
            capfd, "predict", run, "--rows", rows, "--out", out, "--data-root", run.parent
        )
        assert ended.code == 0, ended.err
        said.append(next(line for line in ended.err.splitlines() if "rows predicted" in line))
    assert said[0].endswith("on top of training")
    assert "cost: nothing on top of the epsilon" in said[1]


def test_counts_of_records_are_verified_with_the_ledger(run: Path) -> None:
    """Cut by its last line, or removed, they no longer are what the ledger booked."""
    assert not [one for one in verify_run(run) if one.check == "records"]
    asked(run, slice(0, 3))
    asked(run, slice(3, 5))
    found = {one.party: one for one in verify_run(run) if one.check == "records"}
    assert set(found) == {"bank-1", "bank-2"}
    assert all(one.good for one in found.values())
    assert found["bank-1"].text.startswith("3 lines count records in 2 releases")

    path = run / "parties/bank-1/records-ledger.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert {one.party: one.text for one in verify_run(run) if one.good is False} == {
        "bank-1": "records-ledger.jsonl lacks releases that the ledger has booked: cut, or "
        "exchanged"
    }
    path.write_text(whole.replace('"records":[0', '"records":[1', 1).replace("released", "release"))
    assert [one.check for one in verify_run(run) if one.good is False] == ["records"]
    path.unlink()
    assert [one.check for one in verify_run(run) if one.good is False] == ["records"]


def test_a_check_says_how_often_predictions_release_a_record(tmp_path: Path) -> None:
    counted = predictions_in_words(read_federation(write(tmp_path)))
    assert counted is not None
    assert "each record in at most 2 of their rows, within epsilon = 8" in counted
    charged = predictions_in_words(read_federation(write(tmp_path, linkage={"choose": "rows"})))
    assert charged == "every request is charged, within epsilon = 8 in addition to training."
