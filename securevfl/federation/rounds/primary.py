"""The primary in rounds: it plans them, trains the top model and keeps the best epoch."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.core.devices import Precision, to_device
from securevfl.core.errors import ConfigError
from securevfl.core.progress import EpochDone, Observer
from securevfl.data.tables import RowSplit, consecutive_batches
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.run_plan import Purpose, RunPlan
from securevfl.models.alone import choice
from securevfl.models.cuda_graphs import Network
from securevfl.models.family import share_of_base
from securevfl.models.tasks import HALF, Metrics, TaskHead


@dataclass(frozen=True, kw_only=True)
class PrimaryInputs:
    """What the top model reads of the primary's rows, as tensors."""

    features: Float[Tensor, "rows features"]
    keys: Float[Tensor, "rows dimension"]
    similarities: Float[Tensor, "rows secondaries links"] | None = None
    """Each link's similarity, secondaries by rank; NaN where a slot holds no record. Only for
    families that read them."""
    base: Float[Tensor, "rows outputs"] | None = None
    """Margins of the primary alone, which outputs are added to: out of fold where the model that
    gave them was fitted to the row; None where there is no base."""
    first_row: int = 0
    """Id of the first row."""


@dataclass(eq=False)
class TopModel:
    """The primary's half of the network at work on rows, over any exchange."""

    top: nn.Module
    """The module."""
    inputs: PrimaryInputs
    """Inputs from the primary's rows."""
    exchange: Exchange
    """Where the secondaries are."""
    _: KW_ONLY
    batch_size: int
    """Most rows of a round."""
    scale: float = 1.0
    """lambda: the joint model's weight in its average with a base, in [0, 1]."""
    precision: Precision = "float32"
    """Precision in which :attr:`top` computes."""
    _network: Network | None = field(default=None, init=False)

    def predict(self, rows: npt.NDArray[np.int64], purpose: Purpose) -> Tensor:
        """Return the outputs for ``rows``, the base among them; shape (rows, outputs).

        Reveals:
            To the primary: one average a row. To the secondaries: the rows' ids.
        """
        self.top.eval()
        with torch.no_grad():
            return torch.cat([self._forward(*batch) for batch in self._rounds(rows, purpose)])

    def _rounds(
        self, rows: npt.NDArray[np.int64], purpose: Purpose
    ) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield rounds of rows that depend on nothing, with their averages."""
        plans = (
            self._plan(batch, purpose, self.exchange.ranks)
            for batch in consecutive_batches(rows, batch_size=self.batch_size)
        )
        return self.exchange.release_each(plans)

    def _forward(self, plan: RoundPlan, aggregate: Tensor) -> Tensor:
        inputs, base = self._read(plan, aggregate)
        output = self._compute(*inputs)
        if base is None:
            return output
        return choice.mix_outputs(base, share_of_base(self.top) * base + output, self.scale)

    def _compute(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        if self._network is None or self._network.module is not self.top:
            self._network = Network(self.top, self.precision)
        return self._network(features, keys, aggregate, similarities)

    def _read(
        self, plan: RoundPlan, aggregate: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]:
        """Return what the top model reads of a round's rows, and their base."""
        data = self.inputs
        index = to_device(plan.rows - data.first_row, data.features.device)
        similarities = None
        if data.similarities is not None:
            # Ranks count from 1; a party that is left out of the round is left out here too.
            active = to_device(torch.as_tensor(plan.active) - 1, index.device)
            similarities = data.similarities[index[:, None], active]
        inputs = (data.features[index], data.keys[index], aggregate, similarities)
        return inputs, None if data.base is None else data.base[index]

    def _plan(
        self, rows: npt.NDArray[np.int64], purpose: Purpose, active: tuple[int, ...]
    ) -> RoundPlan:
        return RoundPlan(
            round_number=self.exchange.rounds.next(), rows=rows, active=active, purpose=purpose
        )


VALIDATION: Final = "validation_"
"""Stands before the name of each metric of the validation rows."""

