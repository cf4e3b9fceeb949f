"""The best model of the primary alone: who is chosen, by which rows, and what is kept."""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skops.io._protocol import PROTOCOL

from securevfl.core.errors import ConfigError
from securevfl.models.alone import margins
from securevfl.models.alone import margins as margins_module
from securevfl.models.alone.choice import (
    Alone,
    AverageModel,
    best_weights,
    fit_alone,
    level_with_best,
)
from securevfl.models.alone.margins import (
    MOST_ROUNDS,
    BaselineConfig,
    OwnInputs,
    cross_fit,
    fit_margins,
    fit_network,
    patience_after,
    refit,
)
from securevfl.models.alone.saving import is_trusted, model_bytes, model_of, types_of
from securevfl.models.tasks import TaskHead

BINARY = TaskHead(task="binary", chosen="accuracy")
NUMBER = TaskHead(task="regression", label_deviation=10.0)
THREE = TaskHead(task="multiclass", num_classes=3)
SMALL = BaselineConfig(hidden=(8,), epochs=3, batch_size=32)
TRAIN, VALIDATION, TEST = np.arange(100), np.arange(100, 140), np.arange(140, 180)


def table(width: int = 3) -> OwnInputs:
    return OwnInputs(values=np.random.default_rng(2).normal(size=(180, width)))


def chosen_among(inputs: OwnInputs, targets: np.ndarray, head: TaskHead, **more: object) -> Alone:
    return fit_alone(
        inputs,
        targets,
        head,
        train=TRAIN,
        validation=VALIDATION,
        seed=1,
        **{"network": SMALL, **more},
    )


def test_each_kind_of_table_has_its_model() -> None:
    """A line is drawn by the linear model, a step by trees, and a smooth curve by the network."""
    inputs = table(2)
    first, second = inputs.values.T
    line = (first + second).astype(np.float32)
    assert chosen_among(inputs, line, NUMBER).chosen == "linear"
    step = ((first > 0) ^ (first > 0.8)).astype(np.float32)
    assert chosen_among(inputs, step, BINARY).chosen == "boosting"
    curve = np.sin(2 * (first + second)).astype(np.float32)
    patient = BaselineConfig(hidden=(32,), epochs=80, batch_size=25, learning_rate=2e-2, dropout=0)
    found = chosen_among(inputs, curve, NUMBER, network=patient)
    model = found.best.model
    assert isinstance(model, AverageModel)
    assert model.weights["network"] > 0.5
    assert np.abs(found.margins(inputs.take(TEST))[:, 0] - curve[TEST]).mean() < 0.3


def test_models_that_validate_alike_are_averaged_by_what_none_was_fitted_to() -> None:
    """The average of level models has the least loss out of fold, and is measured as itself."""
    inputs = table(2)
    first, second = inputs.values.T
    labels = (first + np.sign(second) + 0.5 * np.random.default_rng(5).normal(size=180)).astype(
        np.float32
    )
    found = chosen_among(inputs, labels, NUMBER)
    assert found.chosen == "average"
    model = found.best.model
    assert isinstance(model, AverageModel)
    assert sum(model.weights.values()) == pytest.approx(1)
    parts = {name: one.margins(inputs) for name, one in model.parts.items()}
    mean = sum(model.weights[name] * one for name, one in parts.items())
    assert found.margins(inputs) == pytest.approx(mean, abs=1e-6)
    rows = np.concatenate([TRAIN, VALIDATION])
    assert found.best.margins is not None
    loss = np.mean((found.best.margins[rows, 0] - labels[rows]) ** 2)
    for name in model.parts:
        by_itself = found.candidates[name].margins
        assert by_itself is not None
        assert loss < np.mean((by_itself[rows, 0] - labels[rows]) ** 2)
        # Out of fold: a model that had seen the row would be nearer to its label.
        assert not np.array_equal(by_itself[TRAIN], parts[name][TRAIN])


