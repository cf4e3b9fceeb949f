"""Intervals, thresholds, confusion and calibration: by hand, and against what is measured."""

import json
import time
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from sklearn import metrics as sklearn_metrics

from securevfl.core.conventions import Task
from securevfl.models.task_metrics import bootstrap_intervals, resampled_metrics, resamples_for
from securevfl.models.tasks import TaskHead, as_logit, choose_threshold, evaluate


def made_up(task: Task, rows: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs with ties that know something of the targets."""
    random = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        targets = torch.arange(rows) % 4
        outputs = torch.randn(rows, 4, generator=random).round(decimals=1)
        return outputs + 0.8 * torch.eye(4)[targets], targets
    targets = torch.randn(rows, generator=random)
    if task == "binary":
        targets = (targets > 0.4).float()
    noise = torch.randn(rows, 1, generator=random).round(decimals=1)
    return noise + targets[:, None], targets


def by_scikit_learn(
    task: Task, outputs: np.ndarray, targets: np.ndarray, *, cut: float
) -> dict[str, float]:
    """Figures of rows, by other code than ours."""
    if task == "regression":
        predicted = outputs[:, 0]
        return {
            "rmse": sklearn_metrics.root_mean_squared_error(targets, predicted),
            "mae": sklearn_metrics.mean_absolute_error(targets, predicted),
            "r2": sklearn_metrics.r2_score(targets, predicted),
        }
    if task == "binary":
        chance, predicted = expit(outputs[:, 0]), outputs[:, 0] > cut
        return {
            "auc": sklearn_metrics.roc_auc_score(targets, chance),
            "average_precision": sklearn_metrics.average_precision_score(targets, chance),
            "f1": sklearn_metrics.f1_score(targets, predicted),
            "accuracy": sklearn_metrics.accuracy_score(targets, predicted),
            "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(targets, predicted),
            "log_loss": sklearn_metrics.log_loss(targets, chance, labels=[0, 1]),
            "brier": sklearn_metrics.brier_score_loss(targets, chance),
        }
    chances, predicted = softmax(outputs, axis=1), outputs.argmax(axis=1)
    classes, there = range(outputs.shape[1]), np.unique(targets)
    found = {
        "accuracy": sklearn_metrics.accuracy_score(targets, predicted),
        "macro_f1": sklearn_metrics.f1_score(targets, predicted, average="macro"),
        "balanced_accuracy": sklearn_metrics.recall_score(
            targets, predicted, labels=there, average="macro"
        ),
        "log_loss": sklearn_metrics.log_loss(targets, chances, labels=classes),
    }
    if len(there) == len(classes):
        found["macro_auc"] = sklearn_metrics.roc_auc_score(
            targets, chances, average="macro", multi_class="ovr"
        )
    return found


@pytest.mark.parametrize("task", get_args(Task))
def test_a_resample_has_the_metrics_of_the_rows_that_were_drawn(task: Task) -> None:
    """Ours and scikit-learn's on repeated rows, whichever are left out; NaN where it has none."""
    outputs, targets = made_up(task, 60)
    head = TaskHead(task=task, num_classes=4, threshold=0.3 if task == "binary" else "half")
    weights = np.random.default_rng(1).integers(0, 3, size=(5, 60)).astype(np.float64)
    weights[0] = 1
    if task == "multiclass":
        weights[1, targets == 2] = 0
    found = resampled_metrics(
        task,
        outputs.double().numpy(),
        targets.double().numpy().astype(np.int64 if task == "multiclass" else np.float64),
        cut=as_logit(0.3),
    )
    for number, drawn in enumerate(weights):
        rows = torch.as_tensor(np.repeat(np.arange(60), drawn.astype(int)))
        # Means are over all draws of a bootstrap, which are as many as there are rows.
        scaled = drawn[None] * len(drawn) / drawn.sum()
        known = head.metrics(outputs[rows], targets[rows], threshold=0.3)
        theirs = by_scikit_learn(
            task, outputs[rows].double().numpy(), targets[rows].numpy(), cut=as_logit(0.3)
        )
        for name, value in theirs.items():
            assert known[name] == pytest.approx(value, rel=1e-9), (name, number)
        for name, value in known.items():
            again = float(found[name](scaled)[0])
            if value is None:
                assert np.isnan(again), (name, number)
            else:
                assert again == pytest.approx(value, rel=1e-9), (name, number)
        assert set(found) == set(known)


def test_an_interval_is_as_wide_as_theory_says() -> None:
    """Of a share p of n rows: p ± 1.96 sqrt(p (1 - p) / n); in the labels' units for numbers."""
    values = np.zeros(400)
    values[:120] = 1
    low, high = bootstrap_intervals(
        {"share": lambda weights: weights @ values / 400}, rows=400, resamples=1000, seed=0
    )["share"]
    half = 1.96 * np.sqrt(0.3 * 0.7 / 400)
    assert low == pytest.approx(0.3 - half, abs=0.006)
    assert high == pytest.approx(0.3 + half, abs=0.006)
    outputs, targets = made_up("regression", 300)
    metres, miles = (
        evaluate(
            outputs,
            targets,
            TaskHead(task="regression", label_deviation=one),
            classes=None,
            threshold=0.5,
            seed=4,
        )
        for one in (1.0, 1609.344)
    )
    for name, factor in (("rmse", 1609.344), ("r2", 1.0)):
        assert miles.intervals[name] == pytest.approx(
            tuple(factor * end for end in metres.intervals[name])
        )
        assert metres.intervals[name][0] < metres.metrics[name] < metres.intervals[name][1]


def test_what_labels_do_not_define_has_no_interval() -> None:
    """Null beside null; and an area that one single row decides is left out of few draws."""
    head = TaskHead(task="binary", chosen="accuracy")
    outputs = torch.linspace(-1, 1, 30)[:, None]
    none = evaluate(outputs, torch.zeros(30), head, classes=("no", "yes"), threshold=0.5, seed=0)
    assert none.metrics["auc"] is none.intervals["auc"] is None
    assert none.intervals["accuracy"] is not None
    one = torch.zeros(30)
    one[29] = 1
    few = evaluate(outputs, one, head, classes=("no", "yes"), threshold=0.5, seed=0)
    assert few.intervals["auc"] == pytest.approx((1.0, 1.0))
    json.dumps(few.as_json(), allow_nan=False)


def test_confusion_and_calibration_by_hand() -> None:
    """Rows are true classes, columns predicted ones, at the threshold that is named."""
    logits = torch.tensor([[-2.0], [0.1], [1.0], [-0.1], [2.0]])
    targets = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    head = TaskHead(task="binary", threshold="youden")
    found = evaluate(
        logits, targets, head, classes=("paid", "default"), threshold=0.6, seed=0
    ).as_json()
    assert found["confusion"] == {"classes": ["paid", "default"], "counts": [[2, 0], [1, 2]]}
    assert found["threshold"] == {"rule": "youden", "value": 0.6}
    assert found["rows"] == sum(one["rows"] for one in found["calibration"]) == 5
    (last,) = (one for one in found["calibration"] if one["predicted"] > 0.8)
    assert last == {"predicted": pytest.approx(1 / (1 + np.exp(-2))), "observed": 1.0, "rows": 1}

    three = evaluate(
        torch.eye(3)[[0, 2, 2]],
        torch.tensor([0, 1, 2]),
        TaskHead(task="multiclass", num_classes=3),
        classes=("a", "b", "c"),
        threshold=0.5,
        seed=0,
    ).as_json()
    assert three["confusion"]["counts"] == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    assert "threshold" not in three


@pytest.mark.parametrize("rule", ["f1", "youden"])
def test_a_threshold_is_the_best_there_is(rule: str) -> None:
    """Of all cuts between two rows, tried one by one; 0.5 where one class is missing."""
    outputs, targets = made_up("binary", 80, seed=3)
    scores, labels = outputs[:, 0].double().numpy(), targets.numpy()
    scores = scores - 1.3

    def worth(threshold: float) -> float:
        above = scores > as_logit(threshold)
        true, false = above[labels == 1].sum(), above[labels == 0].sum()
        if rule == "f1":
            return 2 * true / (above.sum() + labels.sum())
        return true / (labels == 1).sum() - false / (labels == 0).sum()

    chosen = choose_threshold(rule, scores, labels)
    places = np.unique(scores)
    tried = 1 / (1 + np.exp(-(places[:-1] + places[1:]) / 2))
    assert worth(chosen) == pytest.approx(max(map(worth, tried)))
    assert worth(chosen) > worth(0.5)
    assert choose_threshold(rule, scores, np.zeros(80)) == 0.5
    assert choose_threshold(rule, np.zeros(80), labels) == 0.5
    assert choose_threshold(0.37, scores, labels) == 0.37


def test_ten_thousand_rows_take_well_under_a_second() -> None:
    """In CPU time of this process; a machine that is five times slower passes too."""
    outputs, targets = made_up("binary", 10_000)
    start = time.process_time()
    found = evaluate(
        outputs, targets, TaskHead(task="binary"), classes=("a", "b"), threshold=0.5, seed=0
    )
    assert time.process_time() - start < 5
    assert found.resamples == resamples_for(10_000, 1) == 1000
    assert resamples_for(10**7, 3) == 200


@pytest.mark.parametrize(("positives", "rule"), [(5, "f1"), (40, "half")])
def test_a_rare_class_gets_a_threshold_of_its_own(positives: int, rule: str) -> None:
    """Of 100 rows: at a half, no row of a class of 5 % would ever be predicted."""
    logits = np.linspace(-6, -1, 100)
    targets = (np.arange(100) >= 100 - positives).astype(float)
    chosen = choose_threshold("auto", logits, targets)
    assert chosen == choose_threshold(rule, logits, targets)
    assert (chosen < 0.5) == (rule == "f1")
