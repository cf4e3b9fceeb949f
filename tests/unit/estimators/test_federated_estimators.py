"""``sv.FederatedClassifier`` and ``sv.FederatedRegressor`` among scikit-learn's tools."""

import io
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import securevfl as sv
from securevfl.core.errors import BudgetExceededError, ConfigError

SMALL = sv.models.Top1Sim(hidden=6)
QUICK: dict[str, Any] = {
    "base": "none",
    "epochs": 2,
    "batch_size": 32,
    "learning_rate": 0.05,
    "random_state": 0,
}


def bank(rows: int = 72) -> tuple[pd.DataFrame, "pd.Series[Any]", pd.DataFrame]:
    """Return a primary's rows, their labels, and a secondary's table that knows these."""
    random = np.random.default_rng(2)
    wealth = random.normal(size=rows)
    ids = np.arange(rows, dtype=np.float64)
    own = pd.DataFrame(
        {
            "id": ids,
            "age": random.integers(20, 70, rows),
            "job": random.choice(["cook", "nurse"], rows),
        }
    )
    theirs = pd.DataFrame({"id": ids, "wealth": wealth, "city": random.choice(["a", "b"], rows)})
    pays = pd.Series(np.where(wealth > 0, "yes", "no"))
    return own, pays, theirs.sample(frac=1, random_state=0)


def classifier(theirs: pd.DataFrame, **more: Any) -> sv.FederatedClassifier:
    return sv.FederatedClassifier(
        SMALL, **{"key": ["id"], "secondaries": [theirs], **QUICK, **more}
    )


def test_partners_are_worth_what_they_know() -> None:
    """The label is the secondary's: together it is learned, and alone it can't be."""
    own, pays, theirs = bank()
    model = classifier(theirs, epochs=12).fit(own, pays)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.score(own, pays) > 0.9
    proba = model.predict_proba(own)
    np.testing.assert_allclose(proba.sum(axis=1), 1)
    assert (model.classes_[proba.argmax(axis=1)] == model.predict(own)).all()
    assert model.run_.metrics["epochs"] == model.n_iter_ == 12
    assert model.feature_names_in_.tolist() == ["id", "age", "job"]
    alone = clone(model).set_params(secondaries=()).fit(own, pays)
    assert alone.run_ is None
    assert alone.score(own, pays) < 0.8


def test_fit_is_silent_unless_it_is_asked_to_speak(capfd: pytest.CaptureFixture[str]) -> None:
    own, pays, theirs = bank()
    classifier(theirs).fit(own, pays)
    assert capfd.readouterr() == ("", "")
    classifier(theirs, verbose=1).fit(own, pays)
    out, shown = capfd.readouterr()
    assert out == ""
    assert "linking" in shown


def test_equal_ids_are_linked_one_to_one_unless_said_otherwise() -> None:
    own, pays, theirs = bank()
    exact = {"linkage": "exact", "epochs": 1, "model_settings": {"hidden": 6}}
    for more, links in ({}, 1), ({"neighbours": 3}, 3):
        model = classifier(theirs, **exact, **more).set_params(model="avgsim").fit(own, pays)
        assert model.run_.trained.config.model.neighbours == links


@pytest.mark.parametrize("model", ["fedsim", sv.models.FedSim()])
def test_a_setting_of_another_family_is_named_with_its_family(model: Any) -> None:
    own, pays, theirs = bank()
    wrong = classifier(theirs, model_settings={"heads": 2}).set_params(model=model)
    with pytest.raises(ConfigError, match=r"no such field of family 'fedsim': fet have it"):
        wrong.fit(own, pays)


def test_the_positive_class_can_be_named() -> None:
    """Metrics and the threshold are about it; labels and their order stay those of scikit-learn."""
    own, pays, theirs = bank()
    named = classifier(theirs, epochs=12, positive="no").fit(own, pays)
    assert named.run_ is not None
    assert named.run_.metrics["evaluation"]["confusion"]["classes"] == ["1", "0"]
    assert named.classes_.tolist() == ["no", "yes"]
    assert named.score(own, pays) > 0.9
    proba = named.predict_proba(own)
    assert (named.classes_[proba.argmax(axis=1)] == named.predict(own)).all()
    last = classifier(theirs, positive="yes").fit(own, pays)
    default = classifier(theirs).fit(own, pays)
    assert last.predict_proba(own).tolist() == default.predict_proba(own).tolist()
    alone = clone(named).set_params(secondaries=()).fit(own, pays)
    assert alone.predict_proba(own).shape == (len(own), 2)
    with pytest.raises(ConfigError, match="positive: must be one of two classes, got 'maybe'"):
        classifier(theirs, positive="maybe").fit(own, pays)
    with pytest.raises(ConfigError, match="leave it out of a regression"):
        sv.FederatedRegressor(key=["id"], secondaries=[theirs], positive=1).fit(own, own["age"])


