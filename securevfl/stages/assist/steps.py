"""The primary's step: residuals, and the step length along the secondaries' scores."""

from typing import Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.tasks import TaskHead

_LONGEST: Final = 50.0
"""Largest step, in units of the longest residual; separable classes have no finite best step."""

_ACCURACY: Final = 1e-3
"""Accuracy of a step, in the same units."""


def constant_margin(targets: Shaped[Tensor, " rows"], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the constant margin that fits the labels: their mean, log odds, or log shares."""
    if head.task == "regression":
        return targets.mean().reshape(1)
    if head.task == "binary":
        return targets.mean().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY).logit().reshape(1)
    counts = torch.bincount(targets, minlength=head.outputs)
    return (counts / len(targets)).clamp_min(LEAST_PROBABILITY).log()


def residuals_of(
    margins: Float[Tensor, "rows outputs"], targets: Shaped[Tensor, "rows ..."], head: TaskHead
) -> Float[Tensor, "rows outputs"]:
    """Return each row's negative gradient of its loss with respect to its margin.

    That is label minus margin times two (regression, standardised), label minus probability
    (binary), or the class's indicator minus its probability.
    """
    at = margins.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = head.loss(at, targets) * len(targets)
        (gradient,) = torch.autograd.grad(loss, at)
    return -gradient


def best_step(
    margins: Float[Tensor, "rows outputs"],
    scores: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, "rows ..."],
    head: TaskHead,
    *,
    unit: float,
) -> float:
    """Return the step that makes the mean loss of ``margins + step * scores`` smallest.

    The loss is convex in it. A step without a gain is 0.

    Args:
        margins: Margins of training rows.
        scores: The sum of all secondaries' scores of these rows, out of fold.
        targets: Their labels.
        head: The task.
        unit: Norm of the longest residual.
    """
    from scipy.optimize import minimize_scalar  # slow to load, and only a primary's

    wide, add = margins.double(), scores.double()
    labels = targets.double() if targets.is_floating_point() else targets

    def loss(step: float) -> float:
        return float(head.loss(wide + step * unit * add, labels))

    minimum = minimize_scalar(
        loss, bounds=(0.0, _LONGEST), method="bounded", options={"xatol": _ACCURACY}
    )
    return float(minimum.x) * unit if minimum.fun < loss(0.0) else 0.0
