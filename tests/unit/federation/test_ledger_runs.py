"""Runs on one table: what each spent, what they spent together, and what the owner allows."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.release_plan import FittingPlan, ReleasePlan
from securevfl.ledger.book import LedgerBook, Limit
from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import lines_of_run, set_limit, summary_of

DELTA = 1e-5


def plan_of(*, fitting: FittingPlan | None = None, **privacy) -> ReleasePlan:
    """Return ten rounds of ten rows, each row once, at two secondaries."""
    settings = {} if privacy.keys() & {"noise_multiplier", "mechanism"} else {"epsilon": 4.0}
    return ReleasePlan(
        privacy=Privacy(**{"delta": DELTA, **settings, **privacy}),
        parties=2,
        min_active=2,
        rounds=10,
        rows_per_round=10,
        row_releases=100,
        releases_per_row=1,
        links=3,
        fitting=fitting,
    )


def frozen(**privacy) -> ReleasePlan:
    return plan_of(encoder="frozen", links_per_record=4, **privacy)


def opened(path: Path | None, plan: ReleasePlan, run: str) -> Ledger:
    return Ledger(
        path,
        party="bank",
        plan=plan,
        noise_share_std=plan.noise_share_std(),
        run=run,
        federation="test",
        settings="abc",
    )


def charge(ledger: Ledger, parts: Sequence[int]) -> float:
    """Charge these tenths of the rows, a round each."""
    epsilon = 0.0
    for number, part in enumerate(parts, 1):
        rows = np.arange(10 * part, 10 * part + 10)
        epsilon = ledger.charge(round_number=number, rows=rows, purpose="train")
    return epsilon


def whole_run(path: Path, plan: ReleasePlan, run: str) -> float:
    """Release everything that is planned; return what the table has spent."""
    ledger = opened(path, plan, run)
    try:
        ledger.require_room(rounds=10, row_releases=100, passes=1)
        charge(ledger, range(10))
        return ledger.total
    finally:
        ledger.close()


def test_runs_add_up_in_the_total_and_not_in_a_runs_own_epsilon(tmp_path: Path) -> None:
    """Each of three runs keeps its own 4; together they cost what the accountant says of three."""
    path, plan = tmp_path / "bank.csv.ledger.jsonl", plan_of()
    tau = plan.noise_share_std()
    release = plan.release(tau, rounds=10, row_releases=100)
    for count, run in enumerate("abc", 1):
        total = whole_run(path, plan, run)
        assert total == epsilon_of([release] * count, delta=DELTA)
        ledger = opened(path, plan, run)
        assert ledger.epsilon_spent == pytest.approx(4.0, rel=1e-6)
        assert ledger.epsilon_spent <= 4.0
        assert (ledger.runs, ledger.rounds, ledger.row_releases) == (count, 10, 100)
        ledger.close()
    assert total > 4.0 * math.sqrt(3)


def test_outlook_has_both_numbers_before_anything_is_sent(tmp_path: Path) -> None:
    """What this run may spend, what was spent before it, and the two together."""
    path, plan = tmp_path / "ledger.jsonl", plan_of()
    once = whole_run(path, plan, "a")
    second = opened(path, plan, "b")
    outlook = second.outlook()

    assert outlook.epsilon == plan.epsilon(plan.noise_share_std())
    assert (outlook.total_before, outlook.runs_before) == (once, 1)
    assert (outlook.unit, outlook.delta, outlook.limit) == ("secondary-record", DELTA, None)
    charge(second, range(10))
    assert second.total == outlook.total
    second.close()


def test_the_owners_limit_holds_whatever_the_federation_file_asks(tmp_path: Path) -> None:
    """Two runs fit, the third is refused before its first release; the owner may raise the limit.

    A federation file's own epsilon, delta, accounting or unit does not help it.
    """
    path = tmp_path / "ledger.jsonl"
    set_limit(path, Limit(unit="secondary-record", epsilon=7.0, delta=DELTA))
    assert whole_run(path, plan_of(), "a") <= 7.0
    assert whole_run(path, plan_of(), "b") <= 7.0
    before = path.read_text().count('"charge"')
    wishes = [
        {},
        {"epsilon": 1000.0},
        {"delta": 0.5, "epsilon": 4.0},
        {"noise_multiplier": 3.0},
        {"accounting": "as-published", "epsilon": 4.0},
        {"mechanism": "none"},
    ]
    for number, wish in enumerate(wishes):
        with pytest.raises(BudgetExceededError, match=r"over the limit of its owner, 7 \(5\.99"):
            whole_run(path, plan_of(**wish), f"c{number}")
    for unit in ("entity", "linked-row"):
        with pytest.raises(BudgetExceededError, match=f"this run spends for unit = {unit}"):
            whole_run(path, plan_of(unit=unit), unit)
    assert path.read_text().count('"charge"') == before

    set_limit(path, Limit(unit="secondary-record", epsilon=8.0, delta=DELTA))
    assert 7.0 < whole_run(path, plan_of(), "d") <= 8.0
    assert [line["epsilon"] for line in lines(path) if line["kind"] == "limit"] == [7.0, 8.0]


def test_a_limit_is_asked_before_every_release_of_a_run_that_it_does_not_cover(
    tmp_path: Path,
) -> None:
    """A resumed run is not refused at its start: it goes as far as the limit lets it."""
    path, plan = tmp_path / "ledger.jsonl", plan_of()
    set_limit(path, Limit(unit="secondary-record", epsilon=3.0, delta=DELTA))
    ledger = opened(path, plan, "a")

    with pytest.raises(BudgetExceededError, match=r"round \d+ .* over the limit of its owner, 3"):
        charge(ledger, range(10))
    assert 1 < ledger.rounds < 10
    assert 2.5 < ledger.total <= 3.0
    ledger.close()


def test_units_stand_side_by_side(tmp_path: Path) -> None:
    """A second run with another unit is possible; neither counts into the other's total."""
    path = tmp_path / "ledger.jsonl"
    one = whole_run(path, plan_of(), "a")
    other = whole_run(path, plan_of(unit="entity", epsilon=6.0), "b")

    assert one == pytest.approx(4.0, rel=1e-6)
    assert other == pytest.approx(6.0, rel=1e-6)
    summary = summary_of(path)
    assert [(unit.unit, unit.epsilon, unit.runs) for unit in summary.units] == [
        ("entity", other, 1),
        ("secondary-record", one, 1),
    ]
    with pytest.raises(PrivacyError, match="this run was charged for unit = 'secondary-record'"):
        opened(path, plan_of(unit="entity"), "a")


