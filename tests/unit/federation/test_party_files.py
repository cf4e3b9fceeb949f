"""A party's files of a run: which ledger it is charged to, and what the run folder keeps of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.federations import write_federation

from securevfl.config.reading import read_federation
from securevfl.core.errors import BudgetExceededError, ConfigError
from securevfl.federation.run_plan import RunFacts, RunPlan, new_run, plan_run
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.book import Limit
from securevfl.ledger.ledger import set_limit, summary_of

FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12)
NOISED = {"epsilon": 4.0, "delta": 1e-4, "encoder": "trained"}


def planned(folder: Path) -> RunPlan:
    path = write_federation(folder, rows=60, privacy=NOISED)
    return plan_run(read_federation(path), FACTS)


def files_of(plan: RunPlan, folder: Path, table: Path, *, resume: bool = False) -> PartyFiles:
    return PartyFiles(folder, plan.config, party="bank-1", resume=resume, table=table)


def another_run(plan: RunPlan) -> RunPlan:
    return replace(plan, facts=replace(plan.facts, run=new_run()))


def test_every_run_is_charged_to_the_tables_ledger(tmp_path: Path) -> None:
    """From any run folder; each folder gets a copy, to which nothing is charged."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    for count in (1, 2, 3):
        folder = tmp_path / f"run-{count}" / "parties" / "bank-1"
        with files_of(plan, folder, table) as files:
            outlook = files.open_ledger(plan)
            assert outlook.runs_before == count - 1
            files.ledger.charge(round_number=1, rows=np.arange(32), purpose="train")
            assert files.ledger.runs == count
        ledger = tmp_path / "bank-1.csv.ledger.jsonl"
        assert files.run_ledger.read_bytes() == ledger.read_bytes()
        assert files.run_ledger.stat().st_mode & 0o777 == 0o600
        plan = another_run(plan)
    summary = summary_of(ledger)
    assert [run.federation for run in summary.runs] == ["test"] * 3
    assert len({run.run for run in summary.runs}) == 3


def test_a_resumed_run_continues_in_the_tables_ledger(tmp_path: Path) -> None:
    """Its sessions add up in its own epsilon, and are one run of the table."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    folder = tmp_path / "run" / "parties" / "bank-1"
    for resume in (False, True):
        with files_of(plan, folder, table, resume=resume) as files:
            files.open_ledger(plan)
            files.ledger.charge(round_number=1, rows=np.arange(32), purpose="train")
            spent = files.ledger.spent
    (run,) = summary_of(tmp_path / "bank-1.csv.ledger.jsonl").runs
    assert (run.sessions, run.releases, run.epsilon) == (2, 2, spent)


def test_a_limit_is_asked_before_a_fresh_run_begins(tmp_path: Path) -> None:
    """Nothing is charged; the run folder stays free for a run that fits."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    ledger = tmp_path / "bank-1.csv.ledger.jsonl"
    set_limit(ledger, Limit(unit="secondary-record", epsilon=3.0, delta=1e-4))
    folder = tmp_path / "run" / "parties" / "bank-1"
    with (
        files_of(plan, folder, table) as files,
        pytest.raises(BudgetExceededError, match="over the limit of its owner, 3"),
    ):
        files.open_ledger(plan)
    assert '"charge"' not in ledger.read_text()
    set_limit(ledger, Limit(unit="secondary-record", epsilon=4.0, delta=1e-4))
    with files_of(plan, folder, table) as files:
        assert files.open_ledger(plan).limit is not None


def test_two_parties_of_one_table_at_a_time(tmp_path: Path) -> None:
    """Two runs, or two parties of one run: only one of them holds the ledger."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    with files_of(plan, tmp_path / "one", table) as files:
        files.open_ledger(plan)
        with (
            files_of(plan, tmp_path / "two", table) as others,
            pytest.raises(ConfigError, match="in use by another run"),
        ):
            others.open_ledger(another_run(plan))
