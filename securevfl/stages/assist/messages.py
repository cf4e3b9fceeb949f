"""Messages of assisted boosting beside those of rounds."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, wire

_ROUNDING: Final = 1e-5
"""By how much a residual's norm may be over 1: float32 is not exact."""


class AssistKind(MessageKind):
    """What assisted boosting says."""

    RESIDUALS = 40
    FITTED = 41
    STEP = 42


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Residuals(DeclaredMessage):
    """What is left to explain of some training rows' labels, in units of the longest.

    Labels can be read off them: their sign, or the class whose residual is positive. With
    ``model.label_epsilon`` these are labels that were drawn once.
    """

    KIND: ClassVar = AssistKind.RESIDUALS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "epoch",
        "sizes and times": "rows lengths",
        "residuals": "residuals",
    }

    epoch: int
    """The round of boosting, from 1."""
    rows: Int64[np.ndarray, " some_rows"] = wire(repr=False)
    """Primary row ids."""
    residuals: Float32[np.ndarray, "some_rows outputs"] = wire(repr=False)
    """Each of norm at most 1."""

    @classmethod
    def from_message(cls, message: Message, **known: Any) -> "Residuals":
        """Read the primary's.

        Raises:
            ProtocolError: If there are none, or one is of another shape, not finite or too long.
        """
        read = super(Residuals, cls).from_message(message, **known)
        longest = float(np.linalg.norm(read.residuals.astype(np.float64), axis=1).max())
        if longest > 1 + _ROUNDING:
            raise ProtocolError(f"the primary sent a residual of norm {longest:.4g}; 1 is the most")
        return read


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFitted(DeclaredMessage):
    """The secondary has fitted a model to the round's residuals."""

    KIND: ClassVar = AssistKind.FITTED
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(DeclaredMessage):
    """The weight of a round's models in predictions: how far the primary went along their sum."""

    KIND: ClassVar = AssistKind.STEP
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "epoch lengths", "residuals": "step"}

    epoch: int
    step: float = wire(least=0)
