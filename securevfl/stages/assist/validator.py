"""What the primary may ask for in a run of assisted boosting, and in which order."""

from typing import Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits

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
