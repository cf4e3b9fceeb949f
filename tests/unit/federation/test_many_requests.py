"""Thousands of requests for predictions in one ledger: their cost, and that of booking them."""

from pathlib import Path

import numpy as np
import pytest

from securevfl.core.errors import BudgetExceededError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.book import Session, epsilon_of_sessions
from securevfl.ledger.ledger import Ledger

DELTA = 1e-5


def plan_of(rows: int, *, sampling_rate: float = 1.0, epsilon: float = 100.0) -> ReleasePlan:
    """Return one request for so many rows."""
    return ReleasePlan(
        privacy=Privacy(
            epsilon=epsilon,
            delta=DELTA,
            unit="secondary-record",
            encoder="dp-trained",
            links_per_record=2,
            sampling_rate=sampling_rate,
        ),
        parties=2,
        min_active=2,
        rounds=1,
        rows_per_round=rows,
        row_releases=rows,
        releases_per_row=1,
        links=3,
    )


def asked(number: int, plan: ReleasePlan) -> Session:
    """Return a request that was answered."""
    session = Session(
        run=f"{number:032x}",
        federation="test",
        settings="abc",
        party="bank",
        time="",
        plan=plan,
        noise_share_std=2.0,
        model="f" * 32,
    )
    session.book(round_number=1, rows=plan.row_releases, passes=1, purpose="predict")
    return session


@pytest.mark.parametrize("sampling_rate", [1.0, 0.2])
def test_equal_requests_cost_what_they_cost_one_by_one(sampling_rate: float) -> None:
    sessions = [
        asked(number, plan_of(1 + number % 2, sampling_rate=sampling_rate)) for number in range(12)
    ]
    one_by_one = epsilon_of([event for one in sessions for event in one.events()], delta=DELTA)
    # The grid of sampled losses rounds each composition up on its own.
    assert epsilon_of_sessions(sessions, delta=DELTA) == pytest.approx(one_by_one, rel=1e-3)


def test_requests_are_not_compared_with_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one answer are looked for within a run: between all, time would grow as squares."""

    def compared(_own: Session, _other: Session) -> bool:
        raise AssertionError

    sessions = [asked(number, plan_of(1)) for number in range(50)]
    monkeypatch.setattr(Session, "continues_in", compared)
    assert 0 < epsilon_of_sessions(sessions, delta=DELTA) < np.inf


def test_what_a_session_released_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    release = ReleasePlan.release

    def counted(plan: ReleasePlan, *given: float, **counts: int) -> object:
        calls.append(1)
        return release(plan, *given, **counts)

    sessions = [asked(number, plan_of(1)) for number in range(20)]
    monkeypatch.setattr(ReleasePlan, "release", counted)
    first = epsilon_of_sessions(sessions, delta=DELTA)
    assert epsilon_of_sessions(sessions, delta=DELTA) == first
    assert len(calls) == 20
    # More of a session is worked out anew.
    sessions[0].book(round_number=2, rows=1, passes=2, purpose="predict")
    assert epsilon_of_sessions(sessions, delta=DELTA) > first
    assert len(calls) == 21


def test_a_refused_request_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    plan = plan_of(8, epsilon=2.0)
    path = tmp_path / "table.ledger.jsonl"
    ledger = Ledger(
        path,
        party="bank",
        plan=plan,
        noise_share_std=plan.noise_share_std(),
        run="a" * 32,
        model="f" * 32,
    )
    spent = ledger.charge(round_number=1, rows=np.arange(8), purpose="predict")
    before = path.read_bytes()
    for name in "bcd":
        with pytest.raises(BudgetExceededError):
            ledger.begin(plan, run=name * 32)
    assert path.read_bytes() == before
    assert ledger.epsilon_spent == spent
    assert len(ledger.budget_sessions) == 1
    ledger.close()
