"""The primary with a top model that is fitted once to released rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import OWN
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.exchange import EpochMark, Exchange
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.rounds.primary import (
    CorrectingTopModel,
    Primary,
    PrimaryData,
    PrimaryInputs,
)
from securevfl.federation.run_plan import RunPlan
from securevfl.models.alone.choice import require_keepable
from securevfl.models.alone.margins import cross_fit
from securevfl.models.fitted_top import FittedTop, TiedTop, fit_tied
from securevfl.models.tasks import TaskHead

# The primary of a frozen run whose top model is fitted in one go, in place of epochs.


class OneFitPrimary(Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    @property
    def epochs(self) -> int:
        """The fit."""
        return 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.finished:
            self._run_epoch(after_epoch)


# What of a run differs where its top model is an estimator: how it is built, and what it reads.


def require_top(config: FederationConfig, estimator: Any) -> None:
    """Refuse to train by a file whose top model only Python could hand over.

    Args:
        config: The federation file.
        estimator: What was handed over; None: nothing was.

    Raises:
        ConfigError: Saying what to do.
    """
    if config.top is not None and config.top.name == OWN and estimator is None:
        raise ConfigError(
            f"model.top: is {config.top.described}, which this program was not given; hand it to "
            f'securevfl.simulate(top=...), or write "boosting" or "linear"'
        )


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

    An estimator reads all of them unscaled, as features, and no keys.

    Args:
        config: The federation file.
        table: The rows.
        features: Scaled, as a network reads them.
        keys: Likewise.
    """
    if config.top is None or config.top.corrects:
        return features, keys
    own = torch.from_numpy(own_inputs(table).values).to(features.device)
    return own, own[:, :0]


# The primary of a frozen run whose top model is an estimator.


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


# The primary of a frozen run whose top model is tied: a convex fit.

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
