"""The primary of a frozen run whose top model is tied: one convex fit, no epochs."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.progress import Observer
from securevfl.core.seeds import stream
from securevfl.data.rows import consecutive_batches
from securevfl.federation.primary import Primary, PrimaryData
from securevfl.federation.rounds import EpochMark, Exchange
from securevfl.federation.run_plan import RunPlan
from securevfl.models.tied_top import TiedTop, fit_tied

_FOLDS = 5


class TiedPrimary(Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    top: TiedTop

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
        top: TiedTop,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            top: Not fitted yet.
            exchange: Where released rows are.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.epochs = 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.finished:
            self._run_epoch(after_epoch)

    def _train_epoch(self, epoch: int) -> tuple[float, tuple[Tensor, Tensor]]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, their outputs and labels."""
        rows = self.data.training_rows
        base, targets = self._base(rows), self._targets(rows)
        drawn = stream(self.seed, "tied-folds").permutation(len(rows)) % _FOLDS
        fitted, added = fit_tied(
            lambda: TiedTop(width=len(self.top.tie), outputs=self.head.outputs).to(base.device),
            self._released(rows),
            base,
            targets,
            self.head,
            folds=torch.from_numpy(drawn).to(base.device),
        )
        self.top.load_state_dict(fitted.state_dict())
        self.out_of_fold = base + added.to(base)
        loss = float(self.head.loss(self.out_of_fold, targets))
        self.losses.append(loss)
        return loss, (self.out_of_fold, targets)

    def _base(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows outputs"]:
        assert self.data.base is not None, "checked with the federation file"
        return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]

    def _released(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows width"]:
        parts = [
            self.exchange.release(self._plan(batch, "train", self.exchange.ranks)).flatten(1)
            for batch in consecutive_batches(rows, batch_size=self.batch_size)
        ]
        return torch.cat(parts)
