"""The primary whose top model is fitted in one go to rows that are released once.

That is an estimator, or a convex correction of the base with trees beside it.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.conventions import stream
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.messages import EpochMark
from securevfl.federation.party_inputs import own_inputs
from securevfl.federation.rounds import primary
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.top_model import PrimaryInputs
from securevfl.federation.run_plan import RunPlan
from securevfl.models.alone.choice import require_keepable
from securevfl.models.alone.margins import cross_fit
from securevfl.models.fitted_top import FittedTop, MixedTop, TiedTop, fit_tied
from securevfl.models.tasks import TaskHead


class OneFitPrimary(primary.Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: primary.PrimaryData,
        inputs: PrimaryInputs,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            inputs: The same as the top model reads it.
            top: Not fitted yet.
            exchange: Where released rows are.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.inputs = inputs

    def take_base(self, margins: Float[Tensor, "rows outputs"]) -> None:
        """Let margins of the primary alone answer as far as the top model's do not."""
        inputs = replace(self.inputs, base=margins)
        super().take_base(margins)
        self.inputs = inputs

    def _values(
        self, top: FittedTop, rows: Int64[np.ndarray, " rows"]
    ) -> Float64[np.ndarray, "rows inputs"]:
        """Return what is known of rows: own numbers, released ones, similarities."""
        parts = []
        for plan, average in self._rounds(rows, "train"):
            (features, _, aggregate, similarities), _ = self._read(plan, average)
            parts.append(top.inputs(features, aggregate, similarities))
        return np.concatenate(parts)

    @property
    def epochs(self) -> int:
        """The fit."""
        return 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.is_finished:
            self._run_epoch(after_epoch)


def build_fitted_top(config: FederationConfig, table: PartyTable, head: TaskHead) -> FittedTop:
    """Return a top model that is not fitted yet.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table, or new rows of it.
        head: The task.
    """
    positions, width = config.family.cut_shape(config.model)
    reads = config.family.needs_similarities(config.model)
    own = own_inputs(table)
    return FittedTop(
        head,
        words=own.words,
        own=own.values.shape[1],
        released=positions * width,
        similarities=len(config.secondaries) * config.model.neighbours if reads else 0,
    )


def read_by_top(
    config: FederationConfig,
    table: PartyTable,
    *,
    features: Float[Tensor, "rows features"],
    keys: Float[Tensor, "rows dimension"],
) -> tuple[Tensor, Tensor]:
    """Return the primary's own numbers as the top model reads them, as features and as keys.

    What is fitted in one go reads all of them unscaled, as features, and no keys.

    Args:
        config: The federation file.
        table: The rows.
        features: Scaled, as a network reads them.
        keys: Likewise.
    """
    if config.top is None:
        return features, keys
    own = torch.from_numpy(own_inputs(table).values).to(features.device)
    return own, own[:, :0]


class FittedPrimary(OneFitPrimary):
    """Fits an estimator to own numbers, released ones and similarities."""

    top: FittedTop

    def __init__(
        self,
        plan: RunPlan,
        data: primary.PrimaryData,
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
        super().__init__(plan, data, inputs, top, exchange, observe=observe)
        self._estimator = estimator

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        values = self._values(self.top, rows)
        self.top.fill_gaps_by(values)
        targets = self._targets(rows)
        fitted = cross_fit(
            self._estimator,
            self.top.fill_gaps(values),
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


_FOLDS = 5


class TiedPrimary(OneFitPrimary):
    """Fits a tied top model to released numbers, over the base, and weighs trees beside it."""

    top: TiedTop | MixedTop

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        tied = self.top if isinstance(self.top, TiedTop) else self.top.tied
        base, targets = self._base(rows), self._targets(rows)
        drawn = stream(self.seed, "tied-folds").permutation(len(rows)) % _FOLDS
        released = torch.cat([average.flatten(1) for _, average in self._rounds(rows, "train")])
        if tied.reader is not None:
            # Of an average of k terms, each with its own noise.
            noise_std = self.plan.noise_share_std / math.sqrt(len(self.plan.secondaries))
            tied.reader.fit(released, noise_std=noise_std)
        fitted, added = fit_tied(
            lambda: copy.deepcopy(tied),
            tied.read(released),
            base,
            targets,
            self.head,
            folds=torch.from_numpy(drawn).to(base.device),
        )
        tied.load_state_dict(fitted.state_dict())
        self.out_of_fold = base + added.to(base)
        if isinstance(self.top, MixedTop):
            values = self._values(self.top.trees, rows)
            self.out_of_fold = self.top.fit(values, self.out_of_fold, targets, seed=self.seed)
        loss = float(self.head.loss(self.out_of_fold, targets))
        self.losses.append(loss)
        return loss, rows, self.out_of_fold

    def _base(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows outputs"]:
        assert self.data.base is not None, "checked with the federation file"
        return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]
