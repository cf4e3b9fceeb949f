"""``lab compare --set``: its output, its files, Ctrl-C, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import securevfl

from securevfl.lab.one_run import Run
from securevfl.lab.study_commands import StudyProgress
from securevfl.testing import write_federation

pytestmark = pytest.mark.pictures

Capture = pytest.CaptureFixture[str]
SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 1, "batch_size": 32},
}


def test_table_json_and_files(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off, gone on with; one JSON object, the same in the folder; a plot; the table."""
    path, out = write_federation(tmp_path, **SMALL), tmp_path / "out"
    command = ("lab", "compare", path, "--set", "model.neighbours=1,40")
    command = (*command, "--set", "model.hidden=4,8", "--seeds", 1, "--out", out)

    def stop(self: StudyProgress, run: Run, event: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StudyProgress, "__call__", stop)
        ended = securevfl(capfd, *command)
    assert ended.code == 130
    assert f"1 of 5 runs are kept in {out}; the same command resumes from there" in ended.err
    ended = securevfl(capfd, *command, "--json")
    assert (ended.code, "done 5/5" in ended.err) == (0, True)
    answer = json.loads(ended.out)
    assert json.loads((out / "comparison.json").read_text()) == answer
    plot = (out / "comparison.svg").read_text()
    for text in ("model.neighbours=40,model.hidden=4", "alone"):
        assert text in plot
    shown = securevfl(capfd, *command)
    assert shown.code == 0
    for text in ("alone", "validation", "best on validation rows: model.neighbours="):
        assert text in shown.out
    best = answer["methods"][answer["best"]]
    assert f"with {best['validation']:.4f} there and {best['mean']:.4f} on test rows" in " ".join(
        shown.out.split()
    )
    tried = [one for one in answer["methods"].values() if "settings" in one]
    assert best["validation"] == max(one["validation"] for one in tried)
    assert "released nothing" not in shown.out


def test_runs_with_a_promise_say_what_it_does_not_cover(tmp_path: Path, capfd: Capture) -> None:
    """Epsilon stands in the names; that a choice is a function of the tables, beneath it."""
    privacy = {
        "mechanism": "gaussian",
        "encoder": "frozen",
        "unit": "linked-row",
        "delta": 1e-5,
        "epsilon": 8.0,
    }
    bounds = {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    path = write_federation(tmp_path, **SMALL, privacy=privacy)
    text = path.read_text().replace(
        'data = "bank-1.csv"',
        f'data = "bank-1.csv"\nscaling = "bounds"\nbounds = {bounds["bounds"]}',
    )
    path.write_text(text)
    ended = securevfl(
        *(capfd, "lab", "compare", path, "--set", "privacy.epsilon=4.0,8.0", "--seeds", 1),
        *("--out", tmp_path / "out"),
    )
    assert ended.code == 0, ended.err
    assert "epsilon" in ended.out
    said = " ".join(ended.out.split())
    assert "they released nothing to anyone, and no ledger is charged" in said
    assert "a function of them, and no epsilon counts that" in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--set", "model.neighbours=1,0"), ["with model.neighbours=0", "at least 1, got 0"]),
        (("--set", "neighbours=1"), ["'neighbours': is no setting"]),
        (("--set", "model.hidden=8", "--jobs", "0"), ["jobs: must be at least 1, got 0"]),
        (("--set", "model.hidden=8", "--metric", "auc"), ["a multiclass task has accuracy"]),
        (("--set", "model.hidden=8", "--data-root", "/nowhere"), ["/nowhere/agency.csv"]),
    ],
)
def test_wrong_input_is_one_line(
    arguments: tuple[str, ...],
    parts: list[str],
    tmp_path: Path,
    capfd: Capture,
) -> None:
    """Exit code 2, before anything trains."""
    path = write_federation(tmp_path, **SMALL)
    ended = securevfl(capfd, "lab", "compare", path, "--out", tmp_path / "out", *arguments)
    assert ended.code == 2
    for part in parts:
        assert part in ended.complaint
    assert not (tmp_path / "out").exists()
