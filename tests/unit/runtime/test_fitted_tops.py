"""Estimators as top models of frozen runs: what they are fitted to, kept, resumed, refused."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import securevfl
from helpers.damage import damage
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import LinearSVC

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.federation.rounds.fitted_primary import FittedPrimary
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.models.alone.margins import OwnInputs, cross_fit
from securevfl.models.fitted_top import FittedTop
from securevfl.models.tasks import TaskHead
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.testing import run_in_process, write_federation

ROWS = 90
PLAIN = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}
TWO = TaskHead(task="binary")


def federation(folder: Path, model: dict[str, Any], **sections: Any) -> Path:
    """Write a federation without noise, whose primary has a column of words too."""
    folder.mkdir(exist_ok=True)
    path = write_federation(
        folder,
        rows=ROWS,
        model=model,
        federation={"task": "binary"},
        **{
            "privacy": PLAIN,
            "training": {"batch_size": 16, "validation_fraction": 0.2},
            **sections,
        },
    )
    table = pd.read_csv(folder / "agency.csv")
    table["y"] = (table["y"] > 0).astype(int)
    table["job"] = np.random.default_rng(1).choice(["cook", "nurse", "smith"], len(table))
    table.to_csv(folder / "agency.csv", index=False)
    return path


POOLED = {"release": "pooled", "hidden": 4}
SIMILAR = {"family": "fedsim", "neighbours": 2, "hidden": 2}


def probabilities(frame: pd.DataFrame) -> np.ndarray:
    return frame[[name for name in frame if name.startswith("probability")]].to_numpy()


def predicted_again(run: sv.RunResult, folder: Path) -> tuple[pd.DataFrame, sv.Predictions]:
    """Return the predictions that a run has written of its test rows, and those as new rows."""
    written = pd.read_csv(folder / "run" / "predictions.csv")
    table = pd.read_csv(folder / "agency.csv")
    return written, run.predict(table.iloc[written["row"] - 1].reset_index(drop=True))


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (
            {**POOLED, "top": "boosting"},
            {"encoder": {"method": "random"}, "training": {"labelled_rows": 20}},
        ),
        ({**SIMILAR, "top": "linear"}, {}),
    ],
    ids=["boosting on blocks", "linear on similarities"],
)
def test_new_rows_are_predicted_as_test_rows_were(
    model: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    """To the last digit; and a row without a key is answered too, without the secondaries."""
    run = run_in_process(federation(tmp_path, model, **more), tmp_path / "run")
    written, again = predicted_again(run, tmp_path)
    assert np.array_equal(probabilities(again.frame()), probabilities(written))
    assert again.metrics == run.metrics["test_metrics"]
    assert [line["epoch"] for line in run.history] == [1]
    new = pd.read_csv(tmp_path / "agency.csv").iloc[:3].assign(lon=[np.nan, 1.0, 2.0])
    found = run.predict(new)
    assert list(found.notes or ()) == ["no key", "", ""]
    assert np.isfinite(probabilities(found.frame())).all()


def test_it_is_fitted_to_own_columns_keys_and_released_numbers(tmp_path: Path) -> None:
    """By hand, from the table of releases: the same predictions, and the same figures of training.

    Those are out of fold: rows that a model was fitted to are not what it is measured by.
    """
    path = federation(
        tmp_path, {**POOLED, "top": "linear"}, training={"batch_size": 16, "labelled_rows": 40}
    )
    run = run_in_process(path, tmp_path / "run")
    frame = run.features(own=True)
    names = [name for name in frame if name.startswith(("own_", "released_"))]
    assert sum(name.startswith("own_job=") for name in names) == 3
    values = frame[names].to_numpy(dtype=np.float64)
    train, test = (np.flatnonzero(frame["part"] == part) for part in ("train", "test"))
    assert len(train) == 40
    labels = frame["label"].to_numpy(dtype=np.float32)
    rows = values[train]
    fitted = cross_fit(
        "linear", OwnInputs(values=rows), labels[train], TWO, train=np.arange(40), seed=3
    )
    found = torch.from_numpy(fitted.model.margins(OwnInputs(values=values[test])))
    written = pd.read_csv(tmp_path / "run" / "predictions.csv")
    assert np.allclose(torch.sigmoid(found), probabilities(written), atol=1e-5)
    known = torch.from_numpy(labels[train])
    (line,) = run.history
    margins = torch.from_numpy(fitted.margins)
    assert line["train"] == pytest.approx(TWO.metric(margins, known))
    assert line["loss"] == pytest.approx(float(TWO.loss(margins, known)), rel=1e-4)


class CutError(Exception):
    """The simulated crash."""


def test_a_cut_run_goes_on_with_what_was_fitted_or_fits_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the kept rows, with the same result: nothing is released or charged a second time."""
    path = federation(tmp_path, {**POOLED, "top": "linear"}, base={"estimator": "linear"})

    config = sv.read_federation(path)

    def simulated_in(folder: str, *, resume: bool = False) -> sv.RunResult:
        return run_in_process(config, tmp_path / folder, data_root=tmp_path, resume=resume)

    def cut(_run: PrimaryRun) -> None:
        raise CutError

    with monkeypatch.context() as crash:
        crash.setattr(PrimaryRun, "_test", cut)
        with pytest.raises(CutError):
            simulated_in("kept")
    shutil.copytree(tmp_path / "kept", tmp_path / "lost")
    damage(tmp_path / "lost" / "parties" / "agency" / "epoch-1.pt", "deleted")
    monkeypatch.setattr(CachedRows, "keep", None)
    fits = []
    fit = FittedPrimary._train_epoch

    def counted(primary: FittedPrimary, epoch: int) -> Any:
        fits.append(epoch)
        return fit(primary, epoch)

    monkeypatch.setattr(FittedPrimary, "_train_epoch", counted)
    # One fit is that of the same top model without partners, which is never kept.
    kept = simulated_in("kept", resume=True)
    assert fits == [1]
    lost = simulated_in("lost", resume=True)
    assert fits == [1, 1, 1]
    for name in ("test_metrics", "joint_test_metrics", "validation_metrics", "base"):
        assert kept.metrics[name] == lost.metrics[name]
    for run in (kept, lost):
        charged = [line for line in run.ledger if line["kind"] == "charge"]
        assert sum(line["rows"] for line in charged) == ROWS


