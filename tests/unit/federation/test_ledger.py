"""Charge before release: budgets, sessions, and what an edited file looks like."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.release_plan import FittingPlan, ReleasePlan
from securevfl.ledger.ledger import Ledger


def plan_of(**privacy) -> ReleasePlan:
    """Return ten rounds of 100 rows, each row once, at four secondaries."""
    settings = {} if privacy.keys() & {"noise_multiplier", "mechanism"} else {"epsilon": 4.0}
    return ReleasePlan(
        privacy=Privacy(**{**settings, **privacy}),
        parties=4,
        min_active=4,
        rounds=10,
        rows_per_round=100,
        row_releases=1000,
        releases_per_row=1,
        links=5,
    )


RUN = "0" * 32


def open_ledger(
    path: Path | None, plan: ReleasePlan | None = None, party: str = "rental", run: str = RUN
) -> Ledger:
    plan = plan or plan_of()
    return Ledger(path, party=party, plan=plan, noise_share_std=plan.noise_share_std(), run=run)


def charge(ledger: Ledger, count: int, *, start: int = 1, rows: int = 100) -> float:
    """Charge so many rounds; every row is in one of them."""
    epsilon = 0.0
    for number in range(start, start + count):
        ids = np.arange((number - 1) * rows, number * rows)
        epsilon = ledger.charge(round_number=number, rows=ids, purpose="train")
    return epsilon


def test_a_whole_plan_fits_its_own_budget_exactly_once() -> None:
    """The calibrated plan is covered to its last row; one more is not, and is not booked."""
    ledger = open_ledger(None)
    ledger.require_room(rounds=10, row_releases=1000, passes=1)

    assert charge(ledger, 10) == pytest.approx(4.0, rel=1e-6)
    with pytest.raises(BudgetExceededError, match=r"rental: round 11 \(test\) would pass the plan"):
        ledger.charge(round_number=11, rows=np.array([0]), purpose="test")
    assert (ledger.rounds, ledger.row_releases) == (10, 1000)
    assert ledger.epsilon_spent <= 4.0


def test_what_the_ledger_says_is_what_the_plan_says() -> None:
    """Two ways to the same number: charge by charge, and the plan's own figure."""
    plan = plan_of()
    ledger = open_ledger(None, plan)

    assert charge(ledger, 3) == plan.epsilon_after(
        plan.noise_share_std(), rounds=3, row_releases=300
    )


def test_a_run_that_cannot_finish_is_refused_before_its_first_round() -> None:
    """Nothing needs to be released to know."""
    ledger = open_ledger(None)

    ledger.require_room(rounds=0, row_releases=0, passes=0)
    with pytest.raises(BudgetExceededError, match="the run's 11 releases"):
        ledger.require_room(rounds=11, row_releases=1100, passes=1)


def test_sessions_of_one_run_add_up(tmp_path: Path) -> None:
    """A resumed run starts where its first session stopped, and pays on top of it."""
    path = tmp_path / "ledger.jsonl"
    first = open_ledger(path)
    spent = charge(first, 4)
    first.close()
    second = open_ledger(path)

    assert second.epsilon_spent == spent == second.total
    assert charge(second, 6) == pytest.approx(4.0, rel=1e-6)
    with pytest.raises(BudgetExceededError, match="before the run was resumed"):
        charge(second, 1, start=7)
    second.close()


def test_a_resumed_run_may_be_granted_more(tmp_path: Path) -> None:
    """Different noise and budget compose: mu adds in squares over both sessions."""
    path = tmp_path / "ledger.jsonl"
    with_four = open_ledger(path)
    charge(with_four, 10)
    with_four.close()
    plan = plan_of(epsilon=9.0)
    second = open_ledger(path, plan)

    with pytest.raises(BudgetExceededError):
        second.require_room(rounds=10, row_releases=1000, passes=1)
    assert 4.0 < charge(second, 5) <= 9.0
    second.close()


def test_without_an_epsilon_the_plan_is_the_budget() -> None:
    """Noise chosen for ten rounds does not serve an eleventh."""
    ledger = open_ledger(None, plan_of(noise_multiplier=3.0))

    charge(ledger, 10)
    with pytest.raises(BudgetExceededError, match="would pass the plan of 10 releases"):
        charge(ledger, 1, start=11)