BY_ITSELF: Final = "by_itself"
"""The headline metric of the validation rows by the joint model without its base."""


def last_gain(head: TaskHead, history: Sequence[Mapping[str, Any]]) -> int:
    """Return the last epoch that validated better than all before, averaged or not.

    Epoch 0 is none of them: a network that is worse than the base may still be learning, and as
    long as it is, the best weight beside the base may be 0.

    Args:
        head: The task.
        history: Lines in the order of epochs.
    """
    gained, best = 0, dict.fromkeys(("validation", BY_ITSELF), float("nan"))
    for line in history:
        for name in best.keys() & line.keys() if line["epoch"] > 0 else ():
            if head.is_better(line[name], best[name]):
                best[name], gained = line[name], line["epoch"]
    return gained


@dataclass(frozen=True, kw_only=True)
class PrimaryData(PrimaryInputs):
    """The primary's table as tensors, and which row is for what."""

    targets: Tensor
    """Shape (rows,): float32 for regression and binary, int64 class numbers for multiclass."""
    head: TaskHead
    """The task: its loss, its metric, and how many numbers it asks of the top model."""
    split: RowSplit
    firsts: Int64[Tensor, " rows"] | None = None
    """First row of each row's key, where rows of one key share a release; None: none do."""
    aligned: Bool[np.ndarray, " rows"] | None = None
    """Mask of rows that training rounds may have, where ``training.rows = "aligned"`` leaves others
    out; None for all."""

    @property
    def training_rows(self) -> Int64[np.ndarray, " train"]:
        """Rows of training rounds, labelled all of them."""
        rows = self.split.train
        return rows if self.aligned is None else rows[self.aligned[rows]]


_STATE: Final = (
    "epoch",
    "best_epoch",
    "best_metric",
    "best_weights",
    "best_outputs",
    "out_of_fold",
    "threshold",
    "history",
)
"""State of a primary in a checkpoint, without its top model."""


