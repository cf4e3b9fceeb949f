"""Runs whose scores leave behind a Laplace noise that all secondaries make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.class_means import write_class_means
from helpers.command_line import securevfl

import securevfl as sv
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.desk.report.verify import verify_run
from securevfl.dp.events import LaplaceRelease
from securevfl.dp.laplace import GRID, share_variance
from securevfl.dp.symbols import SymbolPlan
from securevfl.federation.build import noise_of
from securevfl.federation.run_plan import (
    RunFacts,
    RunPlan,
    plan_prediction,
    plan_run,
    prediction_facts,
)

SECONDARIES = 4
PROMISE = {"epsilon": 2.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1}
FACTS = RunFacts(rows=120, train_rows=84, validation_rows=12, test_rows=24)


def write_laplace(folder: Path, **privacy: Any) -> Path:
    """Write a federation of a number, whose scores leave behind Laplace noise."""
    return write_class_means(
        folder,
        labels="plaintext",
        dealer=False,
        secondaries=SECONDARIES,
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
        federation={"task": "regression"},
        model={"hidden": 1},
        privacy={**PROMISE, **privacy},
    )


def planned(path: Path) -> RunPlan:
    plan = plan_run(read_federation(path), FACTS)
    assert plan.releases.laplace is not None
    return plan


def require_shares(plan: RunPlan, *, honest: int) -> None:
    """Check that what a secondary draws is the share of so many, in whole grid units."""
    scale = plan.noise_share_std * GRID
    assert isinstance(plan.releases.release(scale, rounds=1, row_releases=1), LaplaceRelease)
    noise = noise_of(plan)
    assert noise is not None
    grid_unit = plan.cut.grid_step / plan.cut.ring.granularity
    assert noise.std_units == pytest.approx(grid_unit * share_variance(scale, honest) ** 0.5)
    assert (noise.sample((500,)) % grid_unit == 0).all()


def released(run: Path, root: Path) -> np.ndarray:
    """Return what the primary learned, in grid units of the sum."""
    shown = sv.features(run, data_root=root).filter(like="score").to_numpy(dtype=float)
    return shown * SECONDARIES / planned(root / "fed.toml").cut.grid_step


def test_a_run_releases_whole_steps_and_predicts(tmp_path: Path) -> None:
    """Nothing between grid units, where a record could hide from the noise; and it is said."""
    path = write_laplace(tmp_path)
    sv.simulate(path, out=tmp_path / "run")

    steps = released(tmp_path / "run", tmp_path)
    assert steps.shape == (120, 1)
    assert steps == pytest.approx(np.round(steps), abs=1e-3)
    assert len(np.unique(np.round(steps))) > 10
    figures = json.loads((tmp_path / "run/metrics.json").read_text())["privacy"]
    assert figures["epsilon"] <= 2.0
    assert figures["cells"] is figures["sensitivity"] is figures["noise_multiplier"] is None
    assert "Laplace noise reaches this limit for half of the records" in figures["statement"]
    assert all(check.good is not False for check in verify_run(tmp_path / "run"))

    rows = pd.read_csv(tmp_path / "agency.csv").head(9)
    predicted = sv.predict(tmp_path / "run", rows, data_root=tmp_path)
    assert len(predicted) == 9


def test_check_says_whose_noise_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_laplace(tmp_path)
    checked = securevfl(capfd, "check", path, "--data-root", tmp_path, "--long")
    said = " ".join((checked.out + checked.err).split())
    assert "noise: each secondary adds its share of one Laplace noise to every number" in said
    assert "times a record's largest number for its scale; epsilon = 2" in said
    assert "Laplace noise reaches this limit" in said


def test_a_plan_counts_those_who_do_not_collude_and_those_who_answer(tmp_path: Path) -> None:
    """Shares are larger with colluders and, in a request, with fewer secondaries."""
    path = write_laplace(tmp_path, colluding=1)
    plan = planned(path)
    assert plan.releases.honest == SECONDARIES - 1
    require_shares(plan, honest=SECONDARIES - 1)
    some = plan_prediction(
        plan.config,
        prediction_facts(rows=9, predicted_rows=9, active=(1, 2)),
        noise_share_std=plan.noise_share_std,
    )
    assert some.releases.laplace == plan.releases.laplace
    require_shares(some, honest=1)
    assert some.cut.ring == plan.cut.ring
    assert 0 < plan.surviving < planned(write_laplace(tmp_path)).surviving < 1
    many = plan_run(
        plan.config, RunFacts(rows=9000, train_rows=6000, validation_rows=1000, test_rows=2000)
    )
    assert many.releases.laplace == plan.releases.laplace


def test_symbols_stay_where_more_survives_of_them(tmp_path: Path) -> None:
    """With the same four secondaries at epsilon 8, and where all but one may collude."""
    for changed in ({"epsilon": 8.0}, {"colluding": 3}):
        plan = plan_run(read_federation(write_laplace(tmp_path, **changed)), FACTS)
        assert isinstance(plan.releases.symbols, SymbolPlan)
        assert plan.releases.laplace is None
        assert plan.cut.grid_step == plan.cut.noise_tail == 0


def test_a_sum_beyond_the_ends_of_all_noise_is_refused(tmp_path: Path) -> None:
    """No honest secondaries can have made it; one at the ends is taken."""
    cut = planned(write_laplace(tmp_path)).cut
    most, names = cut.ring.bound_units, ("a", "b", "c", "d")
    units = torch.full((1, 1, 1), most, dtype=torch.int32)
    longest = cut.encode(units) * SECONDARIES
    average = cut.decode(longest, rows=1, active=names, round_number=1)
    assert float(average) == most * cut.ring.granularity
    assert most * cut.ring.granularity == cut.noise_tail + GRID * cut.grid_step
    assert cut.longest_sum(SECONDARIES) >= most * SECONDARIES
    with pytest.raises(ProtocolError):
        cut.decode(longest + 1, rows=1, active=names, round_number=1)


def test_grid_units_are_powers_of_two_below_the_clip(tmp_path: Path) -> None:
    """So that floats hold them exactly, and clipping scales none; too small a clip is refused."""
    for clip_norm in (0.03, 0.7, 1.0, 37.0):
        cut = planned(write_laplace(tmp_path, clip_norm=clip_norm)).cut
        assert np.log2(cut.grid_step) == round(np.log2(cut.grid_step))
        longest = cut.grid_step * GRID
        assert clip_norm * (1 - 2**-16) / 2 < longest <= clip_norm * (1 - 2**-17)
        assert cut.grid_step >= cut.ring.granularity
    with pytest.raises(ConfigError, match="precision_bits"):
        planned(write_laplace(tmp_path, clip_norm=1e-6))


@pytest.mark.multiprocess
def test_processes_release_what_a_simulation_does(tmp_path: Path) -> None:
    """The same promise, whole steps, and much the same sums, behind fresh noise in each."""
    path = write_laplace(tmp_path)
    sv.simulate(path, out=tmp_path / "simulated")
    sv.train(path, out=tmp_path / "federated", data_root=tmp_path)

    figures = [
        json.loads((tmp_path / run / "metrics.json").read_text())["privacy"]
        for run in ("simulated", "federated")
    ]
    for name in ("epsilon", "noise_share_std", "row_releases", "statement"):
        assert figures[0][name] == figures[1][name]
    first, second = (released(tmp_path / run, tmp_path) for run in ("simulated", "federated"))
    assert second == pytest.approx(np.round(second), abs=1e-3)
    assert np.abs(second).max() < 40 * GRID
    assert (np.round(first) != np.round(second)).mean() > 0.5
    assert all(check.good is not False for check in verify_run(tmp_path / "federated"))
