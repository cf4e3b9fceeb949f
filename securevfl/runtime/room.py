"""What a budget still has room for: one more epoch, and the test rows."""

import math
from collections.abc import Sequence

import torch

from securevfl.config.losses import keeps_room
from securevfl.core.errors import BudgetExceededError
from securevfl.data.rows import RowSplit, consecutive_batches
from securevfl.federation.kept_test import KeptTestRounds
from securevfl.federation.ledger import Ledger
from securevfl.federation.primary import Primary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.state_files import StateFolder


def for_an_epoch(plan: RunPlan, split: RowSplit, ledger: Ledger) -> bool:
    """Return whether one more epoch and the final test fit into the budget.

    A run that was resumed has less left than a fresh one: it stops early rather than fail. Where
    room is kept for a loss (:func:`config.losses.keeps_room`), it is left as it is.
    """
    batch, spare = plan.config.training.batch_size, int(keeps_room(plan.config))
    parts = (len(split.train), len(split.validation), *[len(split.test)] * (1 + spare))
    return _covers(
        ledger,
        rounds=sum(math.ceil(rows / batch) for rows in parts),
        rows=sum(parts),
        passes=1 + spare,
    )


def for_test_rows(
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
    data = primary.data
    parts = consecutive_batches(data.split.test, batch_size=plan.config.training.batch_size)
    missing = [len(part) for part in parts]
    if files is not None:
        kept = KeptTestRounds(
            primary.exchange,
            files,
            [torch.from_numpy(part) for part in parts],
            top=primary.top,
            shape=plan.cut.shape,
            device=data.features.device,
        )
        primary.exchange, missing = kept, kept.missing()
    return for_test_rounds(ledger, missing)


def for_test_rounds(ledger: Ledger, rounds: Sequence[int]) -> bool:
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
