"""The primary of a frozen run whose top model is tied: a convex fit."""

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.seeds import stream
from securevfl.data.rows import consecutive_batches
from securevfl.federation.one_fit import OneFitPrimary
from securevfl.federation.top_model import CorrectingTopModel
from securevfl.models.tied_top import TiedTop, fit_tied

_FOLDS = 5


class TiedPrimary(CorrectingTopModel, OneFitPrimary):
    """Fits a tied top model to released numbers, over the base."""

    top: TiedTop

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
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
        return loss, rows, self.out_of_fold

    def _base(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows outputs"]:
        assert self.data.base is not None, "checked with the federation file"
        return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]

    def _released(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows width"]:
        parts = [
            self.exchange.release(self._plan(batch, "train", self.exchange.ranks)).flatten(1)
            for batch in consecutive_batches(rows, batch_size=self.batch_size)
        ]
        return torch.cat(parts)
