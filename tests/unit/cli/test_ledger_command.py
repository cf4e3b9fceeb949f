"""``securevfl ledger``: a table's spending shown, and its owner's limit set."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import securevfl

from securevfl.dp import Privacy
from securevfl.dp.labels import LabelRelease
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.released_labels import charge_labels
from securevfl.ledger.book import ProgramUse
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import LedgerFile, ledger_of_table
from securevfl.testing import write_federation

Capture = pytest.CaptureFixture[str]


def table_of(folder: Path) -> Path:
    table = folder / "bank.csv"
    table.write_text("x\n1\n")
    return table


def run_on(table: Path, run: str, labels: LabelRelease | None = None, **privacy) -> float:
    """Charge a small run, and labels, to the table's ledger; return its epsilon."""
    plan = ReleasePlan(
        privacy=Privacy(**{"epsilon": 4.0, **privacy}),
        parties=2,
        min_active=2,
        rounds=2,
        rows_per_round=10,
        row_releases=20,
        releases_per_row=1,
        links=3,
    )
    ledger = Ledger(
        ledger_of_table(table),
        party="bank-1",
        plan=plan,
        noise_share_std=plan.noise_share_std(),
        run=run,
        federation="credit",
    )
    ledger.charge(round_number=1, rows=np.arange(10), purpose="train")
    epsilon = ledger.charge(round_number=2, rows=np.arange(10, 20), purpose="test")
    if labels is not None:
        charge_labels(ledger, labels)
    ledger.close()
    return epsilon


def test_runs_totals_limits_and_head(tmp_path: Path, capfd: Capture) -> None:
    """Every run with its federation, the total of each unit beside its limit, and the head."""
    table = table_of(tmp_path)
    run_on(table, "a" * 32)
    run_on(table, "b" * 32)
    run_on(table, "c" * 32, unit="entity")
    assert securevfl(capfd, "ledger", "limit", table, "--epsilon", 10).code == 0
    shown = securevfl(capfd, "ledger", "show", table)
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)

    assert shown.code == 0
    for words in ("aaaaaaaa", "bbbbbbbb", "credit", "bank-1", "trained"):
        assert words in shown.out
    assert "total of 2 runs (secondary-record): epsilon 5.992, delta 1e-05; " in shown.out
    assert "limit 10" in shown.out
    assert "total of 1 run (entity): epsilon 4, delta 1e-05; no limit" in shown.out
    assert "do not add up" in shown.out
    assert told["head"] in shown.out
    assert told["ledger"] == str(tmp_path / "bank.csv.ledger.jsonl")
    assert [run["epsilon"] for run in told["runs"]] == pytest.approx([4.0] * 3, rel=1e-6)
    assert [run["federation"] for run in told["runs"]] == ["credit"] * 3
    assert {unit["unit"]: unit["limit"] for unit in told["units"]} == {
        "secondary-record": 10.0,
        "entity": None,
    }


