"""What a ledger refuses, in words: beyond a session's plan, its budget, or the owner's limit."""

from collections.abc import Sequence
from typing import Final

from securevfl.core.errors import BudgetExceededError
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.ledger_book import LedgerBook, Session

_ROUNDING: Final = 1e-9
"""Releases in parts add up with other roundings than in one go, relative to epsilon."""


def require_size(plan: ReleasePlan, rows: int, *, party: str, what: str) -> None:
    """Refuse a round with more rows than the noise was chosen for.

    Raises:
        BudgetExceededError: If it has more.
    """
    if rows > plan.rows_per_round:
        raise BudgetExceededError(
            f"{party}: {what} has {rows} rows; the noise was chosen for {plan.rows_per_round} at "
            f"most"
        )


def require_planned(own: Session, after: Session, *, what: str) -> None:
    """Refuse what a session's noise was not chosen for, whatever epsilon it comes to.

    Args:
        own: The session.
        after: The same as it would be.
        what: What was asked for.

    Raises:
        BudgetExceededError: If it would pass its plan.
    """
    plan = own.plan
    if (
        after.rounds > plan.rounds
        or after.row_releases > plan.row_releases
        or after.passes > plan.releases_per_row
    ):
        raise BudgetExceededError(
            f"{own.party}: {what} would pass the plan of {plan.rounds} releases and "
            f"{plan.row_releases} rows, each at most {plan.releases_per_row} times, for which "
            f"the noise was chosen ({own.rounds} releases and {own.row_releases} rows are "
            f"made); plan more epochs at the start"
        )


def require_rows(sessions: Sequence[Session], most: int | None, *, more: int) -> None:
    """Refuse rows beyond those that all predictions of a model may ask for.

    Args:
        sessions: All of the model; the last one asks.
        most: How many rows they may release; None for any number.
        more: Rows of the request.

    Raises:
        BudgetExceededError: If they are too many.
    """
    asked = sum(one.row_releases for one in sessions)
    if most is not None and asked + more > most:
        raise BudgetExceededError(
            f"{sessions[-1].party}: {more} rows more would bring all predictions of this model to "
            f"{asked + more} rows, over prediction.rows = {most}; raise it in every party's file"
        )


def budget_of(sessions: Sequence[Session]) -> float | None:
    """Return the epsilon that sessions of one budget keep together; None where nothing bounds it.

    With ``noise_multiplier`` it is what the run's first session planned, whatever later ones plan.
    Predictions then have no epsilon to keep.

    Args:
        sessions: All that share the budget, in order; the last one is under way.
    """
    first, own = sessions[0], sessions[-1]
    privacy = own.plan.privacy
    if privacy.accounting != "sound" or privacy.epsilon is not None:
        return privacy.epsilon if privacy.accounting == "sound" else None
    if own.model or first.noise_share_std == 0:
        return None
    return first.plan.epsilon(first.noise_share_std) * (1 + _ROUNDING)


def over_budget(
    own: Session, epsilon: float, *, budget: float, spent: tuple[float, float], what: str
) -> BudgetExceededError:
    """Return the refusal of what a run's own budget does not cover.

    Args:
        own: The session.
        epsilon: What it would come to, with the sessions that share its budget.
        budget: What they may spend.
        spent: What its run has spent, and what the earlier sessions of the same budget have.
        what: What was asked for.
    """
    now, before = spent
    if own.model:
        return BudgetExceededError(
            f"{own.party}: {what} would bring all predictions of this model to epsilon = "
            f"{epsilon:.4f}, over the {budget:g} that they may spend ({before:.4f} is spent); "
            f"raise prediction.epsilon in every party's file, or ask for all rows in one request"
        )
    had = f", {before:.4f} of it before the run was resumed" if before else ""
    limit = f"privacy.epsilon = {budget:g}"
    advice = "raise privacy.epsilon, lower training.epochs, or add noise"
    if own.plan.privacy.epsilon is None:
        limit = f"the {budget:.4f} that this run was planned to spend"
        advice = "begin another run, with another --out"
    return BudgetExceededError(
        f"{own.party}: {what} would bring epsilon to {epsilon:.4f}, over {limit} ({now:.4f} is "
        f"spent{had}); {advice}"
    )


def over_limit(book: LedgerBook, after: Session, *, what: str) -> BudgetExceededError:
    """Return the refusal of what the table's owner does not allow.

    Args:
        book: Of the table.
        after: The session as it would be.
        what: What was asked for.
    """
    unit, party = after.plan.privacy.unit, after.party
    limit, total = book.limits.get(unit), book.limited_total(after)
    if limit is None or total is None:
        limited = " and ".join(sorted(book.limits))
        return BudgetExceededError(
            f"{party}: the owner of this table has set a limit for unit = {limited}, which "
            f"does not count what this run spends for unit = {unit}; set one for that too: "
            f"securevfl ledger limit TABLE --unit {unit} --epsilon ..."
        )
    return BudgetExceededError(
        f"{party}: {what} would bring the total of all runs on this table to epsilon = "
        f"{total:.4f} at delta = {limit.delta:g}, over the limit of its owner, "
        f"{limit.epsilon:g} ({book.total(unit, delta=limit.delta):.4f} is spent); only the "
        f"owner can raise it: securevfl ledger limit"
    )