def test_tables_come_as_they_are(tmp_path: Path) -> None:
    """Frames of other libraries, tables by name, files and a party's own table: one model."""
    own, pays, theirs = bank()
    theirs.to_parquet(tmp_path / "bureau.parquet")
    table = sv.data.from_frame(theirs, name="bureau", key=["id"])
    made = [
        classifier(theirs).fit(own, pays),
        classifier(theirs, secondaries=None).fit(pl.from_pandas(own), pays, [theirs]),
        classifier(theirs, secondaries=[str(tmp_path / "bureau.parquet")]).fit(own, pays),
    ]
    answers = [model.predict_proba(own).tolist() for model in made]
    assert answers[0] == answers[1] == answers[2]
    named = [
        classifier(theirs, secondaries=one).fit(own, pays).predict_proba(own).tolist()
        for one in ({"bureau": theirs}, [table])
    ]
    assert named[0] == named[1]


def test_search_validation_and_pipelines_reach_the_partners() -> None:
    """Tools that pass X and y alone; the key goes through a pipeline as it is."""
    own, pays, theirs = bank()
    scores = cross_val_score(classifier(theirs), own, pays, cv=2)
    assert scores.shape == (2,)
    assert np.isfinite(scores).all()
    scaled = ColumnTransformer(
        [("age", StandardScaler(), ["age"]), ("as it is", "passthrough", ["id", "job"])],
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    search = GridSearchCV(
        make_pipeline(scaled, classifier(theirs)),
        {"federatedclassifier__model_settings": [{"hidden": 2}, {"hidden": 8}]},
        cv=2,
        scoring="roc_auc",
        error_score="raise",
    ).fit(own, pays)
    assert search.best_estimator_[-1].run_.metrics["family"] == "top1sim"
    assert search.predict(own).shape == (len(own),)


def test_a_fitted_model_is_pickled_with_its_run() -> None:
    """Workers of joblib send models back: another process has no temporary folder of this one."""
    own, pays, theirs = bank()
    model = classifier(theirs).fit(own, pays)
    kept = io.BytesIO()
    joblib.dump(model, kept)
    expected, folder = model.predict_proba(own), model.run_.trained.folder
    del model
    assert not folder.exists()
    kept.seek(0)
    np.testing.assert_array_equal(joblib.load(kept).predict_proba(own), expected)


def test_regressions_are_in_the_labels_unit() -> None:
    own, _, theirs = bank()
    debt = 1000 + 100 * theirs.sort_values("id")["wealth"].to_numpy()
    model = sv.FederatedRegressor(
        SMALL, key=["id"], secondaries=[theirs], **{**QUICK, "epochs": 15}
    ).fit(own, debt)
    assert model.score(own, debt) > 0.8
    again = sv.FederatedRegressor.from_run(model.run_)
    np.testing.assert_array_equal(again.predict(own), model.predict(own))
    with pytest.raises(ConfigError, match="take FederatedRegressor"):
        sv.FederatedClassifier.from_run(model.run_)


def test_predictions_are_charged_once_for_the_same_rows() -> None:
    """What was released may be looked at again; other rows, or these once more later, cost."""
    own, pays, theirs = bank()
    promise = sv.dp.Privacy(epsilon=20.0, delta=1e-4, encoder="frozen", links_per_record=1)
    model = sv.FederatedClassifier(
        sv.models.Top1Sim(hidden=6),
        key=["id"],
        secondaries=[theirs.drop(columns="city")],
        privacy=promise,
        bounds=[-4, 4],
        prediction_epsilon=25.0,
        **QUICK,
    ).fit(own, pays)
    assert model.epsilon_ == pytest.approx(20.0, abs=0.1)
    first = model.predictions(own)
    assert model.predictions(own) is first
    model.predict(own)
    model.predict_proba(own)
    model.score(own, pays)
    with pytest.raises(BudgetExceededError):
        [model.predict(own.iloc[start:]) for start in range(1, 20)]
    assert model.__sklearn_tags__().non_deterministic


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nobody": ({"secondaries": None}, ConfigError, "secondaries=\\(\\) trains the primary alone"),
    "no list": ({"secondaries": "x.csv"}, ConfigError, "must be a list"),
    "no key": ({"key": None}, ConfigError, "key: must name the columns"),
    "another key": ({"key": ["nr"]}, ConfigError, "key: X has no column 'nr'"),
    "a model": ({"model": "fedsym"}, ConfigError, "model.family: must be one of"),
    "a field": ({"model_settings": {"depth": 3}}, ConfigError, "depth"),
    "a number": ({"epochs": "many"}, ConfigError, "training.epochs: must be"),
    "one row": ({"metric": "auc"}, ValueError, "auc"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_line(mistake: str) -> None:
    own, pays, theirs = bank(24)
    change, kind, text = MISTAKES[mistake]
    with pytest.raises(kind, match=text) as raised:
        classifier(theirs).set_params(**change).fit(own, pays)
    assert "\n" not in str(raised.value)


def test_what_a_model_does_not_do_is_refused() -> None:
    own, pays, theirs = bank(24)
    model = classifier(theirs, secondaries=())
    with pytest.raises(NotFittedError):
        model.predict(own)
    with pytest.raises(TypeError, match="sample_weight"):
        model.fit(own, pays, sample_weight=np.ones(24))
    with pytest.raises(ValueError, match="feature names"):
        model.fit(own, pays).predict(own[["age", "id", "job"]])