def people() -> tuple[pd.DataFrame, pd.DataFrame]:
    random = np.random.default_rng(5)
    ids = [f"P{number:04d}" for number in range(60)]
    own = pd.DataFrame({"id": ids, "age": random.normal(size=60)})
    theirs = pd.DataFrame({"id": ids, "wealth": random.normal(size=60)})
    return own.assign(pays=np.where(theirs["wealth"] > 0, "yes", "no")), theirs


def bank_and_bureau(**more: Any) -> tuple[sv.RunResult, list[sv.data.PartyTable]]:
    """Run a bank and a bureau, which knows what decides; texts are keys, as nothing attends."""
    own, theirs = people()
    parties = [
        sv.data.from_frame(own, name="bank", key=["id"], label="pays"),
        sv.data.from_frame(theirs, name="bureau", key=["id"]),
    ]
    run = sv.simulate(
        parties,
        sv.models.FeT(
            neighbours=1, hidden=2, release="pooled", frozen_map="linear", keys_as_features=False
        ),
        privacy=sv.dp.Privacy(mechanism="none", encoder="frozen"),
        linkage=sv.LinkageSettings(metric="exact", protection="none"),
        training=sv.TrainingSettings(validation_fraction=0.25),
        with_alone=False,
        **more,
    )
    return run, parties


def test_a_base_answers_as_far_as_lambda_says(tmp_path: Path) -> None:
    """(1 - lambda) of the base and lambda of the estimator, in margins, for test and new rows."""
    run, _ = bank_and_bureau(top="linear", base="linear", out=tmp_path)
    told = run.metrics["base"]
    assert told["used"] == "joint"
    assert 0 < told["lambda"] <= 1
    written = pd.read_csv(tmp_path / "predictions.csv")
    again = run.predict(people()[0].iloc[written["row"] - 1].reset_index(drop=True))
    assert np.array_equal(probabilities(again.frame()), probabilities(written))

    assert run.trained is not None
    frame = run.features(own=True)
    model = run.trained.model("bank")
    assert model.primary is not None
    assert model.primary.base is not None
    test = frame[frame["part"] == "test"]
    own = test[["own_age"]].to_numpy(dtype=np.float64, copy=True)
    seen = torch.from_numpy(test[["released_0", "released_1"]].to_numpy(copy=True))[:, None]
    top = FittedTop(TWO, words=(), own=1, released=2, similarities=0)
    model.into(top)
    below = torch.from_numpy(model.primary.base.margins(OwnInputs(values=own)))
    above = top(torch.from_numpy(own), torch.zeros(len(own), 0), seen, None)
    for scale, close in ((told["lambda"], True), (0.5 * told["lambda"], False)):
        joint = (1 - scale) * below + scale * above
        found = torch.sigmoid(joint).numpy()
        assert np.allclose(found, probabilities(written), atol=1e-5) == close


