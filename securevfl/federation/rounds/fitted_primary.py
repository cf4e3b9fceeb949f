"""The primary of a frozen run whose top model is fitted in one go, in place of epochs."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.conventions import stream
from securevfl.core.progress import Observer
from securevfl.data.tables import PartyTable
from securevfl.federation.base import own_inputs
from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.primary import Primary, PrimaryData, PrimaryInputs
from securevfl.federation.run_plan import RunPlan
from securevfl.models.alone.margins import cross_fit
from securevfl.models.alone.saving import require_keepable
from securevfl.models.fitted_top import FittedTop, MixedTop, TiedTop, fit_tied
from securevfl.models.tasks import TaskHead


class FittedPrimary(Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
        inputs: PrimaryInputs,
        exchange: Exchange,
        *,
        fit: "EstimatorFit | CorrectionFit",
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            inputs: The same as the top model reads it.
            exchange: Source of released rows.
            fit: Has the top model, and fits it.
            observe: Called with progress.
        """
        super().__init__(plan, data, fit.top, exchange, observe=observe)
        self.inputs = inputs
        self._fit = fit

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
            start = time.monotonic()
            self._end_epoch(*self._train_epoch(1), start, after_epoch)

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        outputs = self.out_of_fold = self._fit(self, rows)
        loss = float(self.head.loss(outputs, self.targets_of(rows)))
        self.losses.append(loss)
        return loss, rows, outputs

    def read_values(
        self, top: FittedTop, rows: Int64[np.ndarray, " rows"]
    ) -> Float64[np.ndarray, "rows inputs"]:
        """Return what is known of rows: own numbers, released ones, similarities."""
        parts = []
        for plan, average in self._rounds(rows, "train"):
            (features, _, aggregate, similarities), _ = self._read(plan, average)
            parts.append(top.inputs(features, aggregate, similarities))
        return np.concatenate(parts)

    def read_released(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows released"]:
        """Return the released numbers of rows."""
        return torch.cat([average.flatten(1) for _, average in self._rounds(rows, "train")])


@dataclass(frozen=True, eq=False)
class EstimatorFit:
    """Fits an estimator to own numbers, released ones and similarities."""

    top: FittedTop
    estimator: Any
    """A name, or an estimator of scikit-learn."""

    def __call__(
        self, primary: FittedPrimary, rows: Int64[np.ndarray, " rows"]
    ) -> Float[Tensor, "rows outputs"]:
        """Fit the top model to rows; return their outputs out of fold."""
        values, targets = primary.read_values(self.top, rows), primary.targets_of(rows)
        self.top.fill_gaps_by(values)
        fitted = cross_fit(
            self.estimator,
            self.top.fill_gaps(values),
            targets.cpu().numpy(),
            primary.head,
            train=np.arange(len(rows)),
            seed=primary.seed,
            where="model.top",
        )
        # Now, rather than when its file is read.
        require_keepable(fitted.model, where="model.top")
        self.top.model = fitted.model
        return torch.from_numpy(fitted.margins).to(targets.device)


_FOLDS: Final = 5


@dataclass(frozen=True, eq=False)
class CorrectionFit:
    """Fits a tied top model to released numbers, over the base, and weighs trees against it."""

    top: TiedTop | MixedTop

    def __call__(
        self, primary: FittedPrimary, rows: Int64[np.ndarray, " rows"]
    ) -> Float[Tensor, "rows outputs"]:
        """Fit the top model to rows; return their outputs out of fold."""
        tied = self.top if isinstance(self.top, TiedTop) else self.top.tied
        base, targets = primary.base_of(rows), primary.targets_of(rows)
        # What rows of one key share must not be known from another fold.
        keys = primary.shared_keys(rows)
        unit = np.arange(len(rows)) if keys is None else np.unique(keys, return_inverse=True)[1]
        folds = stream(primary.seed, "tied-folds").permutation(unit.max() + 1)[unit] % _FOLDS
        released = primary.read_released(rows)
        fitted, added = fit_tied(
            lambda: copy.deepcopy(tied),
            released,
            base,
            targets,
            primary.head,
            folds=torch.from_numpy(folds).to(base.device),
        )
        tied.load_state_dict(fitted.state_dict())
        outputs = base + added.to(base)
        if isinstance(self.top, MixedTop):
            values = primary.read_values(self.top.trees, rows)
            outputs = self.top.fit(values, outputs, targets, seed=primary.seed, keys=keys)
        return outputs


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
