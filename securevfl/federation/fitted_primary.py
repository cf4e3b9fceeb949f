"""The primary of a frozen run whose top model is an estimator."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.core.progress import Observer
from securevfl.data.rows import consecutive_batches
from securevfl.federation.one_fit import OneFitPrimary
from securevfl.federation.primary import PrimaryData
from securevfl.federation.rounds import Exchange
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.top_model import PrimaryInputs
from securevfl.models.alone.keeping import require_keepable
from securevfl.models.alone.margins import cross_fit
from securevfl.models.fitted_top import FittedTop


class FittedPrimary(OneFitPrimary):
    """Fits an estimator to own numbers, released ones and similarities."""

    top: FittedTop

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
        inputs: PrimaryInputs,
        top: FittedTop,
        exchange: Exchange,
        *,
        estimator: Any,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            inputs: The same as the estimator reads it.
            top: Not fitted yet.
            exchange: Where released rows are.
            estimator: A name, or one of scikit-learn.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.inputs = inputs
        self._estimator = estimator

    def take_base(self, margins: Float[Tensor, "rows outputs"]) -> None:
        """Let margins of the primary alone answer as far as the estimator's do not."""
        inputs = replace(self.inputs, base=margins)
        super().take_base(margins)
        self.inputs = inputs

    def _values(self, rows: Int64[np.ndarray, " rows"]) -> Float64[np.ndarray, "rows inputs"]:
        """Return what is known of rows: own numbers, released ones, similarities."""
        parts = []
        for batch in consecutive_batches(rows, batch_size=self.batch_size):
            plan = self._plan(batch, "train", self.exchange.ranks)
            (features, _, aggregate, similarities), _ = self._read(
                plan, self.exchange.release(plan)
            )
            parts.append(self.top.inputs(features, aggregate, similarities))
        return np.concatenate(parts)

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        values = self._values(rows)
        self.top.fill_gaps_by(values)
        targets = self._targets(rows)
        fitted = cross_fit(
            self._estimator,
            self.top.known(values),
            targets.cpu().numpy(),
            self.head,
            train=np.arange(len(rows)),
            seed=self.seed,
            where="model.top",
        )
        # Now, rather than when its file is read.
        require_keepable(fitted.model, where="model.top")
        self.top.model = fitted.model
        outputs = self.out_of_fold = torch.from_numpy(fitted.margins).to(targets.device)
        loss = float(self.head.loss(outputs, targets))
        self.losses.append(loss)
        return loss, rows, outputs
