"""Whether the primary's budget covers another epoch, and the test rows."""

import math
from collections.abc import Sequence

from securevfl.core.errors import BudgetExceededError
from securevfl.data.rows import RowSplit, consecutive_batches
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.kept_rounds import CachedTestRounds
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger


def covers_epoch(plan: RunPlan, split: RowSplit, ledger: Ledger) -> bool:
    """Return whether one more epoch and the final test fit into the budget.

    A run that was resumed has less left than a fresh one: it stops early rather than fail. Where
    room is kept for a loss (:attr:`FederationConfig.reserves_budget`), it is left as it is.
    """
    batch, spare = plan.config.training.batch_size, int(plan.config.reserves_budget)
    parts = (len(split.train), len(split.validation), *[len(split.test)] * (1 + spare))
    return _covers(
        ledger,
        rounds=sum(math.ceil(rows / batch) for rows in parts),
        rows=sum(parts),
        passes=1 + spare,
    )


def covers_test_rows(
    primary: Primary, plan: RunPlan, ledger: Ledger, files: StateFolder | None
) -> bool:
    """Return whether the budget covers the test rows that the primary has not seen yet.

    Args:
        primary: At its best epoch. Its exchange keeps test rounds from now on, where there is a
            place for them.
        plan: The run.
        ledger: The primary's.
        files: Its own; None keeps nothing.
    """
    rows, exchange = primary.data.split.test, primary.exchange
    parts = consecutive_batches(rows, batch_size=plan.config.training.batch_size)
    missing = [len(part) for part in parts]
    if files is not None and isinstance(exchange, RoundExchange):
        exchange.test_rounds = kept = CachedTestRounds(
            files, parts, top=primary.top, ranks=exchange.ranks, shape=plan.cut.shape
        )
        missing = kept.missing()
    return covers_test_rounds(ledger, missing)


def covers_test_rounds(ledger: Ledger, rounds: Sequence[int]) -> bool:
    """Return whether the budget covers test rounds of so many rows each."""
    # Each row is of one part of the table: a session's test rows are part of a pass it has made.
    passes = 0 if ledger.sessions[-1].passes else 1
    return _covers(ledger, rounds=len(rounds), rows=sum(rounds), passes=passes)


def _covers(ledger: Ledger, *, rounds: int, rows: int, passes: int) -> bool:
    try:
        ledger.require_room(rounds=rounds, row_releases=rows, passes=passes)
    except BudgetExceededError:
        return False
    return True
