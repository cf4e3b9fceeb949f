"""A secondary of assisted boosting: it fits models of its own, and answers with their scores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.session.peers import Handler, Handlers, Reply
from securevfl.stages.assist.halves import AssistBottom
from securevfl.stages.assist.local_models import cross_fit, within_ball
from securevfl.stages.assist.messages import ModelFitted, Residuals, Step
from securevfl.stages.assist.validator import AssistValidator


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    """The model of the round that is under way."""

    model: Any
    scores: Float32[np.ndarray, "rows outputs"]
    """Out of fold, of every row that the primary has; zero where nothing is scored."""


@dataclass(eq=False)
class AssistSecondary(Secondary):
    """Answers for training rows with scores out of fold, of the round's model alone.

    All other rows get the scores of all rounds' models at once. Scores are scaled so that one of
    norm 1 is as long as the cut allows.
    """

    bottom: AssistBottom
    """Its models, as far as there are any."""
    validator: AssistValidator = field(kw_only=True)
    seed: int = field(kw_only=True)
    """Run seed, of folds and trees."""
    _told: list[Residuals] = field(default_factory=list, init=False)
    _round: _Round | None = field(default=None, init=False)

    def _handlers(self, end_epoch: Callable[[EpochMark], None]) -> Handlers:
        """Return what it does with each message type; see :meth:`Secondary.handlers`."""
        return {
            **super()._handlers(end_epoch),
            Residuals: Handler(self._residuals, lambda: {"outputs": self.bottom.config.outputs}),
            Step: Handler(self._step),
        }

    @property
    def _fitted_round(self) -> _Round:
        """The round that is under way, whose model is fitted."""
        if self._round is None:
            raise ProtocolError("scores and steps are due after residuals")
        return self._round

    def _residuals(self, residuals: Residuals, reply: Reply) -> None:
        """Take residuals; fit a model and say so when those of all training rows have come."""
        whole = self.validator.validate_residuals(residuals.epoch, residuals.rows)
        self._told.append(residuals)
        if whole:
            self._fit()
            reply.send(ModelFitted())

    def _step(self, step: Step, _reply: Reply) -> None:
        """End a round of boosting: its model counts as much as the step says."""
        self.validator.validate_step(step.epoch)
        if step.step:
            self.bottom.add(self._fitted_round.model, step.step)
        self._round = None

    def _fit(self) -> None:
        """Fit the round's model to the residuals, and score the training rows out of fold."""
        epoch = self._told[0].epoch
        rows = np.concatenate([message.rows for message in self._told])
        residuals = np.concatenate([message.residuals for message in self._told])
        self._told = []
        # In one order, however the primary has cut its rows into messages.
        order = np.argsort(rows)
        rows, residuals = rows[order], residuals[order]
        linked, inputs = self._inputs(rows)
        model, scores = cross_fit(
            self.bottom.config,
            inputs,
            residuals[linked],
            seed=derive_seed(self.seed, "assist", self.name, epoch) % 2**32,
        )
        whole = np.zeros((self.data.primary_rows, residuals.shape[1]), dtype=np.float32)
        whole[rows[linked]] = within_ball(scores)
        self._round = _Round(model=model, scores=whole)

    def _inputs(self, rows: Int64[np.ndarray, " rows"]) -> tuple[Int64[np.ndarray, " linked"], Any]:
        """Return which of the rows are linked, and what models read of these."""
        records = self.linked_records(rows)
        linked = np.flatnonzero(records.present.any(dim=1).cpu().numpy())
        inputs = self.bottom.inputs(records.features, records.keys, records.present)
        return linked, inputs[linked]

    def represent(self, plan: RoundPlan) -> Tensor:
        """Return scores of a round's rows: of training rows, those of the round's model alone."""
        longest = self.contribution.aggregation.clip_norm
        if plan.purpose != "train":
            return longest * super().represent(plan)
        scores = torch.from_numpy(self._fitted_round.scores[plan.rows]).unsqueeze(1)
        return longest * scores.to(self.device)