class Primary(TopModel, ABC):
    """The primary's top model on its way to the best epoch, over any exchange."""

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            top: Its half of the model.
            exchange: Rounds with the secondaries.
            observe: Called with progress.
        """
        self.training = plan.config.training
        super().__init__(
            top,
            data,
            exchange,
            batch_size=self.training.batch_size,
            precision=self.training.precision,
        )
        self.plan = plan
        self.data = data
        self.observe = observe
        self.seed = plan.config.federation.seed
        self.head = data.head
        self.may_go_on: Callable[[], bool] = lambda: True
        """Asked before every epoch: whether the budget still covers it."""
        self.epoch = 0
        self.best_epoch = 0
        """0 is the base, where there is one."""
        self.best_metric: float | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.best_outputs: Tensor | None = None
        """Of the validation rows, at the best epoch; None where there is no base."""
        self.threshold = HALF
        """Of a binary task, as the best epoch's validation rows chose it."""
        self.out_of_fold: Tensor | None = None
        """Outputs for the training rows by models that were not fitted to them, where the top model
        is fitted in one go; they decide together with the validation rows."""
        self.fitted_columns = 0
        """Numbers of records, over all secondaries, that encoders' directions are fitted to, with
        training rows' labels; 0 where encoders see no label."""
        self._validated: Metrics | None = None
        self.history: list[dict[str, Any]] = []
        self.losses: list[float] = []
        """Loss of every training round of this session, in order."""

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Train until the last epoch or until the validation metric stops improving.

        Args:
            after_epoch: Called with every finished epoch: the place to save checkpoints.
        """
        if self.epoch == 0 and self.best_metric is None and self.data.base is not None:
            self._begin_at(self.data.base)
        while not self.is_finished and (self.epoch == 0 or self.may_go_on()):
            start = time.monotonic()
            self._end_epoch(*self._train_epoch(self.epoch + 1), start, after_epoch)

    @property
    def epochs(self) -> int:
        """At most."""
        return self.plan.config.training.epochs

    @property
    def best_validation(self) -> Metrics:
        """Metrics of the validation rows at the best epoch, weighed with the base."""
        if self._validated is not None:
            return self._validated
        return {
            name.removeprefix(VALIDATION): value
            for name, value in self.best_line.items()
            if name.startswith(VALIDATION)
        }

    @property
    def best_line(self) -> Mapping[str, Any]:
        """The best epoch's line of the history."""
        return next(line for line in self.history if line["epoch"] == self.best_epoch)

    def take_base(self, margins: Float[Tensor, "rows outputs"]) -> None:
        """Weigh outputs with margins of the primary alone from now on.

        Args:
            margins: Of all rows; see :attr:`PrimaryInputs.base`.
        """
        self.data = replace(self.data, base=margins)
        self.inputs = replace(self.inputs, base=margins)

    @property
    def _base(self) -> Float[Tensor, "rows outputs"]:
        """Margins of the primary alone, of a run that has a base."""
        if self.data.base is None:
            raise ConfigError("base.estimator: a run without a base has nothing to decide against")
        return self.data.base

    @property
    def _best_outputs(self) -> Float[Tensor, "validation outputs"]:
        """Outputs for the validation rows at the best epoch, of a run that has a base."""
        if self.best_outputs is None:
            raise ConfigError("base.estimator: a run without a base keeps no outputs")
        return self.best_outputs

    def base_of(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows outputs"]:
        """Return margins of the primary alone for rows, of a run that has a base."""
        return self._base[torch.as_tensor(rows, device=self._base.device)]

    def _begin_at(self, base: Tensor) -> None:
        """Make the base alone the best epoch so far; no round is asked for."""
        split, start = self.data.split, time.monotonic()
        train, validation = (
            (base[torch.as_tensor(rows, device=base.device)], self.targets_of(rows))
            for rows in (self.data.training_rows, split.validation)
        )
        threshold = self.head.choose_threshold(*validation)
        loss = float(self.head.loss(*train))
        line = self._remember(0, loss, train, validation, threshold, start)
        self._take_if_best(0, line["validation"], threshold, validation[0])

    def require_measurable(self) -> None:
        """Refuse rows for which the metric that training goes by is not defined.

        Raises:
            DataError: Naming the rows; no round was asked for yet.
        """
        split = self.data.split
        for rows, name in (
            (split.train, "training"),
            (split.validation, "validation"),
            (split.test, "test"),
        ):
            self.head.require_defined(self.targets_of(rows), rows=name)

    @property
    def is_finished(self) -> bool:
        """Whether the last epoch is done or patience has run out."""
        gained = last_gain(self.head, self.history)
        stale = self.epoch - gained >= self.training.patience
        return self.epoch >= self.epochs or (self.best_metric is not None and stale)

    def _end_epoch(
        self,
        loss: float,
        rows: Int64[np.ndarray, " train"],
        fitted: Tensor,
        start: float,
        after_epoch: Callable[[EpochMark], None],
    ) -> None:
        """Validate an epoch, keep it if it is the best, and report it.

        Args:
            loss: Mean loss of its training rows.
            rows: Ids of these.
            fitted: Outputs for them, shape (rows, outputs).
            start: When it began, by ``time.monotonic``.
            after_epoch: Called with it.
        """
        epoch = self.epoch + 1
        own = self.data.split.validation
        outputs = self.predict(own, "validation")
        scale = self._weight(outputs, own)
        trained = self._mix_with_base(fitted, rows, scale), self.targets_of(rows)
        validated = self._mix_with_base(outputs, own, scale), self.targets_of(own)
        threshold = self.head.choose_threshold(*validated)
        line = self._remember(epoch, loss, trained, validated, threshold, start)
        if self.data.base is not None:
            line[BY_ITSELF] = self.head.metric(outputs, validated[1], threshold=threshold)
        self.epoch = epoch
        best = self._take_if_best(epoch, line["validation"], threshold, outputs)
        mark = EpochMark(epoch=epoch, best=best)
        self.exchange.peers.tell(mark)
        after_epoch(mark)
        self.observe(
            EpochDone(
                epoch=epoch,
                epochs=self.epochs,
                loss=loss,
                train=line["train"],
                validation=line["validation"],
                seconds=line["seconds"],
            )
        )

    def _weight(self, outputs: Tensor, rows: Int64[np.ndarray, " rows"]) -> float:  # noqa: ARG002
        """Return lambda, the weight beside the base of outputs for validation rows."""
        return 1.0

    def _mix_with_base(
        self, outputs: Tensor, rows: Int64[np.ndarray, " rows"], scale: float
    ) -> Tensor:
        """Return outputs for rows, weighed with the base where there is one."""
        base = self.data.base
        if base is None:
            return outputs
        return choice.mix_outputs(base[torch.as_tensor(rows, device=base.device)], outputs, scale)

    def _remember(
        self,
        epoch: int,
        loss: float,
        trained: tuple[Tensor, Tensor],
        validated: tuple[Tensor, Tensor],
        threshold: float,
        start: float,
    ) -> dict[str, Any]:
        """Write an epoch's line of the history, and return it.

        Args:
            epoch: Its number; 0 is the base.
            loss: Of the training rows.
            trained: Outputs for the training rows, shape (rows, outputs), and their labels.
            validated: The same of the validation rows.
            threshold: Of a binary task.
            start: When it began, by ``time.monotonic``.
        """
        metrics = self.head.metrics(*validated, threshold=threshold)
        line = {
            "epoch": epoch,
            "loss": loss,
            "train": self.head.metric(*trained, threshold=threshold),
            "validation": self.head.headline(metrics),
            **{f"{VALIDATION}{name}": value for name, value in metrics.items()},
            "seconds": round(time.monotonic() - start, 3),
        }
        self.history.append(line)
        return line

    def _take_if_best(self, epoch: int, metric: float, threshold: float, outputs: Tensor) -> bool:
        """Keep an epoch if none before it validates as well; return whether it was kept."""
        if self.best_metric is not None and not self.head.is_better(metric, self.best_metric):
            return False
        self.best_metric, self.best_epoch, self.threshold = metric, epoch, threshold
        self.best_outputs = None if self.data.base is None else outputs
        self.best_weights = {
            name: value.detach().clone() for name, value in self.top.state_dict().items()
        }
        return True

    def restore_best(self) -> None:
        """Go back to the best epoch's weights, here and at every secondary.

        Where no epoch beat the base, secondaries have none to go back to, and are told nothing.

        Reveals:
            To every secondary: which epoch was the best.
        """
        self.top.load_state_dict(self.best_weights)
        if self.best_epoch:
            mark = EpochMark(epoch=self.best_epoch, best=False, restore_best=True)
            self.exchange.peers.tell(mark)

    def decide(
        self, alone: Float[Tensor, "rows outputs"], *, base_is_alone: bool = False
    ) -> choice.Decision:
        """Choose the joint model's weight against the base, and whether it answers.

        Asks nobody: what the validation rows got at the best epoch decides. Where training rows
        have outputs out of fold they choose lambda too, and, where those of the primary alone are
        known, who answers; less what encoders gain there that were fitted to these rows' labels.
        Then the metric that training goes by must not say otherwise.

        Outputs, and the threshold of a binary task, are those of the choice from now on.

        Args:
            alone: Margins of the best model of the primary alone, of all rows.
            base_is_alone: Whether that model is the base, whose margins are out of fold on
                training rows.
        """
        base, outputs = self._base, self._best_outputs
        rows = torch.as_tensor(self.data.split.validation, device=base.device)
        known, seen, optimism = self._unseen_outputs()
        scale = choice.choose_scale(
            self.head,
            base=base[known],
            joint=seen,
            targets=self.data.targets[known],
            optimism=optimism,
        )
        if self.out_of_fold is not None and base_is_alone:
            alone = base
        else:
            known, seen, optimism = rows, outputs, optimism[-len(rows) :]
        decision = choice.decide(
            self.head,
            base=base[known],
            joint=seen,
            alone=alone[known],
            targets=self.data.targets[known],
            scale=scale,
            optimism=optimism,
            errors=choice.ERRORS_OF_CHOOSING_ROWS if self.out_of_fold is None else 1.0,
            keys=None if self.data.firsts is None else self.data.firsts[known],
        )
        if self.out_of_fold is not None and decision.used == "joint":
            # Losses of a base that is too sure fall by anything that makes it less so, noise too.
            joint = choice.mix_outputs(base[known], seen, decision.scale)
            if self._measures_better(alone[known], joint, known):
                decision = replace(decision, used="alone")
        self.scale = decision.scale
        joint = choice.mix_outputs(base[rows], outputs, decision.scale)
        validated = joint, self.data.targets[rows]
        self.threshold = self.head.choose_threshold(*validated)
        self._validated = self.head.metrics(*validated, threshold=self.threshold)
        return decision

    def is_better_than(self, own: "Primary") -> bool:
        """Return whether this joint model has a lower mean loss than the network without partners.

        Both are weighed with the base, on validation rows and, where both have outputs out of
        fold, on training rows. No standard error is asked for: the two share most of what they
        say, and a gain over the local baseline has had to be clear already.
        """
        return bool(self._unseen_loss() < own._unseen_loss())

    def _unseen_loss(self) -> Tensor:
        """Return the mean loss of the weighted outputs for rows that no model was fitted to."""
        rows, outputs, optimism = self._unseen_outputs()
        joint = choice.mix_outputs(self._base[rows], outputs, self.scale)
        losses = self.head.row_losses(joint, self.data.targets[rows])
        return (losses + self.scale * optimism).mean()

    def _unseen_outputs(
        self,
    ) -> tuple[Int64[Tensor, " rows"], Float[Tensor, "rows outputs"], Float[Tensor, " rows"]]:
        """Return rows that the top model was not fitted to, its outputs, and their optimism.

        Those are the validation rows and, with outputs out of fold, the training rows before them.
        Encoders may have seen the training rows' labels; how much lower that makes the loss of each
        is the third. Where that leaves training rows little to say, they are left out.
        """
        outputs = self._best_outputs
        rows = torch.as_tensor(self.data.split.validation, device=outputs.device)
        fresh = torch.zeros(len(rows), dtype=torch.float64, device=outputs.device)
        if self.out_of_fold is None or choice.fresh_rows_decide(
            columns=self.fitted_columns,
            surviving=self.plan.surviving,
            seen=len(self.data.training_rows),
            fresh=len(rows),
        ):
            return rows, outputs, fresh
        trained = torch.as_tensor(self.data.training_rows, device=outputs.device)
        firsts = self.data.firsts
        optimism = choice.optimism_of_seen(
            self.head,
            self._base[trained],
            self.data.targets[trained],
            columns=self.fitted_columns,
            surviving=self.plan.surviving,
            keys=None if firsts is None else len(firsts[trained].unique()),
        )
        seen = torch.full((len(trained),), optimism, dtype=torch.float64, device=outputs.device)
        return (
            torch.cat([trained, rows]),
            torch.cat([self.out_of_fold, outputs]),
            torch.cat([seen, fresh]),
        )

    def _measures_better(self, outputs: Tensor, than: Tensor, rows: Tensor) -> bool:
        """Return whether outputs for rows have the better metric."""
        targets = self.data.targets[rows]
        mine, other = (self.head.metric(scores, targets) for scores in (outputs, than))
        return self.head.is_better(mine, other)

    @abstractmethod
    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:
        """Return the mean loss, and every training row with its outputs."""

    def shared_keys(self, rows: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"] | None:
        """Return a number for each row's key, where some rows share one and its release."""
        if self.data.firsts is None:
            return None
        keys = self.data.firsts.cpu().numpy()[rows]
        return keys if len(np.unique(keys)) < len(keys) else None

    def targets_of(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the labels of rows."""
        return self.data.targets[to_device(rows, self.data.targets.device)]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {"top": self.top.state_dict(), **{name: getattr(self, name) for name in _STATE}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        self.top.load_state_dict(state["top"])
        for name in _STATE:
            setattr(self, name, state[name])