def test_a_party_may_have_another_name_in_another_federation(tmp_path: Path) -> None:
    """The ledger belongs to the table, not to a name."""
    path, plan = tmp_path / "ledger.jsonl", plan_of()
    whole_run(path, plan, "a")
    ledger = Ledger(path, party="insurer", plan=plan, noise_share_std=plan.noise_share_std())
    charge(ledger, range(10))
    ledger.close()

    assert [run.party for run in summary_of(path).runs] == ["bank", "insurer"]


def test_a_summary_says_what_the_ledger_holds(tmp_path: Path) -> None:
    """Runs that released nothing are not in it; its head is the chain's."""
    path, plan = tmp_path / "ledger.jsonl", plan_of()
    whole_run(path, plan, "a")
    opened(path, plan, "refused").close()
    bare = opened(path, plan_of(mechanism="none"), "b")
    charge(bare, [0])
    head = bare.head
    bare.close()
    summary = summary_of(path)

    assert [(run.run, run.releases, run.row_releases) for run in summary.runs] == [
        ("a", 10, 100),
        ("b", 1, 10),
    ]
    assert summary.runs[1].epsilon is summary.units[0].epsilon is None
    assert summary.head == head
    assert [line["kind"] for line in lines_of_run(path, "a")] == ["open", *["charge"] * 10]


FITTED = {"fitting": FittingPlan(share=0.2)}


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("fitting", [{}, FITTED])
def test_a_frozen_release_in_two_sessions_costs_what_it_costs_in_one(
    fitting: dict[str, FittingPlan], rate: float, tmp_path: Path
) -> None:
    """The same links, sample and encoder: parts of one fixed answer, of which a record touches m.

    Added up, two sessions would have four touched rows each, and the second would not fit.
    """
    path, plan = tmp_path / "ledger.jsonl", frozen(sampling_rate=rate, **fitting)
    first = opened(path, plan, "a")
    if fitting:
        first.charge_fitting()
    first.require_same_release("links, sample, encoder")
    charge(first, range(6))
    first.close()
    second = opened(path, plan, "a")
    assert second.released_rows.tolist() == list(range(60))
    second.require_same_release("links, sample, encoder")
    spent = charge(second, range(6, 10))
    second.close()

    assert spent == plan.epsilon(plan.noise_share_std())
    assert spent == pytest.approx(4.0, rel=1e-3)
    assert summary_of(path).runs[0].epsilon == spent
    assert (summary_of(path).runs[0].sessions, summary_of(path).runs[0].row_releases) == (2, 100)


def test_sessions_that_release_otherwise_add_up() -> None:
    """Another noise, another plan, a second fitting or no word of sameness: nothing is merged."""
    plan = frozen(epsilon=50.0, **FITTED)
    tau = plan.noise_share_std()
    part = plan.release(tau, rounds=2, row_releases=20)
    twice = [*plan.fitting_releases() * 2, part, part]

    def spent(first: dict[str, bool | str], second: dict[str, bool | str]) -> float:
        book = LedgerBook()
        for number, session in enumerate((first, second)):
            ledger = opened(None, plan, "a")
            if session.get("fits"):
                ledger.charge_fitting()
            if "digest" in session:
                ledger.require_same_release(str(session["digest"]))
            charge(ledger, [2 * number, 2 * number + 1])
            book.sessions.append(ledger._own)
        return book.total("secondary-record", delta=DELTA)

    named = {"digest": "same"}
    assert spent({**named, "fits": True}, named) < epsilon_of(twice, delta=DELTA)
    for first, second in (
        ({**named, "fits": True}, {**named, "fits": True}),
        ({"fits": True}, {}),
        ({**named, "fits": True}, {}),
        ({"fits": True}, named),
    ):
        assert spent(first, second) == epsilon_of(twice, delta=DELTA)


