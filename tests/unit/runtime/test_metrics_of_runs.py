"""Every metric of a task in a run's files and on its screen, and which one training goes by."""

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import securevfl

from securevfl import RunResult, read_federation
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.formatting import format_figure
from securevfl.federation.run_plan import run_facts
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import read_tables, write_federation

Capture = pytest.CaptureFixture[str]
BINARY = ("auc", "average_precision", "recall_at_top", "lift_at_top", "accuracy", "f1", "log_loss")
BINARY += ("balanced_accuracy", "brier", "ece")


def binary(folder: Path, *, share: float, rows: int = 240, **sections: Any) -> Path:
    """Write a federation whose label is one for a share of the rows, those of the highest x0."""
    sections["federation"] = {"task": "binary", **sections.get("federation", {})}
    path = write_federation(folder, rows=rows, secondaries=1, **sections)
    table = pd.read_csv(folder / "agency.csv")
    table["y"] = (table["x0"] > table["x0"].quantile(1 - share)).astype(int)
    table.to_csv(folder / "agency.csv", index=False)
    return path


def run(path: Path, out: Path, **options: Any) -> RunResult:
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    return simulate_federation(config, tables, RunOptions(run_folder=out), **options)


@pytest.mark.pictures
def test_all_of_them_are_in_files_and_on_the_screen(tmp_path: Path, capfd: Capture) -> None:
    """The chosen one first, as the headline; of test and validation rows, and of alone."""
    training = {"metric": "f1", "epochs": 3}
    path, out = binary(tmp_path, share=0.4, training=training), tmp_path / "run"
    ended = securevfl(capfd, "simulate", path, "--out", out)

    assert ended.code == 0, ended.err
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["metric"], metrics["higher_is_better"]) == ("f1", True)
    alone = metrics["alone"]
    measured = {
        "validation": metrics["validation_metrics"],
        "test": metrics["test_metrics"],
        "alone_test": alone["metrics"],
    }
    for part, figures in measured.items():
        assert tuple(figures) == ("f1", *(name for name in BINARY if name != "f1"))
        assert metrics[part] == figures["f1"]
        for value in figures.values():
            assert format_figure(value) in ended.out
            assert format_figure(value) in (out / "report.html").read_text()
    assert "best epoch by validation f1" in ended.out
    assert set(alone["candidates"]) >= {"linear", "boosting", "network"}
    assert alone["candidates"][alone["chosen"]]["test"] == metrics["alone_test"]
    gain, page = metrics["gain"], (out / "report.html").read_text()
    assert gain["value"] == pytest.approx(metrics["test"] - metrics["alone_test"])
    assert gain["interval"][0] <= gain["value"] <= gain["interval"][1]
    assert (gain["metric"], gain["used"]) == ("f1", "joint")
    assert f"verdict: {gain['verdict']}" in " ".join(ended.out.split())
    assert f"Worth it? {gain['verdict'][0].upper()}{gain['verdict'][1:]}." in page
    assert f"({alone['chosen']})" in ended.out
    assert f"{alone['chosen']} (local, chosen)" in page
    assert set(metrics["placebos"]) == {"own", "permuted"}
    for placebo in metrics["placebos"].values():
        assert format_figure(placebo["f1"]) in ended.out
        assert format_figure(placebo["f1"]) in page
    best = max(placebo["f1"] for placebo in metrics["placebos"].values())
    assert gain["partners"] == pytest.approx(metrics["test"] - best)
    with (out / "history.csv").open(newline="") as file:
        best = list(csv.DictReader(file))[metrics["best_epoch"] - 1]
    for name in BINARY:
        assert float(best[f"validation_{name}"]) == metrics["validation_metrics"][name]
    assert best["validation"] == best["validation_f1"]


def test_a_threshold_is_chosen_on_validation_rows_and_said(tmp_path: Path, capfd: Capture) -> None:
    """By the rule, for this model; test rows are judged by it, the report shows the mistakes."""
    training = {"threshold": "youden", "metric": "balanced_accuracy", "epochs": 2}
    path, out = binary(tmp_path, share=0.2, training=training), tmp_path / "run"
    ended = securevfl(capfd, "simulate", path, "--out", out, "--json")
    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)
    evaluation = metrics["evaluation"]

    assert evaluation["threshold"]["rule"] == "youden"
    assert 0 < evaluation["threshold"]["value"] < 0.5
    counts = np.array(evaluation["confusion"]["counts"])
    recalls = np.diag(counts) / counts.sum(axis=1)
    assert metrics["test_metrics"]["balanced_accuracy"] == pytest.approx(recalls.mean())
    assert counts.sum() == evaluation["rows"] == sum(b["rows"] for b in evaluation["calibration"])
    # Without it, next to no row is taken for one of the rare class.
    assert metrics["validation"] > 0.6
    for name, (low, high) in evaluation["intervals"].items():
        assert low <= high, name
    low, high = evaluation["intervals"]["auc"]
    assert low < metrics["test_metrics"]["auc"] < high
    page = (out / "report.html").read_text()
    assert "Positive class: " in page
    assert f"{low:.4f} to {high:.4f}" in page
    assert "confusion matrix" in page
    assert "calibration (dashes" in page


