"""The messages of pretraining, each checked where it is read."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message, MessageKind, TypedMessage


class PretrainingKind(MessageKind):
    """What parties tell one another to pretrain."""

    PRETRAIN = 32
    CROSS = 33
    PROJECTIONS = 34
    LOCAL = 35
    TOPS = 36
    PRETRAINED = 37


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationBegin(TypedMessage):
    """An iteration of pretraining begins.

    It names the primary's rows that are held out for validation and testing.
    """

    KIND: ClassVar = PretrainingKind.PRETRAIN
    WAY: ClassVar = "primary to every secondary"

    iteration: int
    """Counts from 0."""

    held_out: npt.NDArray[np.int64]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(
            kind=self.KIND,
            meta={"iteration": self.iteration},
            tensors={"held_out": self.held_out},
        )

    @classmethod
    def from_message(cls, message: Message) -> "IterationBegin":
        """Read the primary's.

        Raises:
            ProtocolError: If it is malformed.
        """
        held_out = message.tensor("held_out", dtype=np.int64, shape=(None,))
        return cls(iteration=message.figure("iteration", int), held_out=held_out)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossBatch(TypedMessage):
    """Row ids of a batch and the primary's projections of them.

    The projections carry the noise that ``pretraining.primary_sends`` or ``iso_projections`` asks
    for.
    """

    KIND: ClassVar = PretrainingKind.CROSS
    WAY: ClassVar = "primary to every secondary"

    round_number: int
    rows: npt.NDArray[np.int64]
    sent: npt.NDArray[np.float32]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(
            kind=self.KIND,
            round_number=self.round_number,
            tensors={"rows": self.rows, "sent": self.sent},
        )

    @classmethod
    def from_message(cls, message: Message, *, width: int) -> "CrossBatch":
        """Read the primary's.

        Raises:
            ProtocolError: If it names no rows, or its projections are not of that width.
        """
        number = message.round_number
        rows = message.tensor("rows", dtype=np.int64, shape=(None,))
        sent = message.tensor("sent", dtype=np.float32, shape=(len(rows), width))
        if not len(rows):
            raise ProtocolError(f"round {number}: the primary named no rows")
        return cls(round_number=number, rows=rows, sent=sent)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projections(TypedMessage):
    """The secondary's projections of the batch in clear.

    Only in a plain exchange; in an averaged one the secondary sends a share.
    """

    KIND: ClassVar = PretrainingKind.PROJECTIONS
    WAY: ClassVar = "secondary to primary"

    round_number: int
    vectors: npt.NDArray[np.float32]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(
            kind=self.KIND, round_number=self.round_number, tensors={"vectors": self.vectors}
        )

    @classmethod
    def from_message(cls, message: Message, *, shape: tuple[int, ...]) -> "Projections":
        """Read a secondary's.

        Raises:
            ProtocolError: If they are not of the primary's shape, or not finite.
        """
        vectors = message.tensor("vectors", dtype=np.float32, shape=shape)
        return cls(round_number=message.round_number, vectors=vectors)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnLocally(TypedMessage):
    """Learn from your own records. Tells nothing else."""

    KIND: ClassVar = PretrainingKind.LOCAL
    WAY: ClassVar = "primary to every secondary"

    iteration: int

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"iteration": self.iteration})

    @classmethod
    def from_message(cls, message: Message) -> "LearnLocally":
        """Read the primary's.

        Raises:
            ProtocolError: If it is malformed.
        """
        return cls(iteration=message.figure("iteration", int))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopsRequest(TypedMessage):
    """Send your local top encoder's words. Tells nothing else."""

    KIND: ClassVar = PretrainingKind.TOPS
    WAY: ClassVar = "primary to every secondary"

    round_number: int

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, round_number=self.round_number)


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationEnd(TypedMessage):
    """So many iterations are done, and whether it was the last."""

    KIND: ClassVar = PretrainingKind.PRETRAINED
    WAY: ClassVar = "primary to every secondary"

    iterations: int
    last: bool

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"iterations": self.iterations, "last": self.last})

    @classmethod
    def from_message(cls, message: Message) -> "IterationEnd":
        """Read the primary's.

        Raises:
            ProtocolError: If it is malformed.
        """
        iterations, last = message.figure("iterations", int), message.figure("last", bool)
        if iterations < 1:
            raise ProtocolError(f"the primary ended {iterations} iterations; they count from 1")
        return cls(iterations=iterations, last=last)
