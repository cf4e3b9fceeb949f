"""What a run says of itself: its rounds, its figures and its channels."""

import csv
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.federation.messages import RoundPlan
from securevfl.federation.run_plan import RoundCounter, RunFacts, plan_run
from securevfl.ledger.ledger import Ledger
from securevfl.runtime.run_folder import HISTORY_FIELDS, privacy_figures, write_history
from securevfl.runtime.run_folder import write_federation as write_file
from securevfl.testing import save_federation, write_federation

FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12)
NOISED = {"noise_multiplier": 1.0, "delta": 1e-4, "encoder": "trained"}


def config_of(folder: Path, **sections) -> FederationConfig:
    return read_federation(write_federation(folder, rows=60, **sections))


def test_history_is_a_row_an_epoch(tmp_path: Path) -> None:
    """Known figures in fixed order, unknown ones left out, missing ones empty."""
    rows = [{"epoch": 1, "loss": 0.5, "more": 3}, {"epoch": 2, "loss": 0.25, "epsilon": 1.5}]
    write_history(tmp_path, rows)
    with (tmp_path / "history.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == HISTORY_FIELDS
    assert [row["loss"] for row in read] == ["0.5", "0.25"]
    assert [row["epsilon"] for row in read] == ["", "1.5"]


def test_federation_file_is_the_one_that_ran(tmp_path: Path) -> None:
    """The run's copy has the same hash as the file that was read."""
    config = config_of(tmp_path)
    write_file(tmp_path / "run", config)
    assert read_federation(tmp_path / "run" / "federation.toml").digest == config.digest


def test_figures_count_every_session_of_the_run(tmp_path: Path) -> None:
    """What an interrupted session released stays spent in the figures of the one that finishes."""
    config = config_of(tmp_path, privacy=NOISED)
    plan = plan_run(config, FACTS)
    path, tau = tmp_path / "ledger.jsonl", plan.noise_share_std
    for rounds in (3, 2):
        ledger = Ledger(path, party="agency", plan=plan.releases, noise_share_std=tau, run="one")
        for number in range(1, rounds + 1):
            rows = np.arange(10 * number, 10 * number + 10)
            ledger.charge(round_number=number, rows=rows, purpose="train")
        figures = privacy_figures(plan, ledger).as_json()
        spent = ledger.epsilon_spent
        ledger.close()
    assert (figures["releases"], figures["row_releases"]) == (5, 50)
    assert figures["epsilon"] == figures["total_epsilon"] == spent
    assert figures["table_runs"] == 1
    assert figures["epsilon"] > plan.releases.epsilon_after(tau, rounds=3, row_releases=30)
    json.dumps(figures, allow_nan=False)


def test_what_a_resumed_run_repeats_is_in_its_statement(tmp_path: Path) -> None:
    """Rounds made twice are paid for twice, within the plan; a table's total is told with it."""
    config = config_of(tmp_path, privacy={**NOISED, "noise_multiplier": 100.0})
    plan = plan_run(config, FACTS)
    path, tau = tmp_path / "ledger.jsonl", plan.noise_share_std
    for run in ("one", "one", "two"):
        ledger = Ledger(path, party="agency", plan=plan.releases, noise_share_std=tau, run=run)
        ledger.charge(round_number=1, rows=np.arange(32), purpose="train")
        figures = privacy_figures(plan, ledger)
        ledger.close()
        if run == "one":
            once, repeated = figures if ledger.rounds == 1 else once, figures
    assert None not in (repeated.epsilon, repeated.epsilon_planned, figures.total_epsilon)
    assert once.epsilon < repeated.epsilon < repeated.epsilon_planned
    assert repeated.odds_factor == math.exp(repeated.epsilon_planned)
    assert "all runs on this table together" not in repeated.statement
    assert (once.table_runs, figures.table_runs) == (1, 2)
    assert figures.epsilon == once.epsilon
    assert figures.total_epsilon > repeated.epsilon
    assert "all runs on this table together the factor is" in figures.statement


def test_figures_without_noise_promise_nothing(tmp_path: Path) -> None:
    """No number stands for "no bound"."""
    config = config_of(tmp_path)
    plan = plan_run(config, FACTS)
    ledger = Ledger(None, party="agency", plan=plan.releases, noise_share_std=0.0)
    ledger.charge(round_number=1, rows=np.arange(10), purpose="train")
    figures = privacy_figures(plan, ledger).as_json()
    assert figures["epsilon"] is figures["epsilon_planned"] is None
    assert figures["noise_multiplier"] == 0
    json.dumps(figures, allow_nan=False)


def named(config: FederationConfig) -> dict[str, dict[str, str]]:
    return {row["channel"]: row for row in channels(config)}


def test_channels_say_what_is_not_covered(tmp_path: Path) -> None:
    """Every run lists every channel of docs/privacy.md, section 1, whatever is switched on."""
    trained = named(config_of(tmp_path, privacy=NOISED))
    averaged = named(config_of(tmp_path, model={"average_positions_every": 1}))
    path = write_federation(tmp_path, rows=60, secondaries=1, privacy=FROZEN)
    source = tomllib.loads(path.read_text())
    alone = named(read_federation(save_federation(tmp_path, source)))
    assert set(trained) == set(averaged) == set(alone)
    assert trained["aggregates"]["guarantee"] == "covered by epsilon, unit secondary-record"
    assert averaged["aggregates"]["guarantee"] == "not covered: no noise"
    assert trained["gradients"]["guarantee"] == "not covered"
    assert alone["gradients"]["guarantee"] == "nothing is sent"
    assert "nothing hides it but the noise" in alone["aggregates"]["reveals"]
    encoding = "positional-encoding averaging"
    assert averaged[encoding]["guarantee"].startswith("heuristic")
    assert trained[encoding]["guarantee"] == "nothing is sent"
    assert trained["linkage"]["guarantee"].startswith("not covered")


def test_round_numbers_never_repeat() -> None:
    """They count from 1, one after another."""
    counter = RoundCounter()
    assert [counter.next() for _ in range(4)] == [1, 2, 3, 4]
    assert counter.last == 4


@pytest.mark.parametrize(
    ("purpose", "wanted"),
    [("train", True), ("release", False), ("validation", False), ("test", False)],
)
def test_only_training_wants_a_gradient(purpose, wanted: bool) -> None:
    """Rows of validation and test never teach."""
    rows = np.zeros(1, dtype=np.int64)
    plan = RoundPlan(round_number=1, rows=rows, active=(1,), purpose=purpose)
    assert plan.wants_gradient is wanted
