"""A kept model predicts what the run predicted, under the same ledgers, in one process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from securevfl import Predictions, read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import BudgetExceededError, ConfigError, DataError, ProtocolError
from securevfl.data.tables import split_rows
from securevfl.federation.messages import PredictRequest, RoundPlan, Welcome
from securevfl.federation.run_plan import RunFacts, plan_prediction
from securevfl.federation.saved_model import FOLDER, load_model
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.ledger.ledger import Ledger
from securevfl.runtime.entry import simulate
from securevfl.runtime.trained_run import predict
from securevfl.testing import write_federation

NONE = {"privacy": {"mechanism": "none"}}
FEDSIM = {
    "model": {"family": "fedsim", "neighbours": 4, "kernel": 2, "hidden": 8},
    "linkage": {"similarity_noise": 0.0},
}
FROZEN = {
    "model": {"release": "pooled", "top": "additive", "hidden": 6},
    "encoder": {"method": "principal", "layout": "blocks"},
    "privacy": {
        "epsilon": 8.0,
        "delta": 1e-5,
        "encoder": "frozen",
        "links_per_record": 1,
    },
    "linkage": {"choose": "records"},
}
TRAINED_BEHIND_NOISE = {
    "privacy": {
        "epsilon": 8.0,
        "delta": 1e-5,
        "encoder": "dp-trained",
        "links_per_record": 1,
    },
}
BOUNDS: dict[str, Any] = {"scaling": "bounds", "bounds": [-5, 5]}


def trained(folder: Path, **sections: Any) -> Path:
    """Simulate a federation; return its run folder, beside the tables and the file."""
    path = write_federation(folder, **sections)
    if "privacy" in sections and sections["privacy"].get("mechanism") != "none":
        text = path.read_text(encoding="utf-8")
        text = text.replace(
            'role = "secondary"', 'role = "secondary"\nscaling = "bounds"\nbounds = [-5, 5]'
        )
        path.write_text(text, encoding="utf-8")
    run = folder / "run"
    simulate(path, out=run)
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run without noise."""
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def behind_noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of frozen encoders behind noise."""
    return trained(tmp_path_factory.mktemp("noise"), **FROZEN)


@pytest.fixture(scope="module")
def charged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same, where rows choose: every request is charged."""
    sections = {name: value for name, value in FROZEN.items() if name != "linkage"}
    return trained(tmp_path_factory.mktemp("charged"), **sections)


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """Return a copy of the run without noise, to be damaged."""
    shutil.copytree(plain.parent, tmp_path / "copy")
    return tmp_path / "copy/run"


def config_of(run: Path) -> FederationConfig:
    return read_federation(run / "federation.toml")


def as_they_are(table: pd.DataFrame) -> pd.DataFrame:
    return table


def rows_of(run: Path, change: Callable[[pd.DataFrame], pd.DataFrame] = as_they_are) -> Path:
    """Write the run's own test rows to a file."""
    config = config_of(run)
    table = pd.read_csv(run.parent / "agency.csv")
    split = split_rows(
        len(table),
        validation_fraction=config.training.validation_fraction,
        test_fraction=config.training.test_fraction,
        seed=config.federation.seed,
    )
    path = run.parent / "new.csv"
    change(table.iloc[split.test]).to_csv(path, index=False)
    return path


def predicted(run: Path, rows: Path, **options: Any) -> Predictions:
    out = run.parent / "predicted.csv"
    return predict(run, rows, federation=config_of(run), out=out, data_root=run.parent, **options)


@pytest.mark.parametrize("family", ["fet", "fedsim"])
def test_test_rows_get_what_the_run_gave_them(plain: Path, tmp_path: Path, family: str) -> None:
    """Without noise metrics and probabilities are equal to the last digit."""
    run = plain if family == "fet" else trained(tmp_path, **FEDSIM)
    again = predicted(run, rows_of(run))
    metrics = json.loads((run / "metrics.json").read_text())["test_metrics"]
    kept = pd.read_csv(run / "predictions.csv")
    assert again.metrics is not None
    assert {name: again.metrics[name] for name in metrics} == metrics
    assert again.probabilities is not None
    np.testing.assert_array_equal(kept.filter(like="probability").to_numpy(), again.probabilities)
    assert kept["prediction"].tolist() == list(again.values)


