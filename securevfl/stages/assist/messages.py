"""Messages of assisted boosting, and the order in which they are due."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
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


_TRAIN: Final = "train"


class AssistValidator(RequestValidator):
    """An epoch is a round of boosting, and goes like this.

    Residuals of every training row, each once, and the same rows in all epochs; training rounds of
    those rows; the step; validation rounds and the epoch's mark, as in any run.
    """

    def __init__(self, limits: SessionLimits) -> None:
        super().__init__(limits)
        self._told: Bool[np.ndarray, " rows"] = np.zeros(limits.rows, dtype=np.bool_)
        """Rows that have residuals in this epoch."""
        self._trains: Bool[np.ndarray, " rows"] | None = None
        """Rows that had residuals in the first epoch of this session."""
        self._stepped = False

    def validate_residuals(self, epoch: int, rows: Int64[np.ndarray, " some"]) -> bool:
        """Take residuals into account, or refuse them.

        Returns:
            Whether the epoch has those of all training rows.

        Raises:
            ProtocolError: If they are not due; of rows that there are not, twice, or more than the
                training rows; or of other rows than before.
        """
        where = f"residuals of round {epoch}"
        due = self.next_epoch
        if epoch != due or self._told_all():
            now = "training is over" if due is None else f"round {due} is under way"
            raise ProtocolError(f"{where}: are not due; {now}")
        if rows.min() < 0 or rows.max() >= self.limits.rows:
            raise ProtocolError(f"{where}: there are no such rows among {self.limits.rows}")
        if len(np.unique(rows)) != len(rows) or self._told[rows].any():
            raise ProtocolError(f"{where}: the primary sends those of a row twice")
        others = self._trains is not None and not self._trains[rows].all()
        if others or self.used_for_another(_TRAIN, rows):
            raise ProtocolError(f"{where}: the primary sends those of rows that do not train")
        most = self.limits.part_rows[_TRAIN]
        if int(self._told.sum()) + len(rows) > most:
            raise ProtocolError(f"{where}: the primary sends more than the {most} training rows'")
        self._told[rows] = True
        if not self._told_all():
            return False
        self._trains = self._told.copy()
        return True

    def _told_all(self) -> bool:
        """Whether the epoch has the residuals of all training rows."""
        return int(self._told.sum()) == self.limits.part_rows[_TRAIN]

    def validate_round(self, plan: RoundPlan) -> None:
        """Take a round into account, or refuse it; see :meth:`RequestValidator.validate_round`.

        Raises:
            ProtocolError: If it is of training rows whose residuals have not come, or of validation
                rows before the step.
        """
        where = f"round {plan.round_number}"
        if plan.purpose == _TRAIN:
            known = (plan.rows >= 0) & (plan.rows < self.limits.rows)
            if self._stepped or not self._told_all() or not self._told[plan.rows[known]].all():
                raise ProtocolError(f"{where}: scores of training rows follow their residuals")
        elif plan.purpose == "validation" and not self._stepped:
            raise ProtocolError(f"{where}: validation rows follow the step")
        super().validate_round(plan)

    def validate_step(self, epoch: int) -> None:
        """Take an epoch's step into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if epoch != self.next_epoch or self._stepped or not self._training_complete():
            raise ProtocolError(f"the step of round {epoch} is not due")
        self._stepped = True

    def validate_epoch(self, mark: EpochMark) -> None:
        """Take the end of an epoch into account, or refuse it; see :class:`RequestValidator`.

        Raises:
            ProtocolError: If it is not due.
        """
        if mark.restore_best and self._told.any():
            raise ProtocolError("the primary ends training within a round of boosting")
        super().validate_epoch(mark)
        self._told[:] = False
        self._stepped = False
