"""A party's files of a run: which ledger it is charged to, and what the run folder keeps of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.full_disk import at_most

from securevfl import read_federation
from securevfl.core.errors import BudgetExceededError, ConfigError, StorageError
from securevfl.federation.run_plan import RunFacts, RunPlan, new_run, plan_run
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.book import Limit, ProgramUse
from securevfl.ledger.ledger_file import allow_programs, set_limit, summary_of
from securevfl.testing import write_federation

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
            spent = files.ledger.epsilon_spent
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


USE = ProgramUse(
    run="p" * 32,
    federation="test",
    party="bank-1",
    program="d" * 64,
    peers={"agency": "key 1", "dealer": "key 2"},
    time="2026-11-27T00:00:00+00:00",
)


def program_on(table: Path, plan: RunPlan, folder: Path) -> None:
    """Book a program that reads a table."""
    with files_of(plan, folder, table) as files:
        files.book_program(USE)


def test_a_program_has_no_bound_in_any_unit(tmp_path: Path) -> None:
    """Before it and after it, under every name of the table; a run's own figures stay."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    ledger = tmp_path / "bank-1.csv.ledger.jsonl"
    with files_of(plan, tmp_path / "run", table) as files:
        files.open_ledger(plan)
        spent = files.ledger.charge(round_number=1, rows=np.arange(32), purpose="train")
    (tmp_path / "link.csv").symlink_to(table)
    program_on(tmp_path / "link.csv", plan, tmp_path / "program")
    summary = summary_of(ledger)
    assert summary.programs == (USE,)
    assert [unit.epsilon for unit in summary.units] == [None]
    assert [run.epsilon for run in summary.runs] == [spent]
    plan = another_run(plan)
    with files_of(plan, tmp_path / "run-2", table) as files:
        outlook = files.open_ledger(plan)
        assert outlook.total_before == outlook.total == float("inf")
        assert (outlook.runs_before, files.ledger.runs) == (2, 2)


def test_a_limit_refuses_programs_until_the_owner_allows_them(tmp_path: Path) -> None:
    """Of any unit; what is allowed takes nothing of the limit."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    ledger = tmp_path / "bank-1.csv.ledger.jsonl"
    set_limit(ledger, Limit(unit="secondary-record", epsilon=100.0, delta=1e-4))
    before = ledger.read_bytes()
    with pytest.raises(BudgetExceededError, match="securevfl ledger limit TABLE --programs"):
        program_on(table, plan, tmp_path / "run")
    assert ledger.read_bytes() == before
    allow_programs(ledger, allowed=True)
    program_on(table, plan, tmp_path / "run")
    assert len(summary_of(ledger).programs) == 1
    (unit,) = summary_of(ledger).units
    assert (unit.epsilon, unit.left) == (None, 100.0)
    with files_of(plan, tmp_path / "trained", table) as files:
        files.open_ledger(plan)

    # Refused again, they count for the limit as they count for the total.
    allow_programs(ledger, allowed=False)
    with pytest.raises(BudgetExceededError, match="the owner of this table refuses programs"):
        program_on(table, plan, tmp_path / "run")
    plan = another_run(plan)
    with (
        files_of(plan, tmp_path / "trained-2", table) as files,
        pytest.raises(BudgetExceededError, match=r"inf is spent; a program has read the table"),
    ):
        files.open_ledger(plan)


def test_programs_may_be_refused_without_a_limit(tmp_path: Path) -> None:
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    allow_programs(tmp_path / "bank-1.csv.ledger.jsonl", allowed=False)
    with pytest.raises(BudgetExceededError, match="refuses programs"):
        program_on(table, plan, tmp_path / "run")
    with files_of(plan, tmp_path / "trained", table) as files:
        files.open_ledger(plan)


def test_nothing_is_beside_a_program(tmp_path: Path) -> None:
    """No run, no limit, no second program, while it runs; nor does it begin beside a run."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    ledger = tmp_path / "bank-1.csv.ledger.jsonl"
    with files_of(plan, tmp_path / "program", table) as files:
        files.book_program(USE)
        with pytest.raises(ConfigError, match="in use by another run"):
            program_on(table, plan, tmp_path / "other")
        with pytest.raises(ConfigError, match="in use by another run"):
            set_limit(ledger, Limit(unit="entity", epsilon=1.0, delta=1e-4))
        with (
            files_of(plan, tmp_path / "run", table) as run,
            pytest.raises(ConfigError, match="in use by another run"),
        ):
            run.open_ledger(plan)
    with files_of(plan, tmp_path / "run", table) as run:
        run.open_ledger(plan)
        with pytest.raises(ConfigError, match="in use by another run"):
            program_on(table, plan, tmp_path / "other")


def test_a_program_that_the_disk_does_not_take_is_not_booked(tmp_path: Path) -> None:
    """It must not run then: whoever books it is told."""
    plan, table = planned(tmp_path), tmp_path / "bank-1.csv"
    ledger = tmp_path / "bank-1.csv.ledger.jsonl"
    program_on(table, plan, tmp_path / "first")
    before = ledger.read_bytes()
    with files_of(plan, tmp_path / "run", table) as files:
        files.hold_ledger()
        with at_most(len(before) + 20), pytest.raises(StorageError):
            files.book_program(USE)
    assert ledger.read_bytes() == before


def test_a_table_in_memory_has_its_line_in_the_run_folder(tmp_path: Path) -> None:
    """It has no file that an owner could have limited."""
    plan = planned(tmp_path)
    with PartyFiles(tmp_path / "run", plan.config, party="bank-1", resume=False) as files:
        files.book_program(USE)
    assert summary_of(tmp_path / "run" / "ledger.jsonl").programs == (USE,)