def test_without_noise_the_spending_is_infinite_and_taints_the_run(tmp_path: Path) -> None:
    """A release without noise cannot be taken back: no later session's budget covers it."""
    path = tmp_path / "ledger.jsonl"
    bare = open_ledger(path, plan_of(mechanism="none"))
    assert bare.epsilon_spent == 0.0
    assert charge(bare, 1) == math.inf
    bare.close()
    later = open_ledger(path)

    with pytest.raises(BudgetExceededError, match="epsilon to inf"):
        charge(later, 1)
    later.close()


def test_sampled_sessions_add_up_too(tmp_path: Path) -> None:
    """Two passes, each on its own secret sample, compose through privacy-loss distributions."""
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(epsilon=6.0, encoder="frozen", links_per_record=2, sampling_rate=0.3)
    one = open_ledger(path, plan)
    first = charge(one, 1)
    assert charge(one, 1, start=2) == first
    one.close()
    other = plan_of(noise_multiplier=2.0, encoder="frozen", links_per_record=2)
    two = open_ledger(path, other, run="1" * 32)

    assert charge(two, 1) < two.total
    assert two.total > first
    two.close()


def test_a_round_is_charged_once() -> None:
    """A retry is a new round: the same number twice is refused."""
    ledger = open_ledger(None)
    charge(ledger, 2)

    with pytest.raises(PrivacyError, match="rounds up to 2 are charged already"):
        charge(ledger, 1, start=2)


def test_the_file_is_durable_private_and_holds_figures_only(tmp_path: Path) -> None:
    """Each charge is a line on the disk before charge() returns; only its owner may read it."""
    path = tmp_path / "deep" / "ledger.jsonl"
    ledger = open_ledger(path)
    charge(ledger, 2)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["open", "charge", "charge"]
    fields = {"kind", "round", "rows", "passes", "purpose", "epsilon"}
    assert set(lines[1]) == fields | {"salt", "previous"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    ledger.close()


def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    """They could each spend what is left."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)

    with pytest.raises(ConfigError, match="in use by another run"):
        open_ledger(path)
    ledger.close()
    open_ledger(path).close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_edit_shows(tmp_path: Path, number: int) -> None:
    """Changing a figure in any line but the last breaks the chain."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    charge(ledger, 3)
    ledger.close()
    lines = path.read_text().splitlines()
    lines[number] = lines[number].replace("100", "10", 1)
    path.write_text("\n".join(lines) + "\n")

    with pytest.raises(PrivacyError, match=f"line {number + 2}: does not follow"):
        open_ledger(path)


def test_a_removed_line_shows(tmp_path: Path) -> None:
    """So does taking a charge out."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    charge(ledger, 3)
    ledger.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:1], *lines[2:]]) + "\n")

    with pytest.raises(PrivacyError, match="line 2: does not follow"):
        open_ledger(path)


def test_a_cut_end_shows_against_the_checkpoint(tmp_path: Path) -> None:
    """The chain cannot know its own end; the head that a checkpoint kept does."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    charge(ledger, 3)
    head = ledger.head
    ledger.close()
    whole = open_ledger(path)
    whole.require_history(head)
    whole.close()
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))
    cut = open_ledger(path)

    with pytest.raises(PrivacyError, match="it was cut or exchanged"):
        cut.require_history(head)
    cut.close()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    """A crash within a write: that charge never returned, so nothing was released for it."""
    path = tmp_path / "ledger.jsonl"
    ledger = open_ledger(path)
    spent = charge(ledger, 2)
    ledger.close()
    with path.open("a") as file:
        file.write('{"kind": "charge", "rou')
    again = open_ledger(path)

    assert again.epsilon_spent == spent
    charge(again, 1)
    again.close()
    open_ledger(path).close()


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        "{}",
        '{"kind": "charge", "salt": "00", "previous": "' + "0" * 64 + '"}',
    ],
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, line: str) -> None:
    """Another file is never appended to."""
    path = tmp_path / "notes.txt"
    path.write_text(line + "\n")

    with pytest.raises(PrivacyError, match="line 1: is not a"):
        open_ledger(path)
    assert path.read_text() == line + "\n"


