"""A search chooses by validation rows, shows no other trial's test rows, and goes on."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from securevfl import SecureVflError, read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.progress import EpochDone
from securevfl.lab.entry_points import sweep_and_write
from securevfl.lab.one_run import LeftOut, Run
from securevfl.lab.search import search
from securevfl.lab.study import StudyOptions
from securevfl.lab.study_plots import search_plot
from securevfl.lab.sweep import Sweep
from securevfl.lab.sweep_settings import parse_setting
from securevfl.testing import write_federation

pytest.importorskip("optuna", reason="securevfl[search] is not installed")

SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 1, "batch_size": 32},
}
RANGES = ("model.neighbours=1..9", "training.learning_rate=log:1e-3..1e-1", "seed=3..4")


def asked(folder: Path, *settings: str, out: str = "out", **sections: Any) -> Sweep:
    path = write_federation(folder, **{**SMALL, **sections})
    return Sweep(
        config=read_federation(path),
        tried=tuple(map(parse_setting, settings)),
        data_root=folder,
        folder=folder / out,
    )


def look(sweep: Sweep, trials: int, **heard: Any) -> dict[str, Any]:
    heard = {
        "tell": lambda _run, _event: None,
        "done": lambda _run, _result: None,
        "leave_out": pytest.fail,
        **heard,
    }
    return sweep_and_write(sweep, StudyOptions(**heard), trials=trials)


def test_a_search_that_is_cut_off_ends_as_it_would_have(tmp_path: Path) -> None:
    """The trial that was under way goes on; what it suggests then is what it would have been."""
    once = look(asked(tmp_path, *RANGES, out="once"), 4)
    events: list[Run] = []

    def tell(run: Run, event: object) -> None:
        if isinstance(event, EpochDone):
            events.append(run)
            if len(events) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look(asked(tmp_path, *RANGES), 4, tell=tell)
    two = look(asked(tmp_path, *RANGES), 2)
    assert two["trials"] == once["trials"][:2]
    found = look(asked(tmp_path, *RANGES), 4)
    assert found["trials"] == once["trials"]
    assert found["best"]["test"]["metrics"] == once["best"]["test"]["metrics"]
    trained: list[Run] = []
    again = look(asked(tmp_path, *RANGES), 4, tell=lambda run, _: trained.append(run))
    assert (again, trained) == (found, [])
    assert len({str(trial["settings"]) for trial in found["trials"]}) == 4
    for trial in found["trials"]:
        settings = trial["settings"]
        assert settings["model.neighbours"] in range(1, 10)
        assert 1e-3 <= settings["training.learning_rate"] <= 1e-1
    with pytest.raises(ConfigError, match=r"other settings, ranges.*choose another --out"):
        look(asked(tmp_path, "model.neighbours=1..8"), 4)


def test_test_rows_choose_nothing_and_are_shown_of_the_best_alone(tmp_path: Path) -> None:
    """The best by validation rows, whatever test rows say; no column, no figure of the others."""
    found = look(asked(tmp_path, *RANGES), 5)
    validation = [trial["validation"] for trial in found["trials"]]
    best = found["best"]
    assert best["validation"] == max(validation)
    assert best["number"] == validation.index(max(validation))
    results = {
        path.parent.parent.name: json.loads(path.read_text())
        for path in (tmp_path / "out/runs").rglob("seed-3/result.json")
    }
    assert best["test"]["seeds"][0] == results[best["name"]]["test_metrics"]["accuracy"]
    assert all(set(trial) == {"number", "settings", "validation"} for trial in found["trials"])
    runs = pd.read_csv(tmp_path / "out/search.csv")
    assert [column for column in runs if "test" in column] == []
    assert len(runs) == 2 * 5 + 2
    assert "test" not in (tmp_path / "out" / "search.md").read_text()
    plot = search_plot(found)
    assert plot.count("<svg") == 1
    assert "best so far" in plot


def test_ends_of_ranges_are_checked_before_anything_starts(tmp_path: Path) -> None:
    """And what would change the rows that choose."""
    for settings, complaint in (
        (("model.neighbours=0..9",), "with model.neighbours=0"),
        (("model.hidden=4,8", "training.patience=-1..3"), "with model.hidden=4, training.patience"),
        (("training.validation_fraction=0.1..0.3",), "changes the validation rows"),
        (("seed=0..4",), "name a setting to search"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            look(asked(tmp_path, *settings), 2)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="search: must be at least 1, got 0"):
        look(asked(tmp_path, "model.hidden=4,8"), 0)


def test_trials_that_fail_count_and_the_others_go_on(tmp_path: Path) -> None:
    """Heads that do not divide a width are found when the trial is due."""
    out: list[LeftOut] = []
    sweep = asked(tmp_path, "model.hidden=4,6", "model.heads=2,4", "seed=3")
    found = look(sweep, 8, leave_out=out.append)
    assert len(found["trials"]) == 8
    failed = [trial for trial in found["trials"] if trial["validation"] is None]
    assert {
        (one["settings"]["model.hidden"], one["settings"]["model.heads"]) for one in failed
    } == {(6, 4)}
    assert out
    assert {one.status for one in out} == {"skipped"}
    assert found["left_out"].keys() == {"model.hidden=6,model.heads=4"}
    with pytest.raises(SecureVflError, match="no trial has a figure"):
        search(
            asked(tmp_path, "model.neighbours=61,62", out="other"),
            trials=1,
            options=StudyOptions(leave_out=out.append),
        )