def test_a_table_without_a_ledger(tmp_path: Path, capfd: Capture) -> None:
    """It says so, and makes none; a table that is not there is a mistake."""
    table = table_of(tmp_path)
    ended = securevfl(capfd, "ledger", "show", table)
    assert ended.code == 0
    assert "has no ledger; no run has released anything" in ended.out
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)
    assert told == {
        "table": str(table),
        "ledger": None,
        "runs": [],
        "units": [],
        "programs": [],
        "programs_allowed": True,
        "labels": None,
        "head": None,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["bank.csv"]
    gone = securevfl(capfd, "ledger", "show", tmp_path / "bank.cvs")
    assert (gone.code, gone.out) == (2, "")
    assert "bank.cvs: has no ledger (No such file or directory)" in gone.complaint


def test_the_owner_sets_a_limit_raises_it_and_its_history_stays(
    tmp_path: Path, capfd: Capture
) -> None:
    """The newest one of a unit holds; each is a line of the chain."""
    table = table_of(tmp_path)
    first = securevfl(capfd, "ledger", "limit", table, "--epsilon", 3)
    assert "may spend epsilon = 3 at delta = 1e-05 (unit secondary-record)" in first.out
    assert "0 runs have spent 0" in first.out
    securevfl(capfd, "ledger", "limit", table, "--epsilon", 5, "--unit", "entity", "--delta", 1e-6)
    run_on(table, "a" * 32, epsilon=2.0)
    raised = securevfl(capfd, "ledger", "limit", table, "--epsilon", 6.5, "--json")
    told = json.loads(raised.out)
    assert (told["limit"], told["delta"], told["runs"]) == (6.5, 1e-5, 1)
    assert told["epsilon"] == pytest.approx(2.0, rel=1e-6)

    lines = ledger_of_table(table).read_text().splitlines()
    limits = [line for line in map(json.loads, lines) if line["kind"] == "limit"]
    assert [(one["unit"], one["epsilon"], one["delta"]) for one in limits] == [
        ("secondary-record", 3.0, 1e-5),
        ("entity", 5.0, 1e-6),
        ("secondary-record", 6.5, 1e-5),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "0"], "epsilon must be finite and > 0"),
        (["--epsilon", "nan"], "epsilon must be finite and > 0"),
        (["--epsilon", "3", "--delta", "1"], "delta must lie in (0, 1)"),
    ],
)
def test_impossible_limits(
    arguments: list[str], words: str, tmp_path: Path, capfd: Capture
) -> None:
    table = table_of(tmp_path)
    ended = securevfl(capfd, "ledger", "limit", table, *arguments)
    assert ended.code == 2
    assert words in ended.complaint
    assert not ledger_of_table(table).exists()


def test_a_ledger_that_is_in_use_or_damaged(tmp_path: Path, capfd: Capture) -> None:
    """One line: wait for the run, or restore the file."""
    table = table_of(tmp_path)
    run_on(table, "a" * 32)
    path = ledger_of_table(table)
    plan = ReleasePlan(
        privacy=Privacy(epsilon=4.0),
        parties=2,
        min_active=2,
        rounds=2,
        rows_per_round=10,
        row_releases=20,
        releases_per_row=1,
        links=3,
    )
    holder = Ledger(path, party="bank", plan=plan, noise_share_std=plan.noise_share_std())
    for command in (["show", table], ["limit", table, "--epsilon", "3"]):
        ended = securevfl(capfd, "ledger", *command)
        assert ended.code == 2
        assert "in use by another run" in ended.complaint
    holder.close()
    path.write_text(path.read_text().replace('"rows": 10', '"rows": 1', 1))
    for command in (["show", table], ["limit", table, "--epsilon", "3"]):
        ended = securevfl(capfd, "ledger", *command)
        assert ended.code == 4
        assert "does not follow from the line before it" in ended.complaint


def test_a_simulation_charges_no_table(tmp_path: Path, capfd: Capture) -> None:
    """It protects nobody: its ledgers are in its run folder, and an owner's limit is not asked."""
    privacy = {"epsilon": 5.0, "delta": 1e-4, "encoder": "trained"}
    path = write_federation(
        tmp_path,
        privacy=privacy,
        rows=60,
        training={"epochs": 1, "batch_size": 32},
        base={"estimator": "none"},
    )
    table = tmp_path / "bank-1.csv"
    assert securevfl(capfd, "ledger", "limit", table, "--epsilon", 0.1).code == 0
    before = ledger_of_table(table).read_bytes()
    for out in ("first", "second"):
        ended = securevfl(capfd, "simulate", path, "--out", tmp_path / out, "--json")
        assert ended.code == 0
        figures = json.loads(ended.out)
        assert figures["privacy"]["epsilon"] == figures["privacy"]["total_epsilon"]
        assert figures["privacy"]["table_runs"] == 1
        assert (tmp_path / out / "parties" / "bank-1" / "ledger.jsonl").exists()
    assert ledger_of_table(table).read_bytes() == before
    assert not list(tmp_path.glob("agency*.jsonl"))


