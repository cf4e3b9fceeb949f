"""What the primary and the secondaries of assisted boosting tell one another beside rounds."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message, MessageKind, TypedMessage

_ROUNDING: Final = 1e-5
"""By how much a residual's norm may be over 1: float32 is not exact."""


class AssistKind(MessageKind):
    """What assisted boosting says."""

    RESIDUALS = 40
    FITTED = 41
    STEP = 42


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Residuals(TypedMessage):
    """What is left to explain of some training rows' labels, in units of the longest.

    Labels can be read off them: their sign, or the class whose residual is positive. With
    ``model.label_epsilon`` these are labels that were drawn once.
    """

    KIND: ClassVar = AssistKind.RESIDUALS
    WAY: ClassVar = "primary to every secondary"

    epoch: int
    """The round of boosting, from 1."""
    rows: npt.NDArray[np.int64] = field(repr=False)
    """Primary row ids, shape (n,)."""
    residuals: npt.NDArray[np.float32] = field(repr=False)
    """Shape (n, O), each of norm at most 1."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(
            kind=self.KIND,
            meta={"epoch": self.epoch},
            tensors={"rows": self.rows, "residuals": self.residuals},
        )

    @classmethod
    def from_message(cls, message: Message, *, outputs: int) -> "Residuals":
        """Read the primary's; whether they are due, says the allowance.

        Raises:
            ProtocolError: If there are none, or one is of another shape, not finite or too long.
        """
        rows = message.tensor("rows", dtype=np.int64, shape=(None,))
        if not len(rows):
            raise ProtocolError("the primary sent residuals of no rows")
        shape = (len(rows), outputs)
        residuals = message.tensor("residuals", dtype=np.float32, shape=shape)
        longest = float(np.linalg.norm(residuals.astype(np.float64), axis=1).max())
        if longest > 1 + _ROUNDING:
            raise ProtocolError(f"the primary sent a residual of norm {longest:.4g}; 1 is the most")
        return cls(epoch=message.figure("epoch", int), rows=rows, residuals=residuals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted(TypedMessage):
    """The secondary has fitted a model to the round's residuals. Tells nothing else."""

    KIND: ClassVar = AssistKind.FITTED
    WAY: ClassVar = "secondary to primary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(TypedMessage):
    """The weight of a round's models in predictions: how far the primary went along their sum."""

    KIND: ClassVar = AssistKind.STEP
    WAY: ClassVar = "primary to every secondary"

    epoch: int
    step: float

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"epoch": self.epoch, "step": self.step})

    @classmethod
    def from_message(cls, message: Message) -> "Step":
        """Read the primary's.

        Raises:
            ProtocolError: If it is negative or not finite.
        """
        step = message.figure("step", float)
        if not (math.isfinite(step) and step >= 0):
            raise ProtocolError(f"the primary sent a step of {step}; it is at least 0")
        return cls(epoch=message.figure("epoch", int), step=step)