def test_columns_may_come_in_any_order_among_others_and_without_labels(plain: Path) -> None:
    expected = predicted(plain, rows_of(plain))

    def moved(table: pd.DataFrame) -> pd.DataFrame:
        table = table.drop(columns="y").assign(left_over="?", ref=range(500, 500 + len(table)))
        return table[table.columns[::-1]]

    found = predicted(plain, rows_of(plain, moved), id_column="ref")
    assert found.metrics is None
    assert list(found.rows) == [str(500 + row) for row in range(len(found))]
    np.testing.assert_array_equal(found.values, expected.values)


def test_rows_are_answered_in_the_order_asked(plain: Path) -> None:
    expected = predicted(plain, rows_of(plain))
    found = predicted(plain, rows_of(plain, lambda table: table.iloc[::-1]))
    assert expected.probabilities is not None
    assert found.probabilities is not None
    # Batches are others then, and float32 sums in another order.
    np.testing.assert_allclose(found.probabilities[::-1], expected.probabilities, atol=1e-5)


def test_rows_without_a_key_are_predicted_alone_and_noted(plain: Path) -> None:
    """They change nothing for the others, and a request of such rows alone asks nobody."""
    expected = predicted(plain, rows_of(plain))
    ledger = plain / "parties/bank-1/ledger.jsonl"

    def lost(table: pd.DataFrame) -> pd.DataFrame:
        return table.assign(lat=table["lat"].where(np.arange(len(table)) != 3))

    found = predicted(plain, rows_of(plain, lost))
    assert found.notes is not None
    assert [place for place, note in enumerate(found.notes) if note] == [3]
    others = np.arange(len(found)) != 3
    assert expected.probabilities is not None
    assert found.probabilities is not None
    np.testing.assert_allclose(
        found.probabilities[others], expected.probabilities[others], atol=1e-5
    )
    lines = ledger.read_text()
    alone = predicted(plain, rows_of(plain, lambda table: table.assign(lon=np.nan)))
    assert set(alone.notes or ()) == {"no key"}
    assert ledger.read_text() == lines


def test_a_file_and_its_reader_hold_the_same(plain: Path) -> None:
    found = predicted(plain, rows_of(plain))
    table = pd.read_csv(plain.parent / "predicted.csv")
    assert list(table.columns) == [
        "row",
        "prediction",
        "probability_0",
        "probability_1",
        "probability_2",
    ]
    assert table["row"].tolist() == list(range(1, len(found) + 1))
    np.testing.assert_array_equal(table.iloc[:, 2:].to_numpy(), found.probabilities)


def test_links_beside_the_training_rows_are_those_of_training(behind_noise: Path) -> None:
    """Records choose among the rows that they chose among: the run's test rows do as well again.

    Noise is fresh, so probabilities differ; links do not, which the count of the ledger shows:
    both runs release every test row once, under the cap. Keys of all rows are kept: those without
    the test rows' would show which these are.
    """
    model = load_model(
        behind_noise / "parties/agency" / FOLDER, config_of(behind_noise), party="agency"
    )
    assert model.primary is not None
    assert model.primary.keys is not None
    total = len(pd.read_csv(behind_noise.parent / "agency.csv"))
    assert model.primary.keys.num_rows == total


def test_a_request_is_charged_and_a_second_is_refused_before_anything_is_released(
    tmp_path: Path, charged: Path
) -> None:
    shutil.copytree(charged.parent, tmp_path / "own")
    run = tmp_path / "own/run"
    rows = rows_of(run)
    ledgers = [run / f"parties/{name}/ledger.jsonl" for name in ("agency", "bank-1", "bank-2")]
    before = [len(ledger.read_text().splitlines()) for ledger in ledgers]
    first = predicted(run, rows)
    assert first.epsilon is not None
    assert 0 < first.epsilon <= 8.0
    charged = [ledger.read_text().splitlines() for ledger in ledgers]
    for lines, old in zip(charged, before, strict=True):
        kinds = [json.loads(line)["kind"] for line in lines[old:]]
        assert kinds[0] == "open"
        assert kinds.count("charge") == 2  # 48 rows in batches of 32
    with pytest.raises(BudgetExceededError, match="all predictions of this model"):
        predicted(run, rows)
    for ledger, lines in zip(ledgers, charged, strict=True):
        more = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()[len(lines) :]]
        assert "charge" not in more


