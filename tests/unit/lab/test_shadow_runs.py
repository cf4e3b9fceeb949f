"""Shadow runs tell what a model has learned from, where it remembers, and nothing elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from securevfl.core.errors import ConfigError
from securevfl.core.files import read_json
from securevfl.federation.run_plan import run_facts
from securevfl.lab.attacks import attack, shadow_runs
from securevfl.lab.attacks.attack import Evidence
from securevfl.lab.attacks.run_audit import attack_names, audit_run
from securevfl.lab.attacks.shadow_runs import ShadowAnswers, Shadows, true_positive_rate
from securevfl.lab.commands import app
from securevfl.testing import read_tables, run_in_process, write_federation


def seen(shift: float, *, runs: int = 16, rows: int = 400) -> ShadowAnswers:
    """Return confidences that members have so many deviations more of than others."""
    random = np.random.default_rng(0)
    members = random.integers(0, 2, size=(runs, rows))
    # Rows are as hard as they are: without the other runs, that hides who is a member.
    hard = 5 * random.normal(size=rows)
    return ShadowAnswers(
        confidences=hard + shift * members + random.normal(size=(runs, rows)), members=members
    )


@pytest.mark.parametrize(
    ("shift", "area", "at_a_tenth"), [(0.0, 0.50, 0.10), (1.0, 0.73, 0.35), (8.0, 1.0, 1.0)]
)
def test_ratios_tell_members_as_far_as_they_differ(
    shift: float, area: float, at_a_tenth: float
) -> None:
    """One deviation apart the best possible is an AUC of Phi(1 / sqrt(2)) = 0.76, and 0.39."""
    one = seen(shift)
    ratios = one.ratios()
    known = np.isfinite(ratios)
    inside = (one.members == 1)[known]
    assert attack.auc(inside, ratios[known]) == pytest.approx(area, abs=0.02)
    assert true_positive_rate(inside, ratios[known], 0.1) == pytest.approx(at_a_tenth, abs=0.03)
    # The same confidences without the other runs say little, since rows differ so much.
    assert attack.auc(inside, one.confidences[known]) < 0.9


def test_rows_that_are_left_out_or_seldom_seen_have_no_ratio() -> None:
    one = seen(1.0, runs=8)
    one.members[0, :5] = -1
    one.members[:, 7] = 1
    ratios = one.ratios()
    assert np.isnan(ratios[0, :5]).all()
    assert np.isnan(ratios[:, 7]).all()
    assert np.isfinite(ratios[1:, 10]).all()


def recorded(folder: Path) -> Path:
    """Simulate and record a short run; return its folder."""
    path = write_federation(folder, rows=80, training={"epochs": 1})
    run_in_process(path, folder / "run", record_mib=64)
    return folder / "run"


@dataclass(frozen=True, kw_only=True)
class Remembers:
    """A kept model that is sure of the rows whose features it has learned from, and of no other."""

    learned: Any
    linked_to: Any
    tables: Any

    def predict(self, primary: Any) -> Any:
        known = self.linked_to(self.tables, primary)
        sure = np.isin(known, self.learned)
        right = np.where(sure, 0.9, 0.5) + 0.01 * np.random.default_rng(0).random(len(sure))
        classes = len(primary.classes)
        probabilities = np.repeat((1 - right)[:, None] / (classes - 1), classes, axis=1)
        probabilities[np.arange(len(right)), primary.labels] = right
        return SimpleNamespace(probabilities=probabilities)


@pytest.mark.parametrize("unit", ["rows", "records"])
def test_a_model_that_remembers_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    run, name = recorded(tmp_path), f"shadow-{unit}"
    evidence = Evidence(run)
    nearest = evidence.with_links[0].array("links")[:, 0]
    trainings: list[str] = []

    def linked_to(tables: Any, primary: Any) -> Any:
        of_rows = primary.features[:, 0]
        return of_rows if unit == "rows" else tables["bank-1"].features[nearest, 0]

    def simulate(config: Any, tables: Any, options: Any, **_more: Any) -> Any:
        trainings.append(options.run_folder)
        split, _ = run_facts(config, tables["agency"])
        learned = tables["agency"].features[split.train, 0]
        if unit == "records":
            assert tables["agency"].num_rows == 80
            learned = tables["bank-1"].features[:, 0]
        trained = Remembers(learned=learned, linked_to=linked_to, tables=tables)
        return SimpleNamespace(trained=trained)

    monkeypatch.setattr(shadow_runs, "simulate_federation", simulate)
    told: list[str] = []
    tables = read_tables(evidence.config, tmp_path)
    shadows = Shadows(tables=tables, runs=8, tell=told.append)
    area, some, few = audit_run(run, [name], shadows=shadows).findings
    assert [one["value"] for one in (area, some, few)] == [1.0, 1.0, 1.0]
    assert [one["floor"] for one in (area, some, few)] == [0.5, 0.1, 0.01]
    assert all(one["beats_floor"] for one in (area, some, few))
    assert area["about"] == ("agency" if unit == "rows" else "bank-1")
    assert told[-1] == f"{name}: shadow run 8 of 8"
    # Cut off before its end, it trains no run again that is done.
    assert audit_run(run, [name], shadows=shadows).findings[0]["value"] == 1.0
    assert len(trainings) == 8


def test_the_command_trains_on_the_tables_and_predicts_with_all_records(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert not any("shadow" in name for name in attack_names(None))
    assert "--attacks shadow-rows" in audit_run(run, ["shadow-rows"]).not_tried["shadow-rows"]
    command = ["audit", str(run), "--data-root", str(tmp_path), "--shadows", "8"]
    result = CliRunner().invoke(app, [*command, "--attacks", "shadow-records"])
    assert result.exit_code == 0, result.output
    kept = read_json(run / "audit.json")["findings"]
    assert kept[0]["channel"] == "publication of the model"
    assert 0.3 < kept[0]["value"] < 0.7
    with pytest.raises(ConfigError, match="shadows must be at least 8, got 3"):
        Shadows(tables={}, runs=3)
    tables = read_tables(Evidence(run).config, tmp_path)
    other = {**tables, "agency": tables["agency"].take(np.arange(40))}
    with pytest.raises(ConfigError, match="'agency': is not the one that the run was of"):
        audit_run(run, ["shadow-rows"], shadows=Shadows(tables=other, runs=8))
