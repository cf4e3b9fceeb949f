"""The primary of assisted boosting, and the labels that its residuals are made of.

With ``model.label_epsilon`` all that is told is a function of labels that were drawn once a run, of
the primary's columns, and of what secondaries answered. So that one draw is all that is charged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from securevfl.config.sections import OWN
from securevfl.core.progress import RoundDone
from securevfl.data.rows import consecutive_batches
from securevfl.data.scaling import LabelScaler
from securevfl.data.tables import PartyTable
from securevfl.dp.labels import (
    digest_of_labels,
    keep_probability,
    noised_labels,
    randomised_labels,
    unbiased_indicators,
)
from securevfl.federation.assist.assist_secondary import AssistKind, Residuals, Step
from securevfl.federation.class_means.ballot import charge_labels, drawn_once, label_release
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.rounds.primary import CorrectingTopModel, Primary, PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.state_files import StateFolder
from securevfl.ledger.ledger import Ledger
from securevfl.models.alone.margins import LEAST_PROBABILITY, cross_fit
from securevfl.models.assist import (
    AssistConfig,
    AssistTop,
    best_step,
    constant_margin,
    residuals_of,
)
from securevfl.models.tasks import TaskHead

# What assisted boosting tells secondaries of labels: labels as they are, or drawn once.

_NAMED: Final = "boosting"
"""What a base of drawn labels is, where the base is the best of several: that choice is made by
labels as they are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ToldLabels:
    """What residuals and steps are made of, of the training rows."""

    targets: Shaped[Tensor, "train ..."]
    """As losses take them; of drawn classes, numbers whose mean over the draw is the indicator."""
    margins: Float[Tensor, "train outputs"]
    """Before the first round."""


def tell_labels(
    plan: RunPlan,
    table: PartyTable,
    data: PrimaryData,
    *,
    ledger: Ledger,
    files: StateFolder,
    estimator: Any,
) -> ToldLabels | None:
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
    config, release = plan.config, label_release(plan.config)
    model = config.model
    assert isinstance(model, AssistConfig), "the family's own"
    assert release is not None, "of this family"
    if model.label_epsilon is None:
        charge_labels(ledger, release)
        return None
    drawn = _drawn(model, table, data, delta=config.privacy.delta, files=files)
    charge_labels(ledger, replace(release, digest=digest_of_labels(drawn)))
    told = _told(drawn, data.head, epsilon=model.label_epsilon)
    start = _constant(told, data.head)
    margins = start.expand(len(drawn), -1).clone()
    if config.base.exists:
        name = _NAMED if config.base.estimator == "best" else config.base.estimator
        corrected = _base_of_drawn(
            estimator if name == OWN else name,
            table,
            data,
            drawn,
            epsilon=model.label_epsilon,
            seed=config.federation.seed,
        )
        # As far along as the drawn labels bear out: a base of noise alone counts for nothing.
        way = corrected - margins
        margins += best_step(margins, way, told, data.head, unit=1.0) * way
    trains = torch.from_numpy(np.isin(data.split.train, data.training_rows))
    device = data.targets.device
    return ToldLabels(targets=told[trains].to(device), margins=margins[trains].to(device))


def _drawn(
    model: AssistConfig,
    table: PartyTable,
    data: PrimaryData,
    *,
    delta: float,
    files: StateFolder,
) -> Shaped[np.ndarray, " train"]:
    """Return the labels of training rows as they were drawn, in this session or an earlier one."""
    rows = data.split.train

    def draw() -> Shaped[np.ndarray, " train"]:
        labels = table.labels
        assert labels is not None, "the primary's table has labels"
        assert model.label_epsilon is not None, "labels have an epsilon"
        if data.head.task != "regression":
            classes = _classes(data.head)
            return randomised_labels(labels[rows].astype(np.int64), classes, model.label_epsilon)
        assert model.label_lower is not None, "checked with the file"
        assert model.label_upper is not None, "checked with the file"
        return noised_labels(
            labels[rows],
            lower=model.label_lower,
            upper=model.label_upper,
            epsilon=model.label_epsilon,
            delta=delta,
        )

    return drawn_once(files, rows, draw)


def _classes(head: TaskHead) -> int:
    return head.num_classes if head.task == "multiclass" else 2


