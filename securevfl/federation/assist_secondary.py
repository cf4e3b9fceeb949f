"""A secondary of assisted boosting: it fits models of its own, and answers with their scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn

from securevfl.core.seeds import derive_seed
from securevfl.federation.assist_allowance import AssistAllowance
from securevfl.federation.assist_messages import AssistKind, Fitted, Residuals, Step
from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.release import Contribution
from securevfl.federation.rounds import RoundPlan
from securevfl.federation.secondary import Secondary, SecondaryData
from securevfl.models.assist.halves import AssistBottom
from securevfl.models.assist.local import cross_fit, within_ball
from securevfl.transport.message import Message


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
        contribution: Contribution,
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

    def hear(self, message: Message) -> Fitted | None:
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
        return Fitted()

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