def doubled(values: np.ndarray) -> np.ndarray:
    return 2 * values


def test_an_estimator_of_ones_own(tmp_path: Path) -> None:
    """Handed over in Python, kept as it was fitted, and used again from the run's folder alone."""
    forest = RandomForestClassifier(n_estimators=20, random_state=0)
    run, parties = bank_and_bureau(top=forest, base="none", out=tmp_path / "run")
    own, _ = people()
    found = run.predict(own)
    assert found.metrics is not None
    assert (found.metrics["accuracy"] or 0.0) > 0.9
    later = sv.predict(tmp_path / "run", own, parties=parties[1:])
    assert later.probabilities is not None
    assert np.array_equal(later.probabilities, found.probabilities)
    assert not hasattr(forest, "estimators_")

    told = tomllib.loads((tmp_path / "run" / "federation.toml").read_text())["model"]["top"]
    path = federation(tmp_path / "file", {**POOLED, "top": told})
    with pytest.raises(ConfigError, match=r"model\.top: is sklearn.*RandomForestClassifier.*hand"):
        sv.simulate(path, out=tmp_path / "again")
    foreign = make_pipeline(FunctionTransformer(doubled), LogisticRegression())
    with pytest.raises(ConfigError, match=r"model\.top: Pipeline can't be saved"):
        bank_and_bureau(top=foreign, base="none")
    with pytest.raises(ConfigError, match=r"model\.top: LinearSVC needs fit and predict_proba"):
        bank_and_bureau(top=LinearSVC(), base="none")
    with pytest.raises(ConfigError, match="top: must be"):
        bank_and_bureau(top=7, base="none")


def test_what_was_kept_is_whole_or_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged file ends a prediction in one line."""
    path = federation(tmp_path, {**POOLED, "top": "linear"})
    run_in_process(path, tmp_path / "run")
    model = tmp_path / "run" / "parties" / "agency" / "model"
    damage(model / "weights.safetensors", "flipped")
    asked = ["predict", tmp_path / "run", "--rows", tmp_path / "agency.csv"]
    done = securevfl(
        capfd, *asked, "--data-root", tmp_path, "--out", tmp_path / "out.csv", "--json"
    )
    assert (done.code, "weights.safetensors: is damaged" in done.complaint) == (2, True)
    top = FittedTop(TWO, words=(), own=1, released=1, similarities=0)
    for state in (b"", b"{}", b'{"words": [], "kind": "estimator", "words_as_one": false}\nzip'):
        with pytest.raises(ConfigError, match="the saved estimator is damaged"):
            top.set_extra_state(torch.frombuffer(bytearray(state + b" "), dtype=torch.uint8))


def test_settings_that_do_not_go_together(tmp_path: Path) -> None:
    """Refused when the file is read, with what to write instead."""
    trained = federation(tmp_path, {"top": "boosting"}, privacy={**PLAIN, "encoder": "trained"})
    with pytest.raises(ConfigError, match=r'model\.top: "boosting" is fitted to releases.*frozen'):
        sv.read_federation(trained)
    pretrained = federation(tmp_path, {"family": "fedhssl", "top": "linear"})
    with pytest.raises(ConfigError, match=r"that 'fedhssl' pretrains"):
        sv.read_federation(pretrained)
    other = federation(tmp_path, {**SIMILAR, "top": "bosting"})
    with pytest.raises(ConfigError, match=r"model\.top"):
        sv.read_federation(other)
    compared = federation(tmp_path, POOLED, methods={"trees": {"family": "fet", "top": "boosting"}})
    source = json.dumps(sv.read_federation(compared).source["methods"])
    assert "boosting" in source
