"""Each metric against a count by hand, where it is not defined, and which one training goes by."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.installed import register
from torch import Tensor

from securevfl.core.errors import ConfigError, DataError
from securevfl.lab.pooled_methods import fit_table
from securevfl.models.alone.margins import BaselineConfig
from securevfl.models.task_metrics import GROUP, TASK_METRICS, _installed_metrics
from securevfl.models.tasks import TaskHead, evaluate

REGRESSION = TaskHead(task="regression", label_deviation=10.0)
BINARY = TaskHead(task="binary")
THREE = TaskHead(task="multiclass", num_classes=3)


def odds(*probabilities: float) -> Tensor:
    """Logits of the second class, shape (rows, 1)."""
    return torch.tensor([[math.log(p / (1 - p))] for p in probabilities], dtype=torch.float64)


def test_errors_of_a_regression_are_in_the_labels_own_units() -> None:
    """Errors 0, 1, 2 and -1, times 10: squares sum to 6, around the mean label to 2."""
    outputs = torch.tensor([[1.0], [2.0], [4.0], [1.0]])
    targets = torch.tensor([1.0, 1.0, 2.0, 2.0])

    assert REGRESSION.metrics(outputs, targets) == pytest.approx(
        {"rmse": 10 * math.sqrt(6 / 4), "mae": 10 * 4 / 4, "r2": 1 - 6 / 1}
    )


def test_figures_of_two_classes() -> None:
    """By hand: (0.9, 1), (0.8, 0), (0.6, 1), (0.3, 1), (0.2, 0), (0.2, 1), sorted by probability.

    Pairs of a 1 and a 0: 0.9 beats both, 0.6, 0.3 beat 0.2, and 0.2 ties it: 4.5 of 8. Above one
    half are three rows, two of them right; of four 1s two are found.
    """
    outputs = odds(0.9, 0.8, 0.6, 0.3, 0.2, 0.2)
    targets = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    logs = [0.9, 0.2, 0.6, 0.3, 0.8, 0.2]

    found = BINARY.metrics(outputs, targets)
    assert found == pytest.approx(
        {
            "auc": 4.5 / 8,
            # The tied rows count together: down to them, four of six rows are of the second class.
            "average_precision": (1 / 1 + 2 / 3 + 3 / 4 + 4 / 6) / 4,
            # Of six rows the top is 0.6 of the first one, which is one of four.
            "recall_at_top": 0.6 / 4,
            "lift_at_top": 0.6 / 4 / 0.1,
            "accuracy": 3 / 6,
            "f1": 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4),
            "log_loss": -sum(math.log(one) for one in logs) / 6,
            "balanced_accuracy": (2 / 4 + 1 / 2) / 2,
            "brier": (0.1**2 + 0.8**2 + 0.4**2 + 0.7**2 + 0.2**2 + 0.8**2) / 6,
            # Bins with one row each, but for the two of 0.2, of which one is of the second class.
            "ece": (0.1 + 0.8 + 0.4 + 0.7 + abs(2 * 0.2 - 1)) / 6,
        },
        rel=1e-6,
    )
    assert list(found)[:4] == ["auc", "average_precision", "recall_at_top", "lift_at_top"]


def test_figures_of_several_classes() -> None:
    """By hand: predicted 0, 0, 1, 2, 1 for 0, 1, 1, 2, 2.

    F1: of class 0 2/3 (one hit, one false alarm), of 1 2/4 (one hit, one missed, one false alarm),
    of 2 2/3. Areas: each class's logit is 1 in predicted rows and 0 elsewhere.
    """
    outputs = torch.eye(3)[[0, 0, 1, 2, 1]]
    targets = torch.tensor([0, 1, 1, 2, 2])
    # Pairs (in the class, not in it) that are in order, ties one half.
    areas = [(3 + 0.5) / 4, (1 * 2 + 0.5 + 0.5 * 2) / 6, (3 + 1.5) / 6]
    high, low = math.e / (math.e + 2), 1 / (math.e + 2)  # probabilities of logits 1, 0, 0

    assert THREE.metrics(outputs, targets) == pytest.approx(
        {
            "accuracy": 3 / 5,
            "macro_f1": (2 / 3 + 1 / 2 + 2 / 3) / 3,
            "macro_auc": sum(areas) / 3,
            "balanced_accuracy": (1 + 1 / 2 + 1 / 2) / 3,
            "log_loss": -(3 * math.log(high) + 2 * math.log(low)) / 5,
            "brier": (3 * ((1 - high) ** 2 + 2 * low**2) + 2 * (high**2 + (1 - low) ** 2 + low**2))
            / 5,
            "ece": abs(high - 3 / 5),
        }
    )


@pytest.mark.parametrize("task", TASK_METRICS)
def test_right_outputs_have_the_best_figures(task: str) -> None:
    """One where more is better and zero where less is; wrong ones are worse by every metric."""
    targets = torch.tensor([0, 1, 2, 1]) if task == "multiclass" else torch.tensor([0.0, 1, 1, 0])
    right = {
        "regression": targets[:, None],
        "binary": 40 * targets[:, None] - 20,
        "multiclass": 20 * torch.eye(3)[targets.long()],
    }[task]
    head = TaskHead(task=task, num_classes=3)
    best, worse = (head.metrics(one, targets) for one in (right, right.roll(1, dims=0)))

    for metric in TASK_METRICS[task]:
        value, other = best[metric.name], worse[metric.name]
        # Half of the rows are positive, and a tenth are the top.
        top = {"recall_at_top": 0.2, "lift_at_top": 2.0}.get(metric.name, 1.0)
        assert value == pytest.approx(top if metric.higher_is_better else 0.0, abs=1e-6)
        assert dataclasses.replace(head, chosen=metric.name).is_better(value, other)


@pytest.mark.parametrize(
    ("head", "targets", "undefined"),
    [
        (REGRESSION, torch.ones(4), {"r2": "labels that differ"}),
        (
            BINARY,
            torch.zeros(4),
            {
                "auc": "rows of both classes",
                "average_precision": "a row of the second class",
                "recall_at_top": "a row of the second class",
                "lift_at_top": "a row of the second class",
                "f1": "a row of the second class",
            },
        ),
        (BINARY, torch.ones(4), {"auc": "rows of both classes"}),
        (THREE, torch.tensor([0, 1, 1, 0]), {"macro_auc": "rows of every class"}),
    ],
)
def test_what_is_not_defined_is_none_unless_it_is_chosen(
    head: TaskHead, targets: Tensor, undefined: Mapping[str, str]
) -> None:
    """None beside a chosen metric that is; as the chosen one, a line that says what is missing."""
    outputs = torch.randn(4, head.outputs, generator=torch.Generator().manual_seed(1))
    for metric in TASK_METRICS[head.task]:
        chosen = dataclasses.replace(head, chosen=metric.name)
        needs = undefined.get(metric.name)
        if needs is None:
            found = chosen.metrics(outputs, targets)
            assert {name for name, value in found.items() if value is None} == set(undefined)
            assert next(iter(found)) == metric.name
            assert chosen.metric(outputs, targets) == chosen.headline(found)
        else:
            for measure in (chosen.metric, chosen.metrics):
                with pytest.raises(DataError, match=f"^{metric.name} is not defined.*{needs};"):
                    measure(outputs, targets)


@pytest.mark.parametrize("head", [REGRESSION, BINARY, THREE])
def test_a_metric_of_no_rows_is_refused(head: TaskHead) -> None:
    """An empty split is an error, not NaN."""
    targets = torch.zeros(0, dtype=torch.int64 if head is THREE else torch.float32)
    with pytest.raises(DataError, match="not defined for the 0 given rows"):
        head.metric(torch.zeros(0, head.outputs), targets)


@pytest.mark.parametrize("head", [REGRESSION, BINARY, THREE])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_end_in_one_line(head: TaskHead, value: float) -> None:
    """They never make a best epoch, and no figure in a file."""
    targets = torch.tensor([0, 1, 2]) if head is THREE else torch.tensor([0.0, 1.0, 1.0])
    outputs = torch.full((3, head.outputs), value)

    assert math.isnan(head.metric(outputs, targets))
    with pytest.raises(DataError, match="outputs are not finite; training has diverged"):
        head.metrics(outputs, targets)


@pytest.mark.parametrize(
    ("task", "metric", "names"),
    [
        ("regression", "auc", "rmse, mae, r2"),
        ("binary", "macro_f1", "auc, average_precision, recall_at_top, lift_at_top, accuracy"),
        ("multiclass", "auc", "accuracy, macro_f1, macro_auc"),
        ("binary", "AUC", "auc, average_precision"),
    ],
)
def test_a_metric_of_another_task_is_refused(task: str, metric: str, names: str) -> None:
    """The message has those that there are."""
    with pytest.raises(ConfigError, match=f"a {task} task has {names}.*; got '{metric}'"):
        TaskHead(task=task, num_classes=3, chosen=metric)


def test_early_stopping_goes_by_the_chosen_metric() -> None:
    """AUC and accuracy disagree: which of them is chosen decides the epoch, and so the model.

    Ordering is learnt in a few steps and the threshold later: training rows of the second class
    are rare, so that at first all rows are taken for the first one.
    """
    generator = torch.Generator().manual_seed(2)
    targets = (torch.rand(400, generator=generator) < 0.2).float()
    inputs = torch.randn(400, 6, generator=generator) + 0.8 * targets[:, None]
    parts = {"train": slice(0, 200), "validation": slice(200, 300), "test": slice(300, 400)}
    rows = {name: torch.arange(400)[part] for name, part in parts.items()}
    found = {}
    for chosen in ("auc", "accuracy"):
        head = TaskHead(task="binary", chosen=chosen)
        config = BaselineConfig(epochs=40, patience=40, batch_size=50)
        found[chosen], _ = fit_table(inputs, targets, head=head, config=config, seed=0, **rows)
    auc, accuracy = found["auc"], found["accuracy"]

    assert auc.best_epoch != accuracy.best_epoch
    assert auc.validation_metrics["auc"] > accuracy.validation_metrics["auc"]
    assert accuracy.validation_metrics["accuracy"] > auc.validation_metrics["accuracy"]
    assert accuracy.validation == accuracy.validation_metrics["accuracy"]
    assert auc.test == auc.test_metrics["auc"]
    assert accuracy.test == accuracy.test_metrics["accuracy"]


def test_a_function_of_an_installed_package_is_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands beside the others, and training may go by it; its intervals are of draws."""
    (tmp_path / "own_metric.py").write_text(
        "def cost(labels, chances):\n"
        "    return float(abs(labels - chances).mean())\n\n\n"
        "cost.higher_is_better = False\n"
    )
    register(tmp_path, "own-metric", {GROUP: {"cost": "own_metric:cost"}})
    monkeypatch.syspath_prepend(tmp_path)
    _installed_metrics.cache_clear()
    try:
        outputs, targets = odds(0.9, 0.8, 0.3), torch.tensor([1.0, 0.0, 1.0])
        head = dataclasses.replace(BINARY, chosen="cost")
        found = evaluate(outputs, targets, head, classes=(0, 1), threshold=0.5, seed=0)
        assert next(iter(found.metrics)) == "cost"
        assert found.metrics["cost"] == pytest.approx((0.1 + 0.8 + 0.7) / 3)
        low, high = found.intervals["cost"] or (0.0, 0.0)
        assert 0.1 < low < found.metrics["cost"] < high < 0.8
        assert not head.higher_is_better
        assert "cost" not in REGRESSION.metrics(outputs, targets)
    finally:
        _installed_metrics.cache_clear()
