"""A secondary of assisted boosting: messages, their validation, and its own models."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ProtocolError
from securevfl.federation.exchange import EpochMark, RoundPlan
from securevfl.federation.rounds.release import SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary, SecondaryData
from securevfl.federation.rounds.updates import DropoutStream
from securevfl.federation.session.allowance import Allowance, SessionLimits
from securevfl.models.assist import AssistBottom, cross_fit, within_ball
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage, wire

# What the primary and the secondaries of assisted boosting tell one another beside rounds.

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
class ModelFitted(TypedMessage):
    """The secondary has fitted a model to the round's residuals. Tells nothing else."""

    KIND: ClassVar = AssistKind.FITTED
    WAY: ClassVar = "secondary to primary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(DeclaredMessage):
    """The weight of a round's models in predictions: how far the primary went along their sum."""

    KIND: ClassVar = AssistKind.STEP
    WAY: ClassVar = "primary to every secondary"

    epoch: int
    step: float = wire(least=0)


# What the primary may ask for in a run of assisted boosting, and in which order.

_TRAIN: Final = "train"


class AssistAllowance(Allowance):
    """An epoch is a round of boosting, and goes like this.

    Residuals of every training row, each once, and the same rows in all epochs; training rounds of
    those rows; the step; validation rounds and the epoch's mark, as in any run.
    """

    def __init__(self, limits: SessionLimits) -> None:
        super().__init__(limits)
        self._told: Bool[np.ndarray, " rows"] = np.zeros(limits.rows, dtype=np.bool_)
        """Rows of which this epoch has residuals."""
        self._trains: Bool[np.ndarray, " rows"] | None = None
        """Rows of which the first epoch of this session had residuals."""
        self._stepped = False

    def admit_residuals(self, epoch: int, rows: Int64[np.ndarray, " some"]) -> bool:
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

    def admit_round(self, plan: RoundPlan) -> None:
        """Take a round into account, or refuse it; see :meth:`Allowance.admit_round`.

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
        super().admit_round(plan)

    def admit_step(self, epoch: int) -> None:
        """Take an epoch's step into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if epoch != self.next_epoch or self._stepped or not self._trained():
            raise ProtocolError(f"the step of round {epoch} is not due")
        self._stepped = True

    def admit_epoch(self, mark: EpochMark) -> None:
        """Take the end of an epoch into account, or refuse it; see :meth:`Allowance.admit_epoch`.

        Raises:
            ProtocolError: If it is not due.
        """
        if mark.restore_best and self._told.any():
            raise ProtocolError("the primary ends training within a round of boosting")
        super().admit_epoch(mark)
        self._told[:] = False
        self._stepped = False


# A secondary of assisted boosting: it fits models of its own, and answers with their scores.


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    """The model of the round that is under way."""

    model: Any
    scores: Float32[np.ndarray, "rows outputs"]
    """Out of fold, of every row that the primary has; zero where nothing is scored."""


class AssistSecondary(Secondary):
    """Answers for training rows with scores out of fold, of the round's model alone.

    All other rows get the scores of all rounds' models at once. Scores are scaled so that one of
    norm 1 is as long as the cut allows.
    """

    hears = (AssistKind.RESIDUALS, AssistKind.STEP)

    def __init__(
        self,
        data: SecondaryData,
        bottom: nn.Module,
        contribution: SecondaryRelease,
        *,
        allowance: AssistAllowance,
        dropout: DropoutStream,
        seed: int,
    ) -> None:
        """Make it; arguments as of :class:`Secondary`.

        Args:
            data: Its table and links.
            bottom: Its models, as far as there are any.
            contribution: Bounds and books what leaves.
            allowance: What the primary may ask for in this session.
            dropout: As every secondary has it; nothing is dropped here.
            seed: Run seed, of folds and trees.
        """
        super().__init__(
            data, bottom, contribution, allowance=allowance, dropout=dropout, optimizer=None
        )
        assert isinstance(bottom, AssistBottom), "the family builds it"
        self._models = bottom
        self._admits = allowance
        self._seed = seed
        self._told: list[Residuals] = []
        self._round: _Round | None = None

    def hear(self, message: Message) -> ModelFitted | None:
        """Take residuals, or the step that ends a round.

        Returns:
            That a model is fitted, when the residuals of all training rows have come.

        Raises:
            ProtocolError: If the message is not due, or not what its type says.

        Reveals:
            To the primary: how long fitting took.
        """
        if message.kind is AssistKind.STEP:
            step = Step.from_message(message)
            self._admits.admit_step(step.epoch)
            assert self._round is not None, "a step is due after scores"
            if step.step:
                self._models.add(self._round.model, step.step)
            self._round = None
            return None
        told = Residuals.from_message(message, outputs=self._models.config.outputs)
        whole = self._admits.admit_residuals(told.epoch, told.rows)
        self._told.append(told)
        if not whole:
            return None
        self._fit()
        return ModelFitted()

    def _fit(self) -> None:
        """Fit the round's model to what was told, and score the training rows out of fold."""
        epoch = self._told[0].epoch
        rows = np.concatenate([one.rows for one in self._told])
        residuals = np.concatenate([one.residuals for one in self._told])
        self._told = []
        # In one order, however the primary has cut its rows into messages.
        order = np.argsort(rows)
        rows, residuals = rows[order], residuals[order]
        linked, inputs = self._inputs(rows)
        model, scores = cross_fit(
            self._models.config,
            inputs,
            residuals[linked],
            seed=derive_seed(self._seed, "assist", self.name, epoch) % 2**32,
        )
        whole = np.zeros((self.data.primary_rows, residuals.shape[1]), dtype=np.float32)
        whole[rows[linked]] = within_ball(scores)
        self._round = _Round(model=model, scores=whole)

    def _inputs(self, rows: Int64[np.ndarray, " rows"]) -> tuple[Int64[np.ndarray, " linked"], Any]:
        """Return which of the rows are linked, and what models read of these."""
        records = self.linked_records(rows)
        linked = np.flatnonzero(records.present.any(dim=1).cpu().numpy())
        inputs = self._models.inputs(records.features, records.keys, records.present)
        return linked, inputs[linked]

    def _of_round(self, plan: RoundPlan) -> Tensor:
        longest = self.contribution.aggregation.clip_norm
        if plan.purpose != "train":
            return longest * super()._of_round(plan)
        assert self._round is not None, "scores are due after residuals"
        scores = torch.from_numpy(self._round.scores[plan.rows]).unsqueeze(1)
        return longest * scores.to(self.device)