def test_a_larger_budget_for_predictions_can_be_given_later(tmp_path: Path, charged: Path) -> None:
    shutil.copytree(charged.parent, tmp_path / "own")
    run = tmp_path / "own/run"
    rows = rows_of(run)
    predicted(run, rows)
    file = run / "federation.toml"
    file.write_text(file.read_text() + "\n[prediction]\nepsilon = 20.0\n")
    again = predicted(run, rows)
    assert again.epsilon is not None
    assert again.epsilon <= 8.0  # of this request alone


def test_rows_of_all_requests_are_counted_where_a_file_limits_them(copied: Path) -> None:
    lines = (copied / "parties/agency/ledger.jsonl").read_text().splitlines()
    charges = [json.loads(line) for line in lines if '"charge"' in line]
    before = sum(one["rows"] for one in charges if one["purpose"] == "predict")
    file = copied / "federation.toml"
    file.write_text(f"{file.read_text()}\n[prediction]\nrows = {before + 60}\n")
    rows = rows_of(copied)
    predicted(copied, rows)
    with pytest.raises(BudgetExceededError, match=f"to {before + 96} rows, over prediction.rows"):
        predicted(copied, rows)


def test_dp_trained_models_predict_and_pay(tmp_path: Path) -> None:
    run = trained(tmp_path, **TRAINED_BEHIND_NOISE)
    found = predicted(run, rows_of(run))
    assert found.epsilon is not None
    assert found.epsilon > 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda one: shutil.rmtree(one), "there is none"),
    "a bit of the weights": (lambda one: flip(one / "weights.safetensors"), "is damaged"),
    "weights gone": (lambda one: (one / "weights.safetensors").unlink(), "cannot be read"),
    "no json": (lambda one: (one / "model.json").write_text("{"), "is damaged"),
    "another version": (
        lambda one: edit(one, format=99, version="9.0"),
        "of format 99, written by securevfl 9.0",
    ),
    "another federation": (lambda one: edit(one, federation="other"), "of the federation 'other'"),
    "other settings": (lambda one: edit(one, digest="0" * 64), "under other settings"),
    "another party": (lambda one: edit(one, party="bank-9"), "is that of 'bank-9'"),
    "another run": (lambda one: edit(one, run="0" * 32), "halves of one network"),
    "a field gone": (lambda one: edit(one, features=None), "is damaged"),
}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "model.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize("party", ["agency", "bank-1"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_is_not_whole_or_of_something_else_is_one_line(
    copied: Path, party: str, damage: str
) -> None:
    rows = rows_of(copied)
    do, text = DAMAGES[damage]
    do(copied / "parties" / party / FOLDER)
    with pytest.raises(ConfigError, match=text) as refused:
        predicted(copied, rows)
    assert "\n" not in str(refused.value)


BAD_ROWS: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = {
    "a feature is gone": (lambda table: table.drop(columns="x1"), "x1"),
    "a key is gone": (lambda table: table.drop(columns="lat"), "lat"),
    "words for numbers": (lambda table: table.assign(x1="many"), "x1"),
}


@pytest.mark.parametrize("change", BAD_ROWS)
def test_rows_that_are_not_as_in_training_are_one_line(plain: Path, change: str) -> None:
    do, text = BAD_ROWS[change]
    with pytest.raises(DataError, match=text) as refused:
        predicted(plain, rows_of(plain, do))
    assert "\n" not in str(refused.value)


def request_plan(run: Path, *, rows: int, predicted_rows: int) -> tuple[FederationConfig, Any]:
    config = config_of(run)
    model = load_model(run / "parties/bank-1" / FOLDER, config, party="bank-1")
    asked = PredictRequest(run="a" * 32, rows=rows, predicted_rows=predicted_rows, active=(1, 2))
    return config, plan_prediction(config, asked.facts, noise_share_std=model.noise_share_std)


