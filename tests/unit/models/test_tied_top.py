"""The tied top model: it learns what class means say, adds little to noise, and is kept."""

import numpy as np
import pytest
import torch

from securevfl.models.fitted_top import TiedTop, fit_tied
from securevfl.models.tasks import TaskHead


def rows(head: TaskHead, width: int, *, signal: float, count: int = 400, seed: int = 0):
    """Return releases, base margins and labels; they rise with the label by ``signal``."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, width, count)
    released = signal * np.eye(width)[labels] + draw.normal(size=(count, width))
    if head.task == "regression":
        targets = torch.tensor(labels - labels.mean(), dtype=torch.float32)
    elif head.task == "binary":
        targets = torch.tensor(labels, dtype=torch.float32)
    else:
        targets = torch.from_numpy(labels)
    base = torch.zeros(count, head.outputs)
    return torch.from_numpy(released), base, targets


@pytest.mark.parametrize(
    ("task", "width"), [("multiclass", 4), ("binary", 2), ("regression", 5), ("regression", 1)]
)
def test_class_means_that_tell_lower_the_loss_of_rows_it_has_not_seen(
    task: str, width: int
) -> None:
    """By more than a tenth, and what class means say is found to have the sign that it has."""
    head = TaskHead(task=task, num_classes=width if task == "multiclass" else 1)
    released, base, targets = rows(head, max(width, 2), signal=2.0)
    released = released[:, -width:]

    def make() -> TiedTop:
        return TiedTop(width=width, outputs=head.outputs)

    model, added = fit_tied(make, released, base, targets, head, folds=torch.arange(400) % 5)
    before = float(head.row_losses(base, targets).mean())
    assert float(head.row_losses(base + added, targets).mean()) < 0.9 * before
    fresh, more, known = rows(head, max(width, 2), signal=2.0, seed=1)
    with torch.no_grad():
        outputs = more + model.correct(fresh[:, -width:])
    assert float(head.row_losses(outputs, known).mean()) < 0.9 * before
    assert model.weight.item() > 0


def test_noise_is_left_alone() -> None:
    """Ten numbers of noise add less than a hundredth to the loss of rows it has not seen."""
    head = TaskHead(task="multiclass", num_classes=10)
    released, base, targets = rows(head, 10, signal=0.0)

    def make() -> TiedTop:
        return TiedTop(width=10, outputs=10)

    model, _ = fit_tied(make, released, base, targets, head, folds=torch.arange(400) % 5)
    fresh, more, known = rows(head, 10, signal=0.0, seed=1)
    with torch.no_grad():
        loss = float(head.row_losses(more + model.correct(fresh), known).mean())
    assert loss < np.log(10) + 0.01


def test_margins_out_of_fold_do_not_know_the_rows_label() -> None:
    """Labels that are drawn at random are not told apart by them, though they are by the fit."""
    head = TaskHead(task="binary")
    draw = np.random.default_rng(5)
    released = torch.from_numpy(draw.normal(size=(60, 40)))
    targets = torch.tensor(draw.integers(0, 2, 60), dtype=torch.float32)
    base = torch.zeros(60, 1)

    def make() -> TiedTop:
        return TiedTop(width=40, outputs=1)

    model, added = fit_tied(make, released, base, targets, head, folds=torch.arange(60) % 5)
    with torch.no_grad():
        fitted = float(head.row_losses(base + model.correct(released), targets).mean())
    assert fitted < float(head.row_losses(base + added, targets).mean())


def test_scale_and_order_of_rows_change_nothing() -> None:
    """Clip norms and numbers of secondaries scale releases; the model is the same."""
    head = TaskHead(task="multiclass", num_classes=3)
    released, base, targets = rows(head, 3, signal=1.0)
    models = []
    for one, known in ((released, targets), (1e-3 * released.flip(0), targets.flip(0))):
        model = TiedTop(width=3, outputs=3)
        model.fit(one, base, known, head, penalty=10.0)
        models.append(model)
    with torch.no_grad():
        torch.testing.assert_close(
            models[0].correct(released), models[1].correct(1e-3 * released), rtol=1e-3, atol=1e-3
        )