def test_few_validation_rows_do_not_choose_the_lucky_model() -> None:
    """A model that is better on validation rows by luck counts for little: its folds say so."""
    drawn = np.random.default_rng(0)
    labels = drawn.normal(size=1000).astype(np.float32)
    rows = np.arange(1000)
    good, lucky = labels + drawn.normal(size=1000), labels + 2 * drawn.normal(size=1000)
    lucky[900:] = labels[900:] + 0.9 * drawn.normal(size=100)
    losses = {"good": (good[900:] - labels[900:]) ** 2, "lucky": (lucky[900:] - labels[900:]) ** 2}
    assert losses["lucky"].mean() < losses["good"].mean()
    assert level_with_best(losses, also="lucky") == ("good", "lucky")
    margins = {
        "good": good.astype(np.float32)[:, None],
        "lucky": lucky.astype(np.float32)[:, None],
    }
    assert best_weights(margins, labels[rows], NUMBER)["good"] >= 0.7


def test_a_model_that_is_clearly_worse_is_not_level() -> None:
    """Beyond two standard errors of the paired difference nothing is averaged."""
    drawn = np.random.default_rng(1)
    near = drawn.normal(size=400) ** 2
    losses = {"near": near, "far": near + 0.1 + 0.2 * drawn.normal(size=400)}
    assert level_with_best(losses, also="near") == ("near",)
    assert level_with_best(losses, also="far") == ("near", "far")


def test_trees_are_boosted_until_they_no_longer_learn() -> None:
    """A sum of many columns takes far more rounds than a few hundred, and is given them."""
    drawn = np.random.default_rng(3)
    values = drawn.normal(size=(1600, 24))
    labels = values.sum(axis=1).astype(np.float32)
    model = fit_margins("boosting", OwnInputs(values=values), labels, NUMBER, seed=0)
    assert 400 < model.estimator.n_iter_ < MOST_ROUNDS
    scores = model.estimator.validation_score_
    assert max(scores) > max(scores[:400])


def test_test_rows_never_matter() -> None:
    """Other labels and numbers of test rows leave choice, margins and figures as they were."""
    inputs, rows = table(), np.concatenate([TRAIN, VALIDATION])
    labels = np.digitize(inputs.values[:, 0] + inputs.values[:, 1] ** 2, [0.0, 1.0])
    found = chosen_among(inputs, labels, THREE)
    values, others = inputs.values.copy(), labels.copy()
    values[TEST], others[TEST] = 1e6, 0
    again = chosen_among(OwnInputs(values=values), others, THREE)
    assert again.chosen == found.chosen
    for name, one in found.candidates.items():
        assert again.candidates[name].validation == one.validation
        first, second = (each.candidates[name].model.margins(inputs) for each in (found, again))
        assert np.array_equal(first[rows], second[rows])


def test_measured_are_the_rows_that_are_asked_for() -> None:
    """Errors are in units of the label, thresholds are those of validation rows."""
    inputs = table()
    labels = inputs.values[:, 0].astype(np.float32)
    found = chosen_among(inputs, labels, NUMBER)
    measured = found.measure(inputs.take(TEST), labels[TEST])
    assert list(measured) == list(found.candidates) == ["linear", "boosting", "network"]
    error = found.candidates["boosting"].model.margins(inputs.take(TEST))[:, 0] - labels[TEST]
    assert measured["boosting"]["rmse"] == pytest.approx(10 * np.sqrt(np.mean(error**2)), rel=1e-5)
    validated = found.measure(inputs.take(VALIDATION), labels[VALIDATION])
    assert validated == {name: one.validation for name, one in found.candidates.items()}


def test_of_equals_the_simplest() -> None:
    """Constant inputs: three models of the same accuracy, and the linear one is chosen."""
    labels = np.tile(np.array([1, 0, 1, 1], dtype=np.float32), 45)
    found = chosen_among(OwnInputs(values=np.ones((180, 1))), labels, BINARY)
    assert len({one.validation["accuracy"] for one in found.candidates.values()}) == 1
    assert found.chosen == "linear"


