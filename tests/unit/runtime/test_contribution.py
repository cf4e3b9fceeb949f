"""What each partner of a run is worth: from releases, from a simulation's models, or refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import securevfl
from helpers.federations import FROZEN

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.runtime.run_folder import CONTRIBUTION
from securevfl.testing import run_in_process, save_federation, write_federation

PARTNERS = ("useful", "noise", "twin-1", "twin-2")
BLOCKS: dict[str, dict[str, Any]] = {
    "model": {"release": "pooled", "top": "linear", "hidden": 8, "neighbours": 1},
    "encoder": {"method": "principal"},
    "training": {"epochs": 10, "patience": 10, "batch_size": 64, "learning_rate": 5e-3},
    "privacy": {"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
}


def partners(
    folder: Path,
    *,
    rows: int = 400,
    base: str = "none",
    known: tuple[str, ...] = PARTNERS,
    **sections: Any,
) -> Path:
    """Write a regression whose label one partner knows, two know the same of, and one nothing."""
    path = write_federation(folder, secondaries=len(known), rows=rows, **{**BLOCKS, **sections})
    source = tomllib.loads(path.read_text())
    source["federation"]["task"] = "regression"
    source["base"] = {"estimator": base}
    random = np.random.default_rng(5)
    keys = np.arange(rows, dtype=np.float64)
    own, useful, shared, noise = (random.normal(size=(rows, 2)) for _ in range(4))
    label = own[:, 0] + 2 * useful[:, 0] + 2 * shared[:, 0] + 0.3 * random.normal(size=rows)
    theirs = dict(zip(PARTNERS, (useful, noise, shared, shared), strict=True))
    for party, name in zip(source["party"][1:], known, strict=True):
        party["name"] = name
    for party in source["party"]:
        features = theirs.get(party["name"], own)
        frame = pd.DataFrame({"id": keys, "x0": features[:, 0], "x1": features[:, 1]})
        if party["role"] == "primary":
            frame["y"] = label
        party |= {"data": f"{party['name']}.csv", "key": ["id"]}
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
        frame.to_csv(folder / party["data"], index=False)
    return save_federation(folder, source)


def run(path: Path, out: Path) -> sv.RunResult:
    return run_in_process(path, out)


def ledgers(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(out.rglob("*.jsonl"))}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sv.Contribution]:
    """A frozen run in blocks without noise, measured."""
    folder = tmp_path_factory.mktemp("blocks")
    run(partners(folder), folder / "run")
    before = ledgers(folder / "run")
    found = sv.contribution(folder / "run", data_root=folder)
    assert ledgers(folder / "run") == before, "nothing is charged"
    return folder, found


def test_blocks_say_what_everybody_is_worth(blocks: tuple[Path, sv.Contribution]) -> None:
    folder, found = blocks
    tested = json.loads((folder / "run" / "metrics.json").read_text())["test"]

    assert found.again is not None
    assert found.gone.all["rmse"].value == pytest.approx(tested, rel=1e-6)
    assert found.again.all == found.gone.all
    for worth in (found.gone, found.again):
        total = sum(one.shapley["rmse"].value for one in worth.partners.values())
        assert total == pytest.approx(worth.gain["rmse"].value)
        noise, useful = worth.partners["noise"], worth.partners["useful"]
        for idle in (noise.shapley["rmse"], noise.leave_one_out["rmse"]):
            assert idle.interval is not None
            assert idle.interval[0] < 0.05
            assert idle.interval[1] > -0.05
        assert useful.leave_one_out["rmse"].interval is not None
        assert useful.leave_one_out["rmse"].interval[0] > 0.3
    # Without one twin the other one knows the same: less is lost than each is worth.
    for twin in ("twin-1", "twin-2"):
        one = found.again.partners[twin]
        assert one.leave_one_out["rmse"].value < 0.2 * one.shapley["rmse"].value
    twins = [found.again.partners[name].shapley["rmse"].value for name in ("twin-1", "twin-2")]
    assert twins[0] == pytest.approx(twins[1], rel=0.05)


def test_the_command_writes_file_and_report(
    blocks: tuple[Path, sv.Contribution], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, first = blocks
    out = folder / "run"
    common = ("--data-root", folder)
    ended = securevfl(capfd, "lab", "contribution", out, "--json", *common)

    assert ended.code == 0
    told = json.loads(ended.out)
    assert told == first.as_json()
    assert json.loads((out / CONTRIBUTION).read_text()) == {"format": 1, **told}
    report = (out / "report.html").read_text()
    assert "What if a partner leaves" in report
    assert "twin-2" in report
    shown = securevfl(capfd, "lab", "contribution", out, *common)
    assert shown.code == 0
    assert "this cost nothing" in shown.err
    assert "gone tomorrow" in shown.err

    for wrong, why in ((("--permutations", "1"), "permutations"),):
        refused = securevfl(capfd, "lab", "contribution", out, *common, *wrong)
        assert refused.code == 2
        assert why in refused.complaint


def test_a_base_answers_where_partners_say_nothing(tmp_path: Path) -> None:
    model = {**BLOCKS["model"], "hidden": 4}
    path = partners(tmp_path, base="linear", known=("useful", "noise"), model=model, rows=600)
    result = run(path, tmp_path / "run")
    found = sv.contribution(result)

    assert found.again is not None
    for worth in (found.gone, found.again):
        total = sum(one.shapley["rmse"].value for one in worth.partners.values())
        assert total == pytest.approx(worth.gain["rmse"].value)
        assert worth.used[frozenset({"useful", "noise"})] == "joint"
        assert worth.used[frozenset({"noise"})] == "alone"
        assert worth.values[frozenset({"noise"})] == worth.values[frozenset()]
    assert found.again.used[frozenset({"useful"})] == "joint"

    # Predictions know it: with what is left nobody is asked, and the primary answers.
    rows = pd.read_csv(tmp_path / "agency.csv").iloc[:30]
    before = ledgers(tmp_path / "run")
    left = result.predict(rows, without=["useful"])
    nobody = result.predict(rows, without=["useful", "noise"])
    assert left.used == nobody.used == "alone"
    assert nobody.without == ("useful", "noise")
    np.testing.assert_array_equal(left.values, nobody.values)
    assert left.measured_without is not None
    assert left.measured_without["used"] == "alone"
    assert ledgers(tmp_path / "run") == before
    assert result.predict(rows, without=["noise"]).used == "joint"


def test_a_simulation_without_a_promise_says_who_is_missed(tmp_path: Path) -> None:
    model = {"party_dropout": 0.5, "hidden": 8, "heads": 1, "neighbours": 1}
    path = write_federation(
        tmp_path, rows=120, secondaries=3, model=model, base={"estimator": "none"}
    )
    result = run(path, tmp_path / "run")
    before = ledgers(tmp_path / "run")
    found = sv.contribution(result)

    assert ledgers(tmp_path / "run") == before
    assert found.again is None
    assert found.gone.all["accuracy"].value == pytest.approx(result.metrics["test"])
    loss = result.metrics["test_metrics"]["log_loss"]
    assert found.gone.all["log_loss"].value == pytest.approx(loss, rel=1e-6)
    assert found.gone.coalitions == 2**3
    for metric in ("accuracy", "log_loss"):
        total = sum(one.shapley[metric].value for one in found.gone.partners.values())
        assert total == pytest.approx(found.gone.gain[metric].value)

    figures = tmp_path / "run" / "metrics.json"
    figures.write_text(figures.read_text().replace('"simulated"', '"federated"'))
    with pytest.raises(ConfigError, match=r"processes and tables of their own.*blocks"):
        sv.contribution(tmp_path / "run", data_root=tmp_path)


def test_sums_under_a_promise_are_refused_with_what_it_would_take(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_federation(
        tmp_path,
        rows=60,
        privacy=FROZEN,
        training={"epochs": 1},
        base={"estimator": "none"},
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
    )
    run(path, tmp_path / "run")
    refused = securevfl(capfd, "lab", "contribution", tmp_path / "run", "--data-root", tmp_path)

    assert refused.code == 4
    assert "2 more releases of the 12 test rows, epsilon" in refused.complaint
    assert 'layout = "blocks"' in refused.complaint
    assert not (tmp_path / "run" / CONTRIBUTION).exists()