def test_a_row_is_released_once_a_run_whatever_was_deleted(tmp_path: Path) -> None:
    """The ledger remembers; a resumed session that asks again is refused, in part or in whole."""
    path, plan = tmp_path / "ledger.jsonl", frozen(noise_multiplier=3.0)
    first = opened(path, plan, "a")
    rows = np.array([7, 3, 4, 5, 90, 99])
    first.require_same_release("one")
    first.charge(round_number=1, rows=rows, purpose="release")
    first.close()
    assert lines(path)[2]["released"] == [[3, 5], [7, 7], [90, 90], [99, 99]]
    second = opened(path, plan, "a")
    second.require_same_release("one")
    assert second.released_rows.tolist() == sorted(rows.tolist())

    for again in ([4], [0, 1, 90], [8, 8]):
        with pytest.raises(BudgetExceededError, match="rows that this run has released before"):
            second.charge(round_number=1, rows=np.array(again), purpose="release")
    second.charge(round_number=1, rows=np.array([6, 8]), purpose="release")
    second.close()
    other = opened(path, plan, "b")
    assert other.released_rows.size == 0
    other.charge(round_number=1, rows=rows, purpose="release")
    other.close()


def test_another_release_of_the_same_run_is_refused(tmp_path: Path) -> None:
    """Other links, another sample or another encoder are another answer."""
    path, plan = tmp_path / "ledger.jsonl", frozen()
    first = opened(path, plan, "a")
    first.require_same_release("one")
    first.require_same_release("one")
    with pytest.raises(PrivacyError, match="released rows by other links"):
        first.require_same_release("two")
    first.close()
    second = opened(path, plan, "a")
    with pytest.raises(PrivacyError, match="released rows by other links"):
        second.require_same_release("two")
    second.require_same_release("one")
    second.close()
    other = opened(path, plan, "b")
    other.require_same_release("two")
    other.close()
    assert [line["kind"] for line in lines(path)] == ["open", "release"] * 3
    with pytest.raises(PrivacyError, match="only a frozen encoder"):
        opened(None, plan_of(), "c").require_same_release("one")


def test_trained_sessions_pay_for_what_they_do_again(tmp_path: Path) -> None:
    """An epoch that is done again is another look at the records."""
    path, plan = tmp_path / "ledger.jsonl", plan_of(noise_multiplier=3.0)
    first = opened(path, plan, "a")
    once = charge(first, range(5))
    first.close()
    second = opened(path, plan, "a")
    assert charge(second, range(5)) == pytest.approx(
        epsilon_of(
            [plan.release(plan.noise_share_std(), rounds=5, row_releases=50)] * 2, delta=DELTA
        )
    )
    assert second.epsilon_spent > once
    second.close()


def test_the_rows_of_a_large_table_are_remembered_in_little() -> None:
    """Four bytes a row and a line of ranges a round, not a set of 100,000 numbers."""
    plan = replace(frozen(), rounds=100, rows_per_round=1024, row_releases=102_400)
    ledger = opened(None, plan, "a")
    for number in range(100):
        rows = np.arange(1024 * number, 1024 * number + 1024)
        ledger.charge(round_number=number + 1, rows=rows, purpose="release")

    assert ledger.released_rows.size == 102_400
    assert ledger._uses._counts.nbytes <= 2 * 4 * 102_400


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "charge", "round": 11, "rows": -10, "passes": 1, "purpose": "train"},
        {"kind": "charge", "round": 11, "rows": 1.5, "passes": 1, "purpose": "train"},
        {"kind": "charge", "round": 11, "rows": "10", "passes": 1, "purpose": "train"},
        {"kind": "charge", "round": 11},
        {"kind": "limit", "version": 5, "unit": "week", "epsilon": 1.0, "delta": 0.1, "time": ""},
        {"kind": "limit", "version": 5, "unit": "entity", "epsilon": -1, "delta": 0.1, "time": ""},
        {"kind": "open", "version": 5, "plan": {}},
        {"kind": "song"},
        {"kind": ["charge"]},
    ],
)
def test_a_line_that_makes_no_sense_is_refused(damage: dict[str, object], tmp_path: Path) -> None:
    """Though its hash is right: one clear line, and nothing is charged on top of it."""
    path = tmp_path / "ledger.jsonl"
    whole_run(path, plan_of(), "a")
    file = ChainedFile(path)
    file.append(damage)
    file.close()

    with pytest.raises(PrivacyError, match="line 12: is not a"):
        opened(path, plan_of(), "b")


def test_a_limit_of_another_version_is_refused(tmp_path: Path) -> None:
    """It may mean something else."""
    path = tmp_path / "ledger.jsonl"
    file = ChainedFile(path)
    file.append({**Limit(unit="entity", epsilon=1.0, delta=0.1).line(), "version": 6})
    file.close()

    with pytest.raises(ConfigError, match="version 6"):
        opened(path, plan_of(), "a")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
