"""Assisted boosting as a stage: both parties, and labels that the primary sends as residuals."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor, nn

from securevfl.config.sections import OWN
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.scaling import LabelScaler
from securevfl.data.tables import PartyTable, consecutive_batches
from securevfl.dp.labels import (
    digest_of_labels,
    keep_probability,
    noised_labels,
    randomised_labels,
    unbiased_indicators,
)
from securevfl.federation.base import own_inputs
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.released_labels import charge_labels, drawn_once
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import Handler, Handlers, Reply
from securevfl.federation.stage import PrimaryContext, RunStage, SecondaryBuild, StageAtPrimary
from securevfl.ledger.ledger import Ledger
from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.alone.margins import cross_fit as cross_fit_base
from securevfl.models.tasks import TaskHead
from securevfl.stages.assist.family import (
    AssistBottom,
    AssistConfig,
    AssistTop,
    best_step,
    constant_margin,
    cross_fit,
    residuals_of,
    within_ball,
)
from securevfl.stages.assist.messages import AssistValidator, ModelFitted, Residuals, Step
from securevfl.stages.assist.policy import label_range, labels_released, settings_of


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


_NAMED: Final = "boosting"
"""Base estimator for drawn labels, where the base is the best of several: that choice is made by
labels as they are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleasedLabels:
    """What residuals and steps are made of, of the training rows."""

    targets: Shaped[Tensor, "train ..."]
    """As losses take them; of drawn classes, numbers whose mean over the draw is the indicator."""
    margins: Float[Tensor, "train outputs"]
    """Before the first round."""


def release_labels(
    plan: RunPlan,
    table: PartyTable,
    data: PrimaryData,
    *,
    ledger: Ledger,
    files: StateFolder,
    estimator: Any,
) -> ReleasedLabels | None:
    """Charge for what secondaries will learn of labels; return what that is made of.

    Args:
        plan: The run.
        table: The primary's table.
        data: The same as tensors.
        ledger: The primary's own, open.
        files: Its own; a resumed run finds the labels there that were drawn before.
        estimator: Of scikit-learn, where Python handed one over as the base.

    Returns:
        None where labels are shown.

    Raises:
        PrivacyError: If labels were drawn for other rows than the table has now.
        StorageError: If the disk takes no more; nothing was told then.

    Reveals:
        Nothing yet: what is sent later is a function of it.
    """
    config, release = plan.config, labels_released(plan.config)
    settings = settings_of(config)
    epsilon = settings.label_epsilon
    if epsilon is None:
        charge_labels(ledger, release)
        return None
    drawn = drawn_once(
        files,
        data.split.train,
        lambda: _draw_labels(settings, table, data, epsilon=epsilon, delta=config.privacy.delta),
    )
    charge_labels(ledger, replace(release, digest=digest_of_labels(drawn)))
    released = _loss_targets(drawn, data.head, epsilon=epsilon)
    start = _constant(released, data.head)
    margins = start.expand(len(drawn), -1).clone()
    if config.base.exists:
        name = _NAMED if config.base.estimator == "best" else config.base.estimator
        corrected = _base_of_drawn(
            estimator if name == OWN else name,
            table,
            data,
            drawn,
            epsilon=epsilon,
            seed=config.federation.seed,
        )
        # As far along as the drawn labels bear out: a base of noise alone counts for nothing.
        way = corrected - margins
        margins += best_step(margins, way, released, data.head, unit=1.0) * way
    trains = torch.from_numpy(np.isin(data.split.train, data.training_rows))
    device = data.targets.device
    return ReleasedLabels(targets=released[trains].to(device), margins=margins[trains].to(device))


def _draw_labels(
    settings: AssistConfig, table: PartyTable, data: PrimaryData, *, epsilon: float, delta: float
) -> Shaped[np.ndarray, " train"]:
    """Return the labels of training rows, drawn anew."""
    assert table.labels is not None, "the primary's table has labels"
    labels = table.labels[data.split.train]
    if data.head.task != "regression":
        return randomised_labels(labels.astype(np.int64), _classes(data.head), epsilon)
    lower, upper = label_range(settings)
    return noised_labels(labels, lower=lower, upper=upper, epsilon=epsilon, delta=delta)


