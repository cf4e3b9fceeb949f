"""What a primary that asks for more than was planned gets of a ledger: nothing, under any setting.

Noise is chosen for so many rounds, of so many rows, each in so many of them. A budget alone does
not hold a primary to that: what its accounting takes from the plan it takes for granted.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from securevfl.core.errors import BudgetExceededError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease, Unit
from securevfl.dp.gaussian import composed_multiplier
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.sensitivity import gradient_sensitivity
from securevfl.ledger.ledger import Ledger

BUDGETS = [{"epsilon": 8.0}, {"noise_multiplier": 3.0}, {"mechanism": "none"}]


def plan_of(
    *, rounds: int, rows_per_round: int, row_releases: int, passes: int, **privacy
) -> ReleasePlan:
    return ReleasePlan(
        privacy=Privacy(**privacy),
        parties=2,
        min_active=2,
        rounds=rounds,
        rows_per_round=rows_per_round,
        row_releases=row_releases,
        releases_per_row=passes,
        links=4,
    )


def ledger_of(plan: ReleasePlan) -> Ledger:
    return Ledger(None, party="bank", plan=plan, noise_share_std=plan.noise_share_std())


def asked(ledger: Ledger, rows: np.ndarray, rounds: int) -> int:
    """Ask for the same rows in so many rounds; return how many were charged."""
    for number in range(1, rounds + 1):
        try:
            ledger.charge(round_number=number, rows=rows, purpose="train")
        except BudgetExceededError:
            return number - 1
    return rounds


def test_fifty_epochs_under_a_plan_of_five_are_refused() -> None:
    """At q = 0.5 and m = 4 they cost 27.4 where 8 was promised; the plan's 11 rounds are charged.

    A record's rows are in at most m rounds of an epoch, so that five epochs may already touch it in
    all 11 rounds that were planned; from there on a budget of 8 sees nothing grow.
    """
    plan = plan_of(
        rounds=11,
        rows_per_round=128,
        row_releases=5 * 112 + 16,
        passes=5,
        epsilon=8.0,
        delta=1e-6,
        encoder="dp-trained",
        links_per_record=4,
        sampling_rate=0.5,
    )
    tau = plan.noise_share_std()
    wanted = replace(plan, rounds=101, row_releases=50 * 112 + 16, releases_per_row=50)
    assert plan.epsilon(tau) == pytest.approx(7.999, abs=1e-3)
    assert wanted.epsilon(tau) == pytest.approx(27.36, abs=0.01)

    ledger = ledger_of(plan)
    train, validation = np.arange(100), np.arange(100, 112)
    for epoch in range(5):
        ledger.charge(round_number=2 * epoch + 1, rows=train, purpose="train")
        ledger.charge(round_number=2 * epoch + 2, rows=validation, purpose="validation")
    with pytest.raises(BudgetExceededError, match="would pass the plan of 11 releases"):
        ledger.charge(round_number=11, rows=train, purpose="train")
    assert ledger.rounds == 10
    assert ledger.epsilon_spent <= 8.0


@pytest.mark.parametrize("settings", BUDGETS)
@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize("encoder", ["trained", "frozen", "dp-trained"])
def test_a_session_is_held_to_its_rounds_rows_and_passes(
    encoder: str, rate: float, settings: dict[str, float]
) -> None:
    """Whatever bounds the run beside them: budget, noise multiplier, or no noise at all."""
    if (encoder == "trained" and rate < 1) or (encoder == "dp-trained" and "mechanism" in settings):
        pytest.skip("no such promise")
    privacy = {"encoder": encoder, "links_per_record": 30, "sampling_rate": rate, **settings}
    sizes = {"rounds": 4, "rows_per_round": 10, "row_releases": 20, "passes": 2}
    if encoder == "frozen":
        sizes |= {"rounds": 2, "passes": 1}
    plan = plan_of(**sizes, **privacy)

    assert asked(ledger_of(plan), np.arange(10), 40) == plan.releases_per_row
    few = ledger_of(plan)
    done = sum(asked_once(few, number, np.array([number])) for number in range(1, 40))
    assert done == plan.rounds
    many = ledger_of(plan)
    with pytest.raises(BudgetExceededError, match="the noise was chosen for 10 at most"):
        many.charge(round_number=1, rows=np.arange(11), purpose="train")
    done = sum(asked_once(many, n, np.arange(10 * n, 10 * n + 10)) for n in range(1, 40))
    assert done == 2
    assert many.row_releases == 20


def asked_once(ledger: Ledger, number: int, rows: np.ndarray) -> int:
    try:
        ledger.charge(round_number=number, rows=rows, purpose="train")
    except BudgetExceededError:
        return 0
    return 1


def test_a_round_of_more_rows_than_planned_is_refused() -> None:
    """Noise for updates is made for at most B rows of a record; 64 of 280 cost 20.1, not 8."""
    plan = plan_of(
        rounds=40,
        rows_per_round=8,
        row_releases=280,
        passes=1,
        epsilon=8.0,
        delta=1e-6,
        encoder="dp-trained",
        links_per_record=64,
    )
    tau = plan.noise_share_std()
    change = gradient_sensitivity(clip_norm=1.0, unit=Unit("secondary-record"), rows=64)
    released = plan.release_multiplier(tau) * math.sqrt(8 / 64)
    together = composed_multiplier(released, plan.gradient_noise_std(tau) / change)
    true = epsilon_of([GaussianRelease(noise_multiplier=together)], delta=1e-6)
    assert true == pytest.approx(20.1, abs=0.1)

    ledger = ledger_of(plan)
    with pytest.raises(BudgetExceededError, match=r"bank: round 1 \(train\) has 280 rows"):
        ledger.charge(round_number=1, rows=np.arange(280), purpose="train")
    assert ledger.epsilon_spent == 0.0


@pytest.mark.parametrize("row", [-1, 2**31, 2**62])
def test_ids_that_no_table_has_are_refused(row: int) -> None:
    """Neither counted from the end nor a reason to fill the memory."""
    plan = plan_of(rounds=4, rows_per_round=10, row_releases=20, passes=2, noise_multiplier=3.0)

    with pytest.raises(PrivacyError, match="rows that no table has"):
        ledger_of(plan).charge(round_number=1, rows=np.array([3, row]), purpose="train")