@pytest.mark.parametrize("head", [BINARY, NUMBER, THREE], ids=lambda head: head.task)
def test_without_columns_a_constant(head: TaskHead) -> None:
    """A primary that has but texts to link by predicts the mean, or the classes' shares."""
    labels = np.arange(180) % 3
    targets = {"binary": labels > 0, "regression": labels, "multiclass": labels}[head.task]
    kind = np.int64 if head.task == "multiclass" else np.float32
    inputs = OwnInputs(values=np.zeros((180, 0)))
    found = chosen_among(inputs, targets.astype(kind), head)
    assert found.chosen == "constant"
    margins = found.margins(inputs)
    assert margins.shape == (180, head.outputs)
    assert (margins == margins[0]).all()


def test_what_was_fitted_is_not_fitted_again() -> None:
    """The base is handed in, and used as it is."""
    inputs = table()
    labels = inputs.values[:, 0].astype(np.float32)
    base = cross_fit("boosting", inputs, labels, NUMBER, train=TRAIN, seed=1)
    found = chosen_among(inputs, labels, NUMBER, fitted={"boosting": base})
    assert found.candidates["boosting"].model is base.model


@pytest.mark.parametrize("head", [BINARY, NUMBER, THREE], ids=lambda head: head.task)
def test_kept_models_predict_as_before(head: TaskHead) -> None:
    """Every candidate, as bytes and back, to the last bit."""
    marks = np.eye(3)[np.arange(180) % 4 % 3]
    inputs = OwnInputs(values=np.hstack([table().values, marks]), words=((3, 4, 5),))
    number = inputs.values[:, 0]
    labels = {
        "binary": (number > 0).astype(np.float32),
        "regression": number.astype(np.float32),
        "multiclass": np.digitize(number, [-0.5, 0.5]),
    }[head.task]
    blind = chosen_among(OwnInputs(values=np.zeros((180, 0))), labels, head)
    for rows, found in (
        (inputs, chosen_among(inputs, labels, head)),
        (OwnInputs(values=np.zeros((180, 0))), blind),
    ):
        for one in found.candidates.values():
            content, about = model_bytes(one.model)
            again = model_of(content, about, head)
            assert np.array_equal(again.margins(rows), one.model.margins(rows))


class Anything:
    """What an estimator's file must not bring along."""


def test_types_that_nobody_trusts_are_not_loaded() -> None:
    """A file that holds another type than histogram boosting has is refused in one line."""
    inputs, labels = table(), np.arange(180, dtype=np.float32)
    model = fit_margins("linear", inputs, labels, NUMBER, seed=0)
    model.estimator.memory = Anything()
    content, about = model_bytes(dataclasses.replace(model))
    with pytest.raises(ConfigError, match="Anything"):
        model_of(content, about, NUMBER)


@pytest.mark.parametrize(
    ("name", "trusted"),
    [
        ("sklearn.linear_model._logistic.LogisticRegression", True),
        ("sklearn._loss.loss.HalfBinomialLoss", True),
        ("sklearn.utils._testing.check_output", False),
        ("sklearn.utils._testing.TempMemmap", False),
        ("sklearn.utils.validation.os", False),
        ("sklearn.base.clone", False),
        ("sklearn.base.defaultdict", False),
        ("sklearn.nothing.Here", False),
        ("sklearn", False),
        ("sklearnish.Model", False),
    ],
)
def test_only_classes_of_scikit_learns_own_are_trusted(name: str, trusted: bool) -> None:
    """Not whatever can be reached by a name that begins with its."""
    assert is_trusted(name) is trusted


def _node(kind: str, loader: str, content: Any, **more: Any) -> dict[str, Any]:
    place, _, own = kind.rpartition(".")
    return {"__class__": own, "__module__": place, "__loader__": loader, "content": content, **more}


