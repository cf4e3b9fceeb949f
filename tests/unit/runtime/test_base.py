"""Runs with a base: where they start, who answers, and what is kept of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.federations import FROZEN
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.ensemble import RandomForestClassifier

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.runtime.predictions import FILE

NO_NOISE = sv.dp.Privacy(mechanism="none")
TOP1 = sv.models.Top1Sim(hidden=8, layer_width=16)
LONG = sv.TrainingSettings(epochs=12, batch_size=32, learning_rate=2e-2, validation_fraction=0.2)
SHORT = sv.TrainingSettings(epochs=2, batch_size=32)


def frames(*, useful: bool, rows: int = 300) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A bank and a bureau, whose column says nearly all of the label, or nothing."""
    random = np.random.default_rng(8)
    age, wealth = random.normal(size=(2, rows))
    signal = 0.7 * age + (1.5 * wealth if useful else random.normal(size=rows))
    number = np.arange(rows)
    bank = pd.DataFrame({"id": number, "age": age, "pays": np.where(signal > 0, "yes", "no")})
    return bank, pd.DataFrame({"id": number, "wealth": wealth}).sample(frac=1, random_state=2)


def trained(*, useful: bool = True, rows: int = 300, **more: Any) -> sv.RunResult:
    bank, bureau = frames(useful=useful, rows=rows)
    parties = [
        sv.data.from_frame(bank, name="bank", key=["id"], label="pays"),
        sv.data.from_frame(bureau, name="bureau", key=["id"]),
    ]
    settings = {"privacy": NO_NOISE, "training": SHORT, "base": "linear", "with_alone": False}
    return sv.simulate(parties, TOP1, **{**settings, **more})


def written(out: Path) -> pd.DataFrame:
    """Return the predictions of the test rows that a run has written, by row."""
    return pd.read_csv(out / FILE).set_index("row")


@pytest.mark.parametrize("estimator", ["linear", "best"])
def test_partners_who_know_more_are_used_and_predictions_are_those_of_the_run(
    estimator: str, tmp_path: Path
) -> None:
    """Epoch 0 is the base; the joint model beats it by far, and the kept one says the same."""
    run = trained(training=LONG, base=estimator, out=tmp_path)
    base = run.metrics["base"]
    assert base["used"] == "joint"
    assert base["gain"] > 2 * base["error"] > 0
    assert run.history[0]["epoch"] == 0
    assert run.history[0]["validation"] < run.metrics["validation"]
    assert run.metrics["test_metrics"] == run.metrics["joint_test_metrics"]
    assert run.metrics["test"] > 0.9

    wanted = written(tmp_path)
    bank = frames(useful=True)[0].iloc[wanted.index - 1]
    again = run.predict(bank)
    assert again.used == "joint"
    assert again.frame()["probability_yes"].tolist() == wanted["probability_yes"].tolist()
    # Without a key the primary alone answers, with a note.
    bank["id"] = np.where(np.arange(len(bank)) < 5, np.nan, bank["id"])
    mixed = run.predict(bank)
    assert mixed.notes == ["no key"] * 5 + [""] * (len(bank) - 5)
    probability = mixed.frame()["probability_yes"]
    assert probability[5:].tolist() == pytest.approx(
        wanted["probability_yes"].tolist()[5:], abs=1e-6
    )
    # It has seen ages alone, and the mean id.
    assert np.corrcoef(probability[:5], bank["age"][:5])[0, 1] > 0.9


def test_partners_who_know_nothing_are_not_asked_and_not_charged(tmp_path: Path) -> None:
    """Under a promise: alone answers, the ledgers stay as they were, and no bottom is needed."""
    privacy = sv.dp.Privacy(**{**FROZEN, "links_per_record": 1})
    run = trained(useful=False, privacy=privacy, bounds=[-5.0, 5.0], out=tmp_path)
    assert run.metrics["base"]["used"] == "alone"
    ledgers = {path: path.read_bytes() for path in tmp_path.glob("parties/*/ledger.jsonl")}
    assert len(ledgers) == 2
    wanted = written(tmp_path)
    again = run.predict(frames(useful=False)[0].iloc[wanted.index - 1])
    assert (again.used, again.epsilon) == ("alone", 0.0)
    assert again.frame()["probability_yes"].tolist() == wanted["probability_yes"].tolist()
    assert {path: path.read_bytes() for path in ledgers} == ledgers
    assert run.metrics["test"] == pytest.approx(again.metrics["auc"])