def test_another_version_is_refused(tmp_path: Path) -> None:
    """An old program does not guess what a new line means."""
    path = tmp_path / "ledger.jsonl"
    open_ledger(path).close()
    path.write_text(path.read_text().replace('"version": 5', '"version": 3'))

    with pytest.raises(
        ConfigError,
        match="line 1: was written in version 3 of the format; this program reads version 5",
    ):
        open_ledger(path)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    """One line, exit code 2."""
    (tmp_path / "file").write_text("")

    with pytest.raises(
        ConfigError, match=r"cannot be made \(Not a dir.*\); it needs a folder.*in HOME"
    ):
        open_ledger(tmp_path / "file" / "ledger.jsonl")


def test_a_closed_ledger_books_nothing(tmp_path: Path) -> None:
    """Nothing may be released after it."""
    ledger = open_ledger(tmp_path / "ledger.jsonl")
    ledger.close()

    with pytest.raises(PrivacyError, match="is closed"):
        charge(ledger, 1)


FITTING = FittingPlan(share=0.1)


def fitted_plan(fitting: FittingPlan = FITTING, **privacy) -> ReleasePlan:
    """Return the plan above with a frozen encoder that is fitted with a tenth of the privacy."""
    settings = {"encoder": "frozen", "links_per_record": 1, **privacy}
    return replace(plan_of(**settings), fitting=fitting)


def test_fitting_is_booked_before_its_releases_and_composes_with_them(tmp_path: Path) -> None:
    """A line of its own; fitting and all releases together are the plan's epsilon, no more."""
    path = tmp_path / "ledger.jsonl"
    plan = fitted_plan()
    ledger = open_ledger(path, plan)
    ledger.require_room(rounds=10, row_releases=1000, passes=1)
    fitting = ledger.charge_fitting()

    assert 0 < fitting < 4.0
    assert fitting == ledger.epsilon_spent
    assert charge(ledger, 10) == plan.epsilon(plan.noise_share_std()) == pytest.approx(4.0)
    ledger.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines[:3]] == ["open", "fit", "charge"]
    assert lines[1]["noise_multiplier"] == plan.fitting_multiplier()
    assert lines[1]["epsilon"] == fitting


@pytest.mark.parametrize("steps", [1, 20])
def test_a_fitting_stays_spent_for_later_sessions(steps: int, tmp_path: Path) -> None:
    """A session that fitted and released nothing has used its share up."""
    path = tmp_path / "ledger.jsonl"
    plan = fitted_plan(FittingPlan(share=0.1, steps=steps))
    first = open_ledger(path, plan)
    spent = first.charge_fitting()
    first.close()
    second = open_ledger(path, plan)

    assert second.epsilon_spent == second.total == spent
    with pytest.raises(BudgetExceededError, match="before the run was resumed"):
        second.require_room(rounds=10, row_releases=1000, passes=1)
    second.close()


def test_an_encoder_is_fitted_once_a_session_and_within_the_budget() -> None:
    """A second fitting is refused; so is one that the budget does not cover; neither is booked."""
    ledger = open_ledger(None, fitted_plan())
    spent = ledger.charge_fitting()
    with pytest.raises(PrivacyError, match="fitted once"):
        ledger.charge_fitting()
    assert ledger.epsilon_spent == spent


def test_releases_of_a_fitted_encoder_pay_for_its_fitting_though_nobody_booked_it() -> None:
    """The accounting does not rest on the order of calls."""
    plan = fitted_plan()
    booked, unbooked = open_ledger(None, plan), open_ledger(None, plan)
    booked.charge_fitting()

    assert charge(booked, 3) == charge(unbooked, 3)


def test_fitting_without_noise_is_not_bounded() -> None:
    """As a release without noise is not."""
    ledger = open_ledger(None, fitted_plan(mechanism="none"))

    assert ledger.charge_fitting() == math.inf == ledger.epsilon_spent