def _told(
    drawn: Shaped[np.ndarray, " train"], head: TaskHead, *, epsilon: float
) -> Shaped[Tensor, "train ..."]:
    """Return drawn labels as losses take them, on average those of the labels as they are."""
    if head.task == "regression":
        return torch.from_numpy(LabelScaler.fit(drawn).apply(drawn)).float()
    each = torch.from_numpy(
        unbiased_indicators(drawn, classes=_classes(head), epsilon=epsilon)
    ).float()
    return each if head.task == "multiclass" else each[:, 1]


def _constant(told: Shaped[Tensor, "train ..."], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the margin of a row of which nothing is known but what was drawn for all of them."""
    if head.task == "regression":
        return torch.zeros(1)
    shares = told.mean(dim=0).clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
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
    fitted = cross_fit(estimator, own_inputs(table), labels, head, train=rows, seed=seed)
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


# The primary of assisted boosting: residuals out, the sum of scores in, one step along it.


class AssistPrimary(CorrectingTopModel, Primary):
    """An epoch is a round of boosting; nothing is learned by gradients.

    References:
        Gradient Assisted Learning (Diao et al., NeurIPS 2022): residuals are negative gradients,
        and a line search sets the step. Weights of its own for each assistant are not possible
        here: only the sum of their scores is known.
    """

    _told: ToldLabels | None = None
    """What residuals and steps are made of; None: of labels as they are."""

    _sum: Float[Tensor, "train outputs"] | None = None
    """Scores of the training rows, out of fold, each round's times its step; None before the first
    round."""

    _total = 0.0
    """The steps of all rounds, in units of the average."""

    _scale = 1.0
    """What outputs have of the sum. It is 1 where residuals are made of labels as they are;
    otherwise the primary chooses it by these, and nobody is told."""

    _stands_still = False
    """Whether the last round's scores have brought nothing: others' would be of equal residuals."""

    def tell_by(self, told: ToldLabels | None) -> None:
        """Make all that is told of these labels from now on; None: of labels as they are."""
        self._told = told

    @property
    def always_asks(self) -> bool:  # type: ignore[override]
        """Whether labels have an epsilon: then they don't decide who is asked for what."""
        return self._told is not None

    @property
    def finished(self) -> bool:
        """Whether the last round is done, or a round has brought nothing.

        Patience asks labels as they are, and secondaries see when training ends: it has no say
        where labels have an epsilon.
        """
        if self._told is not None:
            return self._stands_still or self.epoch >= self.epochs
        return self._stands_still or super().finished

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
        targets, start = self._targets(rows), self._begin(rows)
        told = self._told or ToldLabels(targets=targets, margins=start)
        known = torch.zeros_like(start) if self._sum is None else self._sum
        margins = told.margins + known
        residuals = residuals_of(margins, told.targets, self.head)
        longest = float(torch.linalg.vector_norm(residuals, dim=1).max())
        parts = consecutive_batches(rows, batch_size=self.batch_size)
        sent = 0
        for part in parts:
            some = residuals[sent : sent + len(part)] / max(longest, 1e-12)
            sent += len(part)
            self.exchange.tell(
                Residuals(epoch=epoch, rows=part, residuals=some.float().cpu().numpy()),
                answer=AssistKind.FITTED if sent == len(rows) else None,
            )
        before = float(self.head.loss(start + self._scale * known, targets))
        scores = []
        for done, part in enumerate(parts, 1):
            plan = self._plan(part, "train", self.exchange.ranks)
            scores.append(self.exchange.release(plan)[:, 0])
            self.losses.append(before)
            self.observe(RoundDone(epoch=epoch, done=done, of=len(parts), loss=before))
        found = torch.cat(scores)
        # Scores as long as the cut allows are of norm 1, and what comes back is their average.
        unit = len(self.exchange.ranks) / self.plan.config.privacy.clip_norm
        step = best_step(margins, found * unit, told.targets, self.head, unit=longest)
        self.exchange.tell(Step(epoch=epoch, step=step))
        self._stands_still = step == 0
        self._sum = known + step * unit * found
        self._total += step * unit
        if self._told is not None:
            self._scale = best_step(start, self._sum, targets, self.head, unit=1.0)
        top = self.top
        assert isinstance(top, AssistTop), "the family builds it"
        top.scale.fill_(self._scale * self._total)
        outputs = start + self._scale * self._sum
        return float(self.head.loss(outputs, targets)), rows, outputs

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
