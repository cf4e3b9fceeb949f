"""What the primary may still ask of one secondary in pretraining, and nothing besides."""

import math

import numpy as np
from jaxtyping import Bool

from securevfl.core.errors import ProtocolError
from securevfl.federation.allowance import Allowance
from securevfl.federation.run_plan import RunPlan
from securevfl.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
)


class PretrainingAllowance:
    """The plan of pretraining and what was used of it: whoever handles a message asks here first.

    Iterations come in order, each with the steps that the family has: batches of rows that are
    linked here and not held out, each row so often as ``pretraining.cross_epochs`` says; local
    learning once; an average of local top encoders once. What is held out stays what it was.
    """

    def __init__(
        self, plan: RunPlan, session: Allowance, *, linked: Bool[np.ndarray, " rows"]
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            session: What the session allows; it keeps the round numbers.
            linked: Which of the primary's rows have a link at this secondary.
        """
        settings, facts = plan.config.pretraining, plan.facts
        self._session = session
        self._steps = plan.config.family.pretraining
        self._total = settings.iterations
        self._passes = settings.cross_epochs
        self._batch_size = settings.batch_size
        self._rows = facts.rows
        self._linked = linked
        self._own = facts.train_rows + facts.unlabelled_rows
        self._done = min(facts.resume_pretraining, settings.iterations)
        # Where all is learned already, the last iteration is opened once more, and stays empty.
        self._empty = self._done == settings.iterations
        self._held_out: np.ndarray | None = None
        self._uses = np.zeros(facts.rows, dtype=np.int64)
        self._batches = 0
        self._open = False
        self._steps_done: set[str] = set()

    def admit_begin(self, begin: IterationBegin) -> None:
        """Take the beginning of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due, or holds out other rows than before.
        """
        due = self._total - 1 if self._empty else self._done
        if self._open or begin.iteration != due or due >= self._total:
            raise ProtocolError(
                f"pretraining: iteration {begin.iteration + 1} is not due; {self._done} of "
                f"{self._total} are done"
            )
        held = begin.held_out
        outside = len(held) and (held.min() < 0 or held.max() >= self._rows)
        if (
            outside
            or len(np.unique(held)) != self._rows - self._own
            or len(held) != len(np.unique(held))
        ):
            raise ProtocolError(
                f"pretraining: the primary holds out {len(held)} rows; its validation and test "
                f"rows are {self._rows - self._own}"
            )
        if self._held_out is not None and not np.array_equal(held, self._held_out):
            raise ProtocolError("pretraining: the primary holds out other rows than before")
        self._held_out = held
        self._open = True
        self._uses[:] = 0
        self._batches = 0
        self._steps_done.clear()

    def admit_batch(self, batch: CrossBatch) -> None:
        """Take a batch into account, or refuse it.

        Raises:
            ProtocolError: If no batch is due, or it names rows that it must not.
        """
        where, rows = f"round {batch.round_number}", batch.rows
        self._session.take_round(batch.round_number)
        self._require_step("cross", after={"local", "aggregate"}, where=where)
        most = self._passes * math.ceil(self._own / self._batch_size)
        if len(rows) > self._batch_size or self._batches >= most:
            raise ProtocolError(
                f"{where}: the primary names {len(rows)} rows in batch {self._batches + 1} of an "
                f"iteration, which has at most {most} of {self._batch_size}"
            )
        if rows.min() < 0 or rows.max() >= self._rows:
            raise ProtocolError(
                f"{where}: the primary names rows outside the {self._rows} that it has"
            )
        strangers = int((~self._linked[rows]).sum())
        if strangers:
            raise ProtocolError(
                f"{where}: the primary names {strangers} rows that have no link here, and only "
                f"aligned rows are learned from across parties"
            )
        held = np.zeros(0, dtype=np.int64) if self._held_out is None else self._held_out
        again = len(np.unique(rows)) != len(rows) or (self._uses[rows] >= self._passes).any()
        if again or np.isin(rows, held).any():
            raise ProtocolError(
                f"{where}: the primary names rows that are held out, or more often than "
                f"pretraining.cross_epochs = {self._passes}"
            )
        self._uses[rows] += 1
        self._batches += 1

    def admit_local(self, told: LearnLocally) -> None:
        """Take local learning into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if told.iteration != self._done:
            raise ProtocolError(f"pretraining: iteration {told.iteration + 1} is not due")
        self._require_step("local", after={"local", "aggregate"}, where="local learning")
        self._steps_done.add("local")

    def admit_tops(self, round_number: int) -> None:
        """Take an average of local top encoders into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        self._session.take_round(round_number)
        self._require_step("aggregate", after={"aggregate"}, where=f"round {round_number}")
        self._steps_done.add("aggregate")

    def admit_end(self, end: IterationEnd) -> None:
        """Take the end of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        due = self._total if self._empty else self._done + 1
        if not self._open or end.iterations != due or end.last != (due == self._total):
            raise ProtocolError(
                f"pretraining: the end of iteration {end.iterations} is not due; {self._done} of "
                f"{self._total} are done"
            )
        self._open = False
        self._done = due

    def _require_step(self, step: str, *, after: set[str], where: str) -> None:
        if not self._open or self._empty or step not in self._steps or after & self._steps_done:
            raise ProtocolError(f"{where}: the step {step!r} of pretraining is not due")
