"""The primary of assisted boosting: residuals out, the sum of scores in, one step along it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.progress import RoundDone
from securevfl.data.rows import consecutive_batches
from securevfl.federation.assist_messages import AssistKind, Residuals, Step
from securevfl.federation.primary import Primary
from securevfl.models.assist.halves import AssistTop
from securevfl.models.assist.line_search import best_step, constant_margin, residuals_of


class AssistPrimary(Primary):
    """An epoch is a round of boosting; nothing is learned by gradients.

    References:
        Gradient Assisted Learning (Diao et al., NeurIPS 2022): residuals are negative gradients,
        and a line search sets the step. Weights of its own for each assistant are not possible
        here: only the sum of their scores is known.
    """

    _margins: Float[Tensor, "train outputs"] | None = None
    """Of the training rows, out of fold; None before the first round."""

    _stands_still = False
    """Whether the last round's scores have brought nothing: others' would be of equal residuals."""

    @property
    def finished(self) -> bool:
        """Whether the last round is done, or a round has brought nothing."""
        return self._stands_still or super().finished

    def _train_epoch(self, epoch: int) -> tuple[float, tuple[Tensor, Tensor]]:
        """Return the mean loss after the step, and every row's margins and targets."""
        rows = self.data.training_rows
        targets = self._targets(rows)
        margins = self._begin(rows) if self._margins is None else self._margins
        residuals = residuals_of(margins, targets, self.head)
        longest = float(torch.linalg.vector_norm(residuals, dim=1).max())
        parts = consecutive_batches(rows, batch_size=self.batch_size)
        told = 0
        for part in parts:
            sent = residuals[told : told + len(part)] / max(longest, 1e-12)
            told += len(part)
            self.exchange.tell(
                Residuals(epoch=epoch, rows=part, residuals=sent.float().cpu().numpy()),
                answer=AssistKind.FITTED if told == len(rows) else None,
            )
        before = float(self.head.loss(margins, targets))
        scores = []
        for done, part in enumerate(parts, 1):
            plan = self._plan(part, "train", self.exchange.ranks)
            scores.append(self.exchange.release(plan)[:, 0])
            self.losses.append(before)
            self.observe(RoundDone(epoch=epoch, done=done, of=len(parts), loss=before))
        found = torch.cat(scores)
        # Scores as long as the cut allows are of norm 1, and what comes back is their average.
        unit = len(self.exchange.ranks) / self.plan.config.privacy.clip_norm
        step = best_step(margins, found * unit, targets, self.head, unit=longest)
        self.exchange.tell(Step(epoch=epoch, step=step))
        self._stands_still = step == 0
        top = self.top
        assert isinstance(top, AssistTop), "the family builds it"
        top.scale.add_(step * unit)
        self._margins = margins + step * unit * found
        return float(self.head.loss(self._margins, targets)), (self._margins, targets)

    def _begin(self, rows: Int64[np.ndarray, " train"]) -> Tensor:
        """Return margins before the first round: the base's, or what labels say by themselves."""
        if self.data.base is not None:
            return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]
        targets = self._targets(rows)
        top = self.top
        assert isinstance(top, AssistTop), "the family builds it"
        top.start.copy_(constant_margin(targets, self.head))
        return top.start.detach().expand(len(targets), -1).clone()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {**super().state(), "margins": self._margins, "stands_still": self._stands_still}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        super().load_state(state)
        self._margins = state["margins"].to(self.data.targets.device)
        self._stands_still = state["stands_still"]
