"""The command ``compare``: its output, its files, Ctrl-C, and what it refuses."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import securevfl

from securevfl.lab.one_run import Run
from securevfl.lab.study_commands import StudyProgress
from securevfl.testing import write_federation

Capture = pytest.CaptureFixture[str]
SMALL = {
    "rows": 60,
    "training": {"epochs": 1, "batch_size": 32},
    "methods": {"solo": {"epochs": 2}},
}
FILES = ("comparison.json", "comparison.csv", "comparison.md", "comparison.svg")


def test_json_and_files(tmp_path: Path, capfd: Capture) -> None:
    """One JSON object on stdout, the same in the folder; a plot; the table, the next time."""
    path, out = write_federation(tmp_path, **SMALL), tmp_path / "out"
    command = ("lab", "compare", path, "--methods", "solo, fet", "--seeds", 2, "--out", out)
    ended = securevfl(capfd, *command, "--json")
    assert ended.code == 0
    answer = json.loads(ended.out)
    assert answer["metric"] == "accuracy"
    assert set(answer["methods"]) == {"solo", "fet"}
    for method in answer["methods"].values():
        assert set(method) >= {"mean", "std", "seeds"}
        assert len(method["seeds"]) == 2
    assert json.loads((out / "comparison.json").read_text()) == answer
    for name in FILES:
        assert (out / name).stat().st_size > 0
    assert (out / "comparison.svg").read_text().count("<svg") == 1
    assert "done 4/4" in ended.err
    shown = securevfl(capfd, *command)
    assert shown.code == 0
    assert "minus fet" in shown.out
    assert f"{answer['methods']['fet']['mean']:.4f}" in shown.out
    assert answer["chosen_by"] == "accuracy"
    by_f1 = securevfl(capfd, *command, "--metric", "macro_f1")
    assert (by_f1.code, "done 4/4" in by_f1.err) == (0, True)
    assert "test macro_f1" in by_f1.out
    compared = json.loads((out / "comparison.json").read_text())
    for name, method in answer["methods"].items():
        assert compared["methods"][name]["seeds"] == method["metrics"]["macro_f1"]["seeds"]
    ran = tomllib.loads((out / "runs/fet/seed-4/federation.toml").read_text())
    assert ran["federation"]["seed"] == 4
    report = securevfl(capfd, "report", out / "runs/fet/seed-4")
    assert (report.code, report.err) == (0, "")


def test_interrupted(tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says what is kept and how to go on; the same command then does."""
    path, out = write_federation(tmp_path, **SMALL), tmp_path / "out"
    command = ("lab", "compare", path, "--methods", "solo,fet", "--seeds", 1, "--out", out)

    def stop(self: StudyProgress, run: Run, event: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StudyProgress, "__call__", stop)
        ended = securevfl(capfd, *command)
    assert ended.code == 130
    assert f"1 of 2 runs are kept in {out}; the same command resumes from there" in ended.err
    assert ended.err.splitlines()[-1] == "securevfl: interrupted"
    assert securevfl(capfd, *command).code == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--methods", "fet,fedsym"), ["method 'fedsym'", "there are 'alone', 'solo'", "'fet'"]),
        (("--methods", ""), ["methods: name at least one"]),
        (("--methods", "fet", "--metric", "auc"), ["metric: a multiclass task has accuracy"]),
        (("--methods", "fet", "--seeds", "0"), ["--seeds: must be at least 1, got 0"]),
        (("--methods", "fet", "--jobs", "-1"), ["jobs: must be at least 1, got -1"]),
        (("--methods", "fet,fet"), ["'fet' is named twice"]),
        (
            ("--methods", "combine"),
            ["no method could be trained: combine skipped: needs linkage.truth"],
        ),
        (("--methods", "fet", "--device", "gpu"), ["gpu"]),
        (("--methods", "fet", "--data-root", "/nowhere"), ["/nowhere/agency.csv"]),
    ],
)
def test_wrong_input_is_one_line(
    arguments: tuple[str, ...], parts: list[str], tmp_path: Path, capfd: Capture
) -> None:
    """Exit code 2, before anything trains."""
    path = write_federation(tmp_path, **SMALL)
    ended = securevfl(capfd, "lab", "compare", path, "--out", tmp_path / "out", *arguments)
    assert ended.code == 2
    for part in parts:
        assert part in ended.complaint
    assert not (tmp_path / "out" / "runs").exists()
