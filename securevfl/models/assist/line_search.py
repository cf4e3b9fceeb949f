"""How far the primary goes along the secondaries' scores, and what they are asked to explain."""

from typing import Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.models.alone.margins import LEAST_PROBABILITY
from securevfl.models.tasks import TaskHead

_LONGEST: Final = 50.0
"""Of a step, in units of the longest residual: with separable classes the best one has no end."""

_ACCURACY: Final = 1e-3
"""Of a step, in the same units."""


def constant_margin(targets: Shaped[Tensor, " rows"], head: TaskHead) -> Float[Tensor, " outputs"]:
    """Return the margin of a row of which nothing is known but that its label is one of these."""
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

    The loss is convex in it. A step that brings no gain is 0.

    Args:
        margins: Of training rows.
        scores: The sum of all secondaries' scores of these, out of fold.
        targets: Their labels.
        head: The task.
        unit: Norm of the longest residual.
    """
    from scipy.optimize import minimize_scalar  # slow to load, and only a primary's

    wide, add = margins.double(), scores.double()
    labels = targets.double() if targets.is_floating_point() else targets

    def loss(step: float) -> float:
        return float(head.loss(wide + step * unit * add, labels))

    found = minimize_scalar(
        loss, bounds=(0.0, _LONGEST), method="bounded", options={"xatol": _ACCURACY}
    )
    return float(found.x) * unit if found.fun < loss(0.0) else 0.0
