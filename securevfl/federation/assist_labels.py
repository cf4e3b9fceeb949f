"""What assisted boosting tells secondaries of labels: labels as they are, or drawn once.

With ``model.label_epsilon`` all that is told is a function of labels that were drawn once a run, of
the primary's columns, and of what secondaries answered. So that one draw is all that is charged.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.config.base import OWN
from securevfl.data.scaling import LabelScaler
from securevfl.data.tables import PartyTable
from securevfl.dp.labels import (
    digest_of_labels,
    keep_probability,
    noised_labels,
    randomised_labels,
    unbiased_indicators,
)
from securevfl.federation.ledger import Ledger
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.primary import PrimaryData
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.state_files import StateFolder
from securevfl.federation.told_labels import charge_labels, drawn_once, label_release
from securevfl.models.alone.margins import LEAST_PROBABILITY, cross_fit
from securevfl.models.assist.assist_config import AssistConfig
from securevfl.models.assist.line_search import best_step
from securevfl.models.tasks import TaskHead

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
            labels[rows].astype(np.float64),
            lower=model.label_lower,
            upper=model.label_upper,
            epsilon=model.label_epsilon,
            delta=delta,
        ).astype(np.float32)

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