LIES: dict[str, tuple[list[tuple[list[int], str]], str]] = {
    "a row twice in a round": ([([200, 200], "predict")], "lists a row twice"),
    "a row in two rounds": ([([200, 201], "predict"), ([201], "predict")], "asks again"),
    "a row of training": ([([199], "predict")], "outside the 40"),
    "a row beyond": ([([240], "predict")], "outside the 40"),
    "another purpose": ([([200], "test")], "a round for test is not due"),
    "training": ([([200], "train")], "a round for train is not due"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_secondary_answers_no_more_than_the_request_says(behind_noise: Path, lie: str) -> None:
    """Rows 200 to 239 of 240 are predicted; the primary may ask for each of them once."""
    _, plan = request_plan(behind_noise, rows=240, predicted_rows=40)
    validator = RequestValidator(SessionLimits.of(plan, party="bank-1", after_round=7))
    asked, text = LIES[lie]
    rounds = [
        RoundPlan(
            round_number=number,
            rows=np.array(rows),
            active=(1, 2),
            purpose=purpose,  # type: ignore[arg-type]
        )
        for number, (rows, purpose) in enumerate(asked, 8)
    ]
    for one in rounds[:-1]:
        validator.validate_round(one)
    with pytest.raises(ProtocolError, match=text):
        validator.validate_round(rounds[-1])


def test_round_numbers_of_earlier_requests_are_used(behind_noise: Path) -> None:
    _, plan = request_plan(behind_noise, rows=240, predicted_rows=40)
    validator = RequestValidator(SessionLimits.of(plan, party="bank-1", after_round=7))
    again = RoundPlan(round_number=7, rows=np.array([200]), active=(1, 2), purpose="predict")
    with pytest.raises(ProtocolError, match="rounds up to 7"):
        validator.validate_round(again)


def test_predictions_of_one_model_share_a_budget_that_training_does_not_touch(
    charged: Path, tmp_path: Path
) -> None:
    config, plan = request_plan(charged, rows=240, predicted_rows=40)
    ledger = Ledger(
        tmp_path / "table.ledger.jsonl",
        party="bank-1",
        plan=plan.releases,
        noise_share_std=plan.noise_share_std,
        run="b" * 32,
        model="c" * 32,
    )
    rows = np.arange(200, 232)
    first = ledger.charge(round_number=1, rows=rows, purpose="predict")
    before = (tmp_path / "table.ledger.jsonl").read_bytes()
    with pytest.raises(BudgetExceededError, match="all predictions of this model"):
        ledger.begin(plan.releases, run="d" * 32)
    # A ledger does not grow by what it refuses, and goes on as it was.
    assert (tmp_path / "table.ledger.jsonl").read_bytes() == before
    assert ledger.epsilon_spent == first
    # Another model on the same table has a budget of its own; the table's total holds both.
    ledger.close()
    other = Ledger(
        tmp_path / "table.ledger.jsonl",
        party="bank-1",
        plan=plan.releases,
        noise_share_std=plan.noise_share_std,
        run="e" * 32,
        model="f" * 32,
    )
    assert other.charge(round_number=1, rows=rows, purpose="predict") == first
    assert other.total > first
    assert config.privacy.epsilon == 8.0
    other.close()


def test_a_session_of_predictions_has_no_rows_before_a_request() -> None:
    facts = RunFacts(
        rows=10, train_rows=10, validation_rows=0, test_rows=0, predicts=True, run="a" * 32
    )
    with pytest.raises(ProtocolError, match="do not add up"):
        Welcome.from_message(Welcome(facts=facts, keys={}).to_message(), callers=lambda _facts: [])


@pytest.mark.parametrize(("rows", "asked"), [(5, 0), (5, 6), (0, 0), (2**31 + 1, 1)])
def test_impossible_requests_are_refused(rows: int, asked: int) -> None:
    request = PredictRequest(run="a" * 32, rows=rows, predicted_rows=asked, active=(1,))
    message = request.to_message()
    with pytest.raises(ProtocolError, match="asks for"):
        PredictRequest.from_message(message)


def test_nothing_of_a_model_folder_is_for_other_users(plain: Path) -> None:
    for file in plain.rglob("model/*"):
        assert file.stat().st_mode & 0o077 == 0
    assert (plain / "predictions.csv").stat().st_mode & 0o077 == 0


def test_weights_are_plain_tensors(plain: Path) -> None:
    """What is loaded is numbers: nothing of a model folder is executed."""
    model = load_model(plain / "parties/bank-1" / FOLDER, config_of(plain), party="bank-1")
    assert all(isinstance(value, torch.Tensor) for value in model.weights.values())
