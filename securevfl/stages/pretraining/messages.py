"""Messages of pretraining, and the order in which they are due."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.models.family import PretrainingSettings
from securevfl.transport.message import DeclaredMessage, MessageKind, wire


class PretrainingKind(MessageKind):
    """Kinds of messages of pretraining."""

    PRETRAIN = 32
    CROSS = 33
    PROJECTIONS = 34
    LOCAL = 35
    TOPS = 36
    PRETRAINED = 37


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationBegin(DeclaredMessage):
    """An iteration of pretraining begins.

    It names the primary's rows that are held out for validation and testing.
    """

    KIND: ClassVar = PretrainingKind.PRETRAIN
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "iteration lengths",
        "pretraining, from the primary": "held_out",
    }

    iteration: int
    """Counts from 0."""

    held_out: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossBatch(DeclaredMessage):
    """Row ids of a batch and the primary's projections of them."""

    KIND: ClassVar = PretrainingKind.CROSS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "round_number",
        "pretraining, from the primary": "rows sent lengths",
    }

    round_number: int
    rows: Int64[np.ndarray, " some_rows"]
    sent: Float32[np.ndarray, "some_rows width"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projections(DeclaredMessage):
    """The secondary's projections of the batch in clear.

    Only in a plain exchange; in an averaged one the secondary sends a share.
    """

    KIND: ClassVar = PretrainingKind.PROJECTIONS
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {
        "no record": "round_number lengths",
        "pretraining, to the primary": "vectors",
    }

    round_number: int
    vectors: Float32[np.ndarray, "*shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnLocally(DeclaredMessage):
    """Learn from your own records."""

    KIND: ClassVar = PretrainingKind.LOCAL
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iteration lengths"}

    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopsRequest(DeclaredMessage):
    """Send your local top encoder's words."""

    KIND: ClassVar = PretrainingKind.TOPS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "round_number lengths"}

    round_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationEnd(DeclaredMessage):
    """So many iterations are done, and whether it was the last."""

    KIND: ClassVar = PretrainingKind.PRETRAINED
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iterations last lengths"}

    iterations: int = wire(least=1)
    last: bool


@dataclass(eq=False)
class PretrainingValidator:
    """Validates the primary's messages against the plan of pretraining.

    Iterations come in order, each with the steps that the family has: batches of rows that are
    linked here and not held out, each row so often as ``pretraining.cross_epochs`` says; local
    learning once; an average of local top encoders once. What is held out stays what it was.
    """

    settings: PretrainingSettings
    _: KW_ONLY
    steps: tuple[str, ...]
    """Steps of an iteration that the family has."""
    learning_rows: int
    """The primary's rows that are neither for validation nor for testing."""
    linked: Bool[np.ndarray, " rows"]
    """True for each of the primary's rows that has a link at this secondary."""
    done: int
    """Iterations that are done."""
    take_round: Callable[[int], None]
    """Refuses a round number that the session has used."""
    _held_out: np.ndarray | None = field(default=None, init=False)
    _batches: int = field(default=0, init=False)
    _open: bool = field(default=False, init=False)
    _steps_done: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._total, self._passes = self.settings.iterations, self.settings.cross_epochs
        self._rows = len(self.linked)
        self.done = min(self.done, self._total)
        # Where all is learned already, the last iteration is opened once more, and stays empty.
        self._empty = self.done == self._total
        self._uses = np.zeros(self._rows, dtype=np.int64)

    def validate_begin(self, begin: IterationBegin) -> None:
        """Take the beginning of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due, or holds out other rows than before.
        """
        due = self._total - 1 if self._empty else self.done
        if self._open or begin.iteration != due or due >= self._total:
            raise ProtocolError(
                f"pretraining: iteration {begin.iteration + 1} is not due; {self.done} of "
                f"{self._total} are done"
            )
        held = begin.held_out
        outside = len(held) and (held.min() < 0 or held.max() >= self._rows)
        if (
            outside
            or len(np.unique(held)) != self._rows - self.learning_rows
            or len(held) != len(np.unique(held))
        ):
            raise ProtocolError(
                f"pretraining: the primary holds out {len(held)} rows; its validation and test "
                f"rows are {self._rows - self.learning_rows}"
            )
        if self._held_out is not None and not np.array_equal(held, self._held_out):
            raise ProtocolError("pretraining: the primary holds out other rows than before")
        self._held_out = held
        self._open = True
        self._uses[:] = 0
        self._batches = 0
        self._steps_done.clear()

    def validate_batch(self, batch: CrossBatch) -> None:
        """Take a batch into account, or refuse it.

        Raises:
            ProtocolError: If no batch is due, or it names rows that it must not.
        """
        where, rows = f"round {batch.round_number}", batch.rows
        self.take_round(batch.round_number)
        self._require_step("cross", after={"local", "aggregate"}, where=where)
        most = self._passes * math.ceil(self.learning_rows / self.settings.batch_size)
        if len(rows) > self.settings.batch_size or self._batches >= most:
            raise ProtocolError(
                f"{where}: the primary names {len(rows)} rows in batch {self._batches + 1} of an "
                f"iteration, which has at most {most} of {self.settings.batch_size}"
            )
        if rows.min() < 0 or rows.max() >= self._rows:
            raise ProtocolError(
                f"{where}: the primary names rows outside the {self._rows} that it has"
            )
        strangers = int((~self.linked[rows]).sum())
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

    def validate_local(self, request: LearnLocally) -> None:
        """Take local learning into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if request.iteration != self.done:
            raise ProtocolError(f"pretraining: iteration {request.iteration + 1} is not due")
        self._require_step("local", after={"local", "aggregate"}, where="local learning")
        self._steps_done.add("local")

    def validate_tops(self, round_number: int) -> None:
        """Take an average of local top encoders into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        self.take_round(round_number)
        self._require_step("aggregate", after={"aggregate"}, where=f"round {round_number}")
        self._steps_done.add("aggregate")

    def validate_end(self, end: IterationEnd) -> None:
        """Take the end of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        due = self._total if self._empty else self.done + 1
        if not self._open or end.iterations != due or end.last != (due == self._total):
            raise ProtocolError(
                f"pretraining: the end of iteration {end.iterations} is not due; {self.done} of "
                f"{self._total} are done"
            )
        self._open = False
        self.done = due

    def _require_step(self, step: str, *, after: set[str], where: str) -> None:
        if not self._open or self._empty or step not in self.steps or after & self._steps_done:
            raise ProtocolError(f"{where}: the step {step!r} of pretraining is not due")
