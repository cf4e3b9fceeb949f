"""What secondaries are told of labels: labels as they are, or drawn once a run."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.config.sections import OWN
from securevfl.data.scaling import LabelScaler
from securevfl.data.tables import PartyTable
from securevfl.dp.labels import (
    digest_of_labels,
    keep_probability,
    noised_labels,
    randomised_labels,
    unbiased_indicators,
)
from securevfl.federation.party_inputs import own_inputs
from securevfl.federation.released_labels import charge_labels, drawn_once
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.state_folder import StateFolder
from securevfl.ledger.ledger import Ledger
from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.alone.margins import cross_fit as cross_fit_base
from securevfl.models.tasks import TaskHead
from securevfl.stages.assist.policy import label_range, labels_released, settings_of
from securevfl.stages.assist.settings import AssistConfig
from securevfl.stages.assist.steps import best_step

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