def test_labels_stand_beside_records(tmp_path: Path, capfd: Capture) -> None:
    """Both figures of all runs, and that there is none once labels were shown."""
    table = table_of(tmp_path)
    run_on(table, "a" * 32, LabelRelease(mechanism="shares", epsilon=2.0, delta=1e-5, parties=4))
    run_on(table, "b" * 32, LabelRelease(mechanism="randomised", epsilon=1.0, delta=0, parties=4))
    run_on(table, "c" * 32)
    shown = securevfl(capfd, "ledger", "show", table).out
    assert "epsilon = 3 against one alone, 5.393 against all together at delta = 1e-05" in shown
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)["labels"]
    assert told["runs"] == 2
    assert told["delta"] == 1e-5

    run_on(table, "d" * 32, LabelRelease(mechanism="plaintext", epsilon=None, delta=0, parties=4))
    assert "3 runs: without bound" in securevfl(capfd, "ledger", "show", table).out
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)["labels"]
    assert told["epsilon"] is told["together"] is None


def test_programs_are_shown_and_allowed_by_the_owner(tmp_path: Path, capfd: Capture) -> None:
    """No bound stands where the total stood; an owner may allow programs beside a limit."""
    table = table_of(tmp_path)
    run_on(table, "a" * 32)
    neither = securevfl(capfd, "ledger", "limit", table)
    assert (neither.code, "give --epsilon, --programs, or both" in neither.complaint) == (2, True)
    assert securevfl(capfd, "ledger", "limit", table, "--epsilon", 10).code == 0
    assert "programs may not read the table" in securevfl(capfd, "ledger", "show", table).out
    allowed = securevfl(capfd, "ledger", "limit", table, "--programs", "allow")
    assert f"{table}: programs may read it" in allowed.out
    use = ProgramUse(
        run="p" * 32,
        federation="credit",
        party="bank-1",
        program="d" * 64,
        peers={"agency": "a key"},
        time="2026-11-27T00:00:00+00:00",
    )
    with contextlib.closing(LedgerFile(ledger_of_table(table))) as file:
        file.append(use.line())
    shown = securevfl(capfd, "ledger", "show", table)
    assert "program dddddddd (2026-11-27, with agency): without bound" in shown.out
    assert "epsilon without bound, delta 1e-05; limit 10, left 6" in shown.out
    assert "may not read" not in shown.out
    told = json.loads(securevfl(capfd, "ledger", "show", table, "--json").out)
    assert (told["programs_allowed"], told["programs"][0]["peers"]) == (True, {"agency": "a key"})
    refused = securevfl(capfd, "ledger", "limit", table, "--programs", "refuse", "--json")
    assert json.loads(refused.out) == {"table": str(table), "programs": "refuse"}
    assert "limit 10, left 0" in securevfl(capfd, "ledger", "show", table).out


def test_a_restored_ledger_is_booked_and_shows_it(tmp_path: Path, capfd: Capture) -> None:
    """What was booked, in words and figures; a table that nothing was released of has nothing."""
    table = table_of(tmp_path)
    none = securevfl(capfd, "ledger", "restored", table)
    assert (none.code, "is not there; put the newest copy" in none.complaint) == (2, True)
    run_on(table, "a" * 32)
    booked = securevfl(capfd, "ledger", "restored", table)
    assert booked.out.count("booked epsilon = 4 at delta = 1e-05 (unit secondary-record)") == 2
    shown = securevfl(capfd, "ledger", "show", table).out
    assert "booked in full when the ledger was restored: aaaaaaaa, " in shown
    told = json.loads(securevfl(capfd, "ledger", "restored", table, "--json").out)
    assert [one["epsilon"] for one in told["booked"]] == pytest.approx([4.0, 4.0], rel=1e-6)