def _classes(head: TaskHead) -> int:
    return head.num_classes if head.task == "multiclass" else 2


def _loss_targets(
    drawn: Shaped[np.ndarray, " train"], head: TaskHead, *, epsilon: float
) -> Shaped[Tensor, "train ..."]:
    """Return drawn labels as losses take them, on average those of the labels as they are."""
    if head.task == "regression":
        return torch.from_numpy(LabelScaler.fit(drawn).apply(drawn)).float()
    each = torch.from_numpy(
        unbiased_indicators(drawn, classes=_classes(head), epsilon=epsilon)
    ).float()
    return each if head.task == "multiclass" else each[:, 1]


def _constant(labels: Shaped[Tensor, "train ..."], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the constant margin: of the mean of regression labels, 0, else of class shares."""
    if head.task == "regression":
        return torch.zeros(1)
    shares = labels.mean(dim=0).clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return shares.log() if head.task == "multiclass" else shares.logit().reshape(1)


def _base_of_drawn(
    estimator: Any,
    table: PartyTable,
    data: PrimaryData,
    drawn: Shaped[np.ndarray, " train"],
    *,
    epsilon: float,
    seed: int,
) -> Float[Tensor, "train outputs"]:
    """Return margins of the training rows, of a base that never saw labels as they are."""
    rows, head = data.split.train, data.head
    labels: Shaped[np.ndarray, " rows"]
    if head.task == "regression":
        labels = np.zeros(len(data.targets), dtype=np.float32)
        labels[rows] = LabelScaler.fit(drawn).apply(drawn)
    else:
        labels = np.zeros(len(data.targets), dtype=np.int64)
        labels[rows] = drawn
    fitted = cross_fit_base(estimator, own_inputs(table), labels, head, train=rows, seed=seed)
    margins = torch.from_numpy(fitted.margins[rows])
    if head.task == "regression":
        return margins
    # Probabilities of what was drawn are p times the class's own, and q times any other's.
    kept = keep_probability(epsilon, _classes(head))
    other = (1 - kept) / (_classes(head) - 1)
    if head.task == "binary":
        share = ((margins.sigmoid() - other) / (kept - other)).clamp(
            LEAST_PROBABILITY, 1 - LEAST_PROBABILITY
        )
        return share.logit()
    shares = ((margins.softmax(dim=1) - other) / (kept - other)).clamp_min(LEAST_PROBABILITY)
    return (shares / shares.sum(dim=1, keepdim=True)).log()


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


class _LabelRelease(StageAtPrimary):
    """The primary's part: charge for labels before the first residuals are made of them."""

    def __init__(self, context: PrimaryContext, primary: AssistPrimary) -> None:
        self._context = context
        self._primary = primary

    def begin(self) -> None:
        """Charge for the labels that secondaries receive; randomise them where promised."""
        context = self._context
        labels = release_labels(
            context.plan,
            context.table,
            self._primary.data,
            ledger=context.files.ledger,
            files=context.files.checkpoints.files,
            estimator=context.estimator,
        )
        self._primary.use_released_labels(labels)


class AssistStage(RunStage):
    """Rounds in which secondaries fit models of their own to residuals."""

    def primary(self, context: PrimaryContext) -> StageAtPrimary:
        """Return the primary's part, which releases labels."""
        if not isinstance(context.primary, AssistPrimary):
            raise TypeError(f"the primary of assisted boosting is no {type(context.primary)}")
        return _LabelRelease(context, context.primary)

    def build_primary(
        self,
        plan: RunPlan,
        data: PrimaryData,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> AssistPrimary | None:
        """Return a primary that sends residuals."""
        if not isinstance(top, AssistTop):
            return None
        return AssistPrimary(plan, data, top, exchange, observe=observe)

    def build_secondary(self, build: SecondaryBuild) -> AssistSecondary | None:
        """Return a secondary that fits models to residuals."""
        if not isinstance(build.bottom, AssistBottom):
            return None
        return AssistSecondary(
            build.data,
            build.bottom,
            build.contribution,
            validator=AssistValidator(build.limits),
            dropout=build.dropout,
            seed=build.seed,
        )