@pytest.mark.parametrize(
    ("task", "threshold", "complaint"),
    [
        ("multiclass", 0.4, "training.threshold: divides two classes"),
        ("binary", 1, r"training.threshold must lie in \(0, 1\), got 1"),
        ("binary", "yuden", r"training.threshold: must be .*'youden'.* got 'yuden'"),
    ],
)
def test_thresholds_that_are_refused(
    task: str, threshold: float | str, complaint: str, tmp_path: Path
) -> None:
    """Before any table is read."""
    sections = {"federation": {"task": task}, "training": {"threshold": threshold}}
    with pytest.raises(ConfigError, match=complaint):
        read_federation(write_federation(tmp_path, **sections))


def test_the_chosen_metric_decides_the_epoch(tmp_path: Path) -> None:
    """Few rows are of the second class: ordering them comes first, the threshold much later."""
    found = {}
    for metric in ("auc", "accuracy"):
        training = {"metric": metric, "epochs": 6, "patience": 6, "learning_rate": 1e-3}
        path = binary(tmp_path, share=0.25, training=training)
        found[metric] = run(path, tmp_path / metric, with_alone=False)
        values = [line[f"validation_{metric}"] for line in found[metric].history]
        assert found[metric].metrics["best_epoch"] == 1 + int(np.argmax(values))
    auc, accuracy = found["auc"], found["accuracy"]

    assert auc.losses == accuracy.losses
    assert auc.metrics["best_epoch"] != accuracy.metrics["best_epoch"]
    assert auc.metrics["test_metrics"] != accuracy.metrics["test_metrics"]
    assert auc.metrics["validation_metrics"]["auc"] > accuracy.metrics["validation_metrics"]["auc"]


def seed_without_ones(path: Path) -> int:
    """Return a run seed for which no validation row is of the second class."""
    config = read_federation(path)
    table = read_tables(config, path.parent)["agency"]
    assert table.labels is not None
    for seed in range(1000):
        path = write_seed(path, seed)
        split, _ = run_facts(read_federation(path), table)
        parts = (table.labels[rows].any() for rows in (split.train, split.validation, split.test))
        if tuple(map(bool, parts)) == (True, False, True):
            return seed
    raise AssertionError("no such seed")


def write_seed(path: Path, seed: int) -> Path:
    text = path.read_text(encoding="utf-8")
    (old,) = (line for line in text.splitlines() if line.startswith("seed = "))
    path.write_text(text.replace(old, f"seed = {seed}"), encoding="utf-8")
    return path


def test_a_split_of_one_class(tmp_path: Path, capfd: Capture) -> None:
    """What it does not define is null, if something else was chosen; else the run is refused.

    It is refused before any row is released: there is no ledger yet.
    """
    privacy = {"encoder": "trained", "noise_multiplier": 5.0, "delta": 1e-4}
    training = {"epochs": 1, "split": "random"}
    chosen = {**training, "metric": "accuracy"}
    sections: dict[str, Any] = {"privacy": privacy, "training": chosen, "rows": 60}
    path = binary(tmp_path, share=0.1, **sections)
    seed = seed_without_ones(path)
    ended = securevfl(capfd, "simulate", path, "--out", tmp_path / "accuracy")
    assert ended.code == 0, ended.err
    assert "undefined" in ended.out
    metrics = json.loads((tmp_path / "accuracy" / "metrics.json").read_text())
    assert metrics["validation_metrics"]["auc"] is None
    assert metrics["validation_metrics"]["f1"] is None
    assert np.isfinite(metrics["validation_metrics"]["log_loss"])
    assert metrics["test_metrics"]["auc"] is not None

    sections = {**sections, "training": training, "federation": {"seed": seed}}
    path = binary(tmp_path, share=0.1, **sections)
    with pytest.raises(DataError, match=r"6 of 60 .* for validation, where auc needs rows of both"):
        run(path, tmp_path / "auc")
    assert not list(tmp_path.glob("auc/parties/*/ledger.jsonl"))


@pytest.mark.parametrize("metric", ["accuracy", "AUC"])
def test_a_metric_that_does_not_go_with_the_task(metric: str, tmp_path: Path) -> None:
    """One line with the setting and what there is, before any table is read."""
    sections = {"federation": {"task": "regression"}, "training": {"metric": metric}}
    path = write_federation(tmp_path, **sections)
    (tmp_path / "agency.csv").unlink()
    with pytest.raises(ConfigError, match=f"training.metric: .* rmse, mae, r2; got '{metric}'"):
        read_federation(path)


def test_methods_of_a_comparison_share_the_metric(tmp_path: Path) -> None:
    """Two best epochs by two metrics would not be compared by one."""
    # Registers the section, as commands that read it do.
    importlib.import_module("securevfl.lab.methods")
    path = write_federation(tmp_path, methods={"fet": {"metric": "macro_f1"}})
    with pytest.raises(
        ConfigError, match=r"must be the same for all methods; set training\.metric"
    ):
        read_federation(path)


def test_figures_of_an_earlier_version_are_refused_in_a_line(
    tmp_path: Path, capfd: Capture
) -> None:
    """They lack what is printed: no traceback, for a report and for a run that is finished."""
    path, out = write_federation(tmp_path, rows=60, training={"epochs": 1}), tmp_path / "run"
    assert securevfl(capfd, "simulate", path, "--out", out).code == 0
    figures = json.loads((out / "metrics.json").read_text())
    del figures["test_metrics"]
    (out / "metrics.json").write_text(json.dumps(figures))
    for command in (("report", out), ("simulate", path, "--out", out, "--resume")):
        ended = securevfl(capfd, *command)
        assert ended.code == 2
        assert "metrics.json: has no 'test_metrics'" in ended.complaint