def test_where_no_epoch_beats_the_base_nobody_is_asked_for_test_rows(tmp_path: Path) -> None:
    """Steps of no size: the base is the best epoch, and is what the joint model gives."""
    still = sv.TrainingSettings(epochs=5, batch_size=32, learning_rate=1e-12, patience=2)
    run = trained(training=still, out=tmp_path)
    assert run.metrics["best_epoch"] == 0
    assert run.metrics["epochs"] == 3  # patience counts from the first that has trained
    base = run.metrics["base"]
    assert (base["used"], base["lambda"]) == ("alone", 0.0)
    assert not any(line.get("purpose") == "test" for line in run.ledger)


def test_none_is_what_the_papers_have(tmp_path: Path) -> None:
    """No epoch 0, no choice, and nothing kept of it."""
    run = trained(base="none", out=tmp_path)
    assert [line["epoch"] for line in run.history] == [1, 2]
    assert "base" not in run.metrics
    assert not list(tmp_path.glob("parties/bank/model/*.skops"))


class Own(ClassifierMixin, BaseEstimator):
    """An estimator of somebody's own."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> "Own":
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return np.full((len(X), 2), 0.5)


def test_any_estimator_of_scikit_learn_and_no_other(tmp_path: Path) -> None:
    """A forest is fitted, kept and loaded; what could not be loaded again is refused at first."""
    forest = RandomForestClassifier(20)
    run = trained(base=forest, training=LONG, out=tmp_path)
    assert run.metrics["base"]["estimator"] == "python"
    kept = json.loads((tmp_path / "parties/bank/model/model.json").read_text())
    assert kept["primary"]["base"]["types"] == ["sklearn.tree._tree.Tree"]
    wanted = written(tmp_path)
    again = run.predict(frames(useful=True)[0].iloc[wanted.index - 1])
    assert again.frame()["probability_yes"].tolist() == wanted["probability_yes"].tolist()
    with pytest.raises(ConfigError, match=r"base\.estimator: \"python\" is sklearn"):
        sv.simulate(tmp_path / "federation.toml", out=tmp_path / "again")
    with pytest.raises(ConfigError, match=r"Own can't be saved: .*not of scikit-learn"):
        trained(base=Own())
    with pytest.raises(ConfigError, match="base: must be"):
        trained(base=3)
    assert run.trained is not None
    other = trained(base=RandomForestClassifier(21))
    assert other.trained is not None
    assert run.trained.config.model_digest != other.trained.config.model_digest


def test_damaged_missing_and_exchanged_files_are_refused(tmp_path: Path) -> None:
    """Each in one line that names the file; nothing is loaded of them."""
    run = trained(out=tmp_path / "run")
    trained(base="boosting", out=tmp_path / "other")
    folder = tmp_path / "run/parties/bank/model"
    path, rows = folder / "base.skops", frames(useful=True)[0][:5]
    whole = path.read_bytes()
    for content in (whole[:-1], (tmp_path / "other/parties/bank/model/base.skops").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"base\.skops: is damaged"):
            run.predict(rows)
    path.unlink()
    with pytest.raises(ConfigError, match=r"base\.skops: cannot be read"):
        run.predict(rows)
    path.write_bytes(whole)
    description = json.loads((folder / "model.json").read_text())
    description["primary"]["base"]["types"] = ["os.system"]
    (folder / "model.json").write_text(json.dumps(description))
    with pytest.raises(ConfigError, match=r"contains os\.system, which is not of scikit-learn"):
        run.predict(rows)
