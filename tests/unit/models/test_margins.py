"""Margins of the primary alone: what a network's outputs are added to."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier

from securevfl.core.errors import ConfigError
from securevfl.models.alone.margins import OwnInputs, _folds, cross_fit, fit_margins
from securevfl.models.tasks import TaskHead

BINARY = TaskHead(task="binary")
NUMBER = TaskHead(task="regression")
THREE = TaskHead(task="multiclass", num_classes=3)


def rows_of(count: int, width: int = 3) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(count, width))


@pytest.mark.parametrize("estimator", ["boosting", "linear"])
@pytest.mark.parametrize("head", [BINARY, NUMBER, THREE], ids=lambda head: head.task)
def test_margins_are_what_the_head_reads(estimator: str, head: TaskHead) -> None:
    """A margin by itself is a better prediction than none, in the head's own terms."""
    values = rows_of(300)
    number = values[:, 0] + 0.1 * values[:, 1]
    labels = {
        "binary": (number > 0).astype(np.float32),
        "regression": number.astype(np.float32),
        "multiclass": np.digitize(number, [-0.5, 0.5]),
    }[head.task]
    model = fit_margins(estimator, OwnInputs(values=values), labels, head, seed=0)
    margins = torch.from_numpy(model.margins(OwnInputs(values=values)))
    assert margins.shape == (300, head.outputs)
    targets = torch.from_numpy(labels)
    assert head.loss(margins, targets) < 0.6 * head.loss(torch.zeros_like(margins), targets)


def test_a_training_row_gets_no_margin_of_its_own_label() -> None:
    """Labels are coins: trees learn them by heart, and margins out of fold know nothing."""
    values = rows_of(400)
    labels = np.random.default_rng(5).integers(0, 2, 400).astype(np.float32)
    train = np.arange(0, 400, 2)
    fitted = cross_fit("boosting", OwnInputs(values=values), labels, BINARY, train=train, seed=0)
    right = (fitted.margins[:, 0] > 0) == labels
    by_heart = (fitted.model.margins(OwnInputs(values=values[train]))[:, 0] > 0) == labels[train]
    assert by_heart.mean() > 0.9
    assert right[train].mean() < 0.65


def test_rows_outside_training_never_matter() -> None:
    """Other labels of validation and test rows leave every margin as it was."""
    values, labels = rows_of(120), rows_of(120, 1)[:, 0].astype(np.float32)
    train = np.arange(80)
    changed = labels.copy()
    changed[80:] += 100
    first, second = (
        cross_fit("linear", OwnInputs(values=values), one, NUMBER, train=train, seed=0).margins
        for one in (labels, changed)
    )
    assert np.array_equal(first, second)


def test_words_are_categories_for_trees() -> None:
    """Forty words in arbitrary order: three leaves part them, where one word each takes forty."""
    words = np.random.default_rng(6).integers(0, 41, 2000)  # the last is none of them
    marks = np.eye(41)[words][:, :40]
    labels = np.isin(words, np.arange(0, 41, 3)).astype(np.float32)
    inputs = OwnInputs(values=np.hstack([rows_of(2000, 1), marks]), words=(tuple(range(1, 41)),))
    model = fit_margins("boosting", inputs, labels, BINARY, seed=0)
    assert ((model.margins(inputs)[:, 0] > 0) == labels).mean() == 1.0
    assert model.estimator.n_features_in_ == 2


def test_few_rows_and_one_class() -> None:
    """Two rows, or labels all alike, give margins rather than an error."""
    values = rows_of(30)
    alike = cross_fit(
        "boosting",
        OwnInputs(values=values),
        np.ones(30, dtype=np.float32),
        BINARY,
        train=np.arange(10),
        seed=0,
    )
    assert (alike.margins > 5).all()
    two = cross_fit(
        "linear",
        OwnInputs(values=values),
        rows_of(30, 1)[:, 0].astype(np.float32),
        NUMBER,
        train=np.arange(2),
        seed=0,
    )
    assert np.isfinite(two.margins).all()


def test_a_class_without_training_rows() -> None:
    """It has the least probability, and the others keep their places."""
    values = rows_of(90)
    labels = np.where(values[:, 0] > 0, 2, 0)
    model = fit_margins("linear", OwnInputs(values=values), labels, THREE, seed=0)
    margins = model.margins(OwnInputs(values=values))
    assert np.allclose(margins[:, 1], np.log(1e-4))
    assert (margins[:, [0, 2]].argmax(axis=1) * 2 == labels).mean() > 0.9


def test_estimators_of_ones_own() -> None:
    """Any classifier with probabilities will do; what has none is refused by its name."""
    values = rows_of(100)
    labels = (values[:, 0] > 0).astype(np.float32)
    forest = RandomForestClassifier(n_estimators=5, random_state=0)
    model = fit_margins(forest, OwnInputs(values=values), labels, BINARY, seed=0)
    assert np.abs(model.margins(OwnInputs(values=values))).max() <= np.log((1 - 1e-4) / 1e-4) + 1e-4
    assert not hasattr(forest, "classes_")
    with pytest.raises(ConfigError, match="object needs fit and predict_proba for a binary task"):
        fit_margins(object(), OwnInputs(values=values), labels, BINARY, seed=0)
    with pytest.raises(ConfigError, match='must be "boosting" or "linear", got \'trees\''):
        fit_margins("trees", OwnInputs(values=values), labels, BINARY, seed=0)


@pytest.mark.parametrize("head", [NUMBER, BINARY], ids=lambda head: head.task)
def test_rows_of_one_group_are_in_one_fold(head: TaskHead) -> None:
    """Else what they share would be known of a row that is held out."""
    groups = np.random.default_rng(0).integers(0, 30, 200)
    labels = (groups % 2).astype(np.float32)
    parts = [*_folds(labels, head, seed=0, groups=groups)]
    assert len(parts) > 1
    assert sorted(np.concatenate([held_out for _, held_out in parts])) == [*range(200)]
    for rest, held_out in parts:
        assert not set(groups[rest]) & set(groups[held_out])
