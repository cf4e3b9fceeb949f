"""The primary of assisted boosting: residuals out, the sum of scores in, one step along it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.progress import RoundDone
from securevfl.data.rows import consecutive_batches
from securevfl.federation.rounds.primary import Primary
from securevfl.stages.assist.halves import AssistTop
from securevfl.stages.assist.labels import ReleasedLabels
from securevfl.stages.assist.messages import ModelFitted, Residuals, Step
from securevfl.stages.assist.steps import best_step, constant_margin, residuals_of


class AssistPrimary(Primary):
    """An epoch is a round of boosting; nothing is learned by gradients.

    References:
        Gradient Assisted Learning (Diao et al., NeurIPS 2022): residuals are negative gradients,
        and a line search sets the step. Weights of its own for each assistant are not possible
        here: only the sum of their scores is known.
    """

    top: AssistTop

    _told: ReleasedLabels | None = None
    """Released labels that residuals and steps are made of; None: labels as they are."""

    _sum: Float[Tensor, "train outputs"] | None = None
    """Scores of the training rows, out of fold, each round's times its step; None before the first
    round."""

    _total = 0.0
    """The steps of all rounds, in units of the average."""

    _scale = 1.0
    """Weight of outputs in the sum. It is 1 where residuals are made of labels as they are;
    otherwise the primary chooses it by its drawn labels, and sends it to no party."""

    _stands_still = False
    """True if the last round's scores brought nothing: another round's residuals would be equal."""

    def use_released_labels(self, labels: ReleasedLabels | None) -> None:
        """Make all later residuals of these labels; None: of labels as they are."""
        self._told = labels

    @property
    def always_asks(self) -> bool:  # type: ignore[override]
        """Whether labels have an epsilon: then they don't decide who is asked for what."""
        return self._told is not None

    @property
    def is_finished(self) -> bool:
        """Whether the last round is done, or a round has brought nothing.

        Patience asks labels as they are, and secondaries see when training ends: it has no say
        where labels have an epsilon.
        """
        if self._told is not None:
            return self._stands_still or self.epoch >= self.epochs
        return self._stands_still or super().is_finished

    def _take_if_best(self, epoch: int, metric: float, threshold: float, outputs: Tensor) -> bool:
        """Keep an epoch if none before it is as good; where labels have an epsilon, always.

        Secondaries are told which epoch is the best.
        """
        if self._told is not None:
            self.best_metric = None
        return super()._take_if_best(epoch, metric, threshold, outputs)

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:
        """Return the mean loss after the step, and every row with its margins."""
        rows = self.data.training_rows
        targets, start = self.targets_of(rows), self._begin(rows)
        labels = self._told or ReleasedLabels(targets=targets, margins=start)
        known = torch.zeros_like(start) if self._sum is None else self._sum
        margins = labels.margins + known
        residuals = residuals_of(margins, labels.targets, self.head)
        longest = float(torch.linalg.vector_norm(residuals, dim=1).max())
        parts = consecutive_batches(rows, batch_size=self.batch_size)
        sent, peers = 0, self.exchange.peers
        for part in parts:
            some = residuals[sent : sent + len(part)] / max(longest, 1e-12)
            sent += len(part)
            message = Residuals(epoch=epoch, rows=part, residuals=some.float().cpu().numpy())
            if sent < len(rows):
                peers.tell(message)
            else:
                peers.ask(message, ModelFitted)
        before = float(self.head.loss(start + self._scale * known, targets))
        scores = []
        for done, part in enumerate(parts, 1):
            plan = self._plan(part, "train", self.exchange.ranks)
            scores.append(self.exchange.release(plan)[:, 0])
            self.losses.append(before)
            self.observe(RoundDone(epoch=epoch, done=done, of=len(parts), loss=before))
        all_scores = torch.cat(scores)
        # Scores as long as the cut allows are of norm 1, and what comes back is their average.
        unit = len(self.exchange.ranks) / self.plan.config.privacy.clip_norm
        step = best_step(margins, all_scores * unit, labels.targets, self.head, unit=longest)
        peers.tell(Step(epoch=epoch, step=step))
        self._stands_still = step == 0
        self._sum = known + step * unit * all_scores
        self._total += step * unit
        if self._told is not None:
            self._scale = best_step(start, self._sum, targets, self.head, unit=1.0)
        self.top.scale.fill_(self._scale * self._total)
        outputs = start + self._scale * self._sum
        return float(self.head.loss(outputs, targets)), rows, outputs

    def _begin(self, rows: Int64[np.ndarray, " train"]) -> Tensor:
        """Return margins before the first round: the base's, or what labels say by themselves."""
        if self.data.base is not None:
            return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]
        targets = self.targets_of(rows)
        self.top.start.copy_(constant_margin(targets, self.head))
        return self.top.start.detach().expand(len(targets), -1).clone()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            **super().state(),
            "sum": self._sum,
            "total": self._total,
            "scale": self._scale,
            "stands_still": self._stands_still,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        super().load_state(state)
        self._sum = state["sum"].to(self.data.targets.device)
        self._total, self._scale = state["total"], state["scale"]
        self._stands_still = state["stands_still"]
