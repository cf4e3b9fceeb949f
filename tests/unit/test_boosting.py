"""Boosted trees as a baseline: every task, missing classes, and who chooses the rounds."""

import math

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier

from securevfl.core.conventions import derive_seed
from securevfl.core.errors import DataError
from securevfl.lab.datasets import load_builtin
from securevfl.lab.methods import BoostingConfig
from securevfl.lab.pooled_methods import fit_boosting
from securevfl.models.tasks import TaskHead

QUICK = BoostingConfig(iterations=15)


def rows(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop)


@pytest.mark.parametrize(
    ("name", "head", "low", "high"),
    [
        ("wine", TaskHead(task="multiclass", num_classes=3), 0.85, 1.0),
        ("breast_cancer", TaskHead(task="binary"), 0.95, 1.0),
        ("diabetes", TaskHead(task="regression"), 40.0, 70.0),
    ],
)
def test_every_task_is_learned(name: str, head: TaskHead, low: float, high: float) -> None:
    """Bounds are far from what a constant reaches, and from the impossible."""
    table = load_builtin(name)
    order = np.random.default_rng(0).permutation(len(table.y))
    kind = torch.int64 if head.task == "multiclass" else torch.float32
    figures, _ = fit_boosting(
        torch.as_tensor(table.X[order], dtype=torch.float32),
        torch.as_tensor(table.y[order], dtype=kind),
        head=head,
        train=rows(0, 100),
        validation=rows(100, 130),
        test=rows(130, len(order)),
        config=QUICK,
        seed=0,
    )

    assert low <= figures.test <= high
    assert math.isfinite(figures.validation)
    assert 1 <= figures.best_epoch <= 15


def test_boosting_ends_where_validation_rows_no_longer_gain() -> None:
    """Far beyond a hundred rounds where these help, and long before the most that are allowed."""
    drawn = np.random.default_rng(3)
    values = drawn.normal(size=(900, 16))
    figures, _ = fit_boosting(
        torch.as_tensor(values, dtype=torch.float32),
        torch.as_tensor(values.sum(axis=1), dtype=torch.float32),
        head=TaskHead(task="regression", label_deviation=1.0),
        train=rows(0, 700),
        validation=rows(700, 800),
        test=rows(800, 900),
        config=BoostingConfig(),
        seed=0,
    )

    assert 100 < figures.best_epoch <= figures.epochs < BoostingConfig().iterations


def test_without_validation_all_rounds_are_used_as_scikit_learn_does() -> None:
    """The test metric is that of the plain model."""
    table = load_builtin("wine")
    order = np.random.default_rng(1).permutation(len(table.y))
    inputs = torch.as_tensor(table.X[order], dtype=torch.float32)
    targets = torch.as_tensor(table.y[order], dtype=torch.int64)
    figures, _ = fit_boosting(
        inputs,
        targets,
        head=TaskHead(task="multiclass", num_classes=3),
        train=rows(0, 60),
        validation=rows(0, 0),
        test=rows(60, 178),
        config=QUICK,
        seed=0,
    )
    plain = HistGradientBoostingClassifier(
        max_iter=15,
        min_samples_leaf=5,
        early_stopping=False,
        random_state=derive_seed(0, "boosting") % 2**32,
    ).fit(inputs[:60], targets[:60])

    assert figures.best_epoch == 15
    assert math.isnan(figures.validation)
    assert figures.test == pytest.approx(plain.score(inputs[60:], targets[60:]))


@pytest.mark.parametrize("present", [[0, 2], [2, 3], [1, 2, 3]])
def test_classes_that_no_training_row_has_are_never_predicted(present: list[int]) -> None:
    """The others keep their numbers: rows of known classes are still right."""
    inputs = torch.arange(40.0).repeat_interleave(4)[:, None] % 4
    targets = inputs[:, 0].long()
    known = torch.isin(targets, torch.tensor(present))
    figures, _ = fit_boosting(
        inputs,
        targets,
        head=TaskHead(task="multiclass", num_classes=4),
        train=known.nonzero()[:, 0],
        validation=rows(0, 0),
        test=rows(0, 160),
        config=QUICK,
        seed=0,
    )

    assert figures.test == pytest.approx(len(present) / 4)


def test_what_can_not_be_learned_is_refused() -> None:
    """One class, or no rows."""
    inputs, targets = torch.zeros(9, 1), torch.zeros(9, dtype=torch.int64)
    settings = {"head": TaskHead(task="multiclass", num_classes=2), "config": QUICK, "seed": 0}
    none = rows(0, 0)
    with pytest.raises(DataError, match="all of one class"):
        fit_boosting(
            inputs, targets, train=rows(0, 5), validation=none, test=rows(5, 9), **settings
        )
    with pytest.raises(DataError, match="no test rows"):
        fit_boosting(inputs, targets, train=rows(0, 5), validation=none, test=none, **settings)