def estimator_that_calls(trace: Path) -> bytes:
    """Return a file of skops that makes a folder, by a command that scikit-learn's tests import."""
    words = [
        _node("builtins.str", "JsonNode", json.dumps(word), is_json=True)
        for word in ("mkdir", str(trace))
    ]
    arguments = _node("builtins.tuple", "TupleNode", [_node("builtins.list", "ListNode", words)])
    schema = _node(
        "sklearn.utils._testing.check_output",
        "ConstructorFromReduceNode",
        arguments,
        protocol=PROTOCOL,
        _skops_version="0.16.0",
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("schema.json", json.dumps(schema))
    return buffer.getvalue()


def test_a_kept_estimator_calls_nothing(tmp_path: Path) -> None:
    """Whoever may write a model's folder can name any type in its description, and any hash."""
    trace = tmp_path / "trace"
    content = estimator_that_calls(trace)
    asked = list(filter(is_trusted, types_of(content)))
    about = {"kind": "estimator", "words_as_one": False, "types": asked}
    with pytest.raises(ConfigError, match=r"sklearn\.utils\._testing\.check_output"):
        model_of(content, about, NUMBER)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("best", "rows", "epochs"),
    [
        (1, 17_500, 15),  # 2,000 steps
        (60, 17_500, 30),  # half of what the best took
        (154, 17_500, 40),  # and never more than asked for
        (1, 100, 40),
    ],
)
def test_a_network_of_many_rows_waits_fewer_epochs(best: int, rows: int, epochs: int) -> None:
    assert patience_after(best, rows=rows, config=BaselineConfig()) == epochs


def test_a_network_that_learns_nothing_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels by chance: where 8 epochs have as many steps as it waits, it waits 8, and not 40."""
    monkeypatch.setattr(margins, "_STEPS_TO_WAIT", 200)
    random = np.random.default_rng(0)
    inputs = OwnInputs(values=random.normal(size=(600, 2)))
    labels = random.normal(size=600).astype(np.float32)
    config = BaselineConfig(hidden=(4,), batch_size=20)
    found = fit_network(
        inputs,
        labels,
        NUMBER,
        train=np.arange(500),
        validation=np.arange(500, 600),
        seed=0,
        config=config,
    )
    assert found.epochs == found.best_epoch + max(8, found.best_epoch // 2)


def test_trees_of_folds_have_the_rounds_that_the_whole_table_stopped_at() -> None:
    """They search for no end of their own, which would take a tenth of a fold's rows."""
    random = np.random.default_rng(1)
    inputs = OwnInputs(values=random.normal(size=(1500, 2)))
    labels = (inputs.values[:, 0] ** 2).astype(np.float32)
    whole = fit_margins("boosting", inputs, labels, NUMBER, seed=1)
    part = refit(whole, inputs.take(np.arange(1200)), labels[:1200])
    assert whole.estimator.do_early_stopping_
    assert not part.estimator.do_early_stopping_
    assert part.estimator.n_iter_ == whole.estimator.n_iter_ < MOST_ROUNDS


def test_large_tables_have_fewer_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training row is still held out of the model that its margin comes from."""
    fitted: list[int] = []

    def counted(model: object, inputs: OwnInputs, targets: np.ndarray) -> object:
        fitted.append(len(targets))
        return refit(model, inputs, targets)  # type: ignore[arg-type]

    monkeypatch.setattr(margins_module, "refit", counted)
    random = np.random.default_rng(2)
    for rows, sizes in ((9_999, 5), (10_002, 3)):
        fitted.clear()
        inputs = OwnInputs(values=random.normal(size=(rows, 1)))
        labels = random.normal(size=rows).astype(np.float32)
        cross_fit("linear", inputs, labels, NUMBER, train=np.arange(rows), seed=0)
        assert len(fitted) == sizes
        assert sum(fitted) == (sizes - 1) * rows
