"""Whether a joint model is used, or the best model of the primary alone answers.

What answers jointly is a mean of two models' margins: (1 - lambda) of the base, lambda of the joint
model. Both choices are made on rows that none of the models was fitted to, by the task's loss,
paired by rows: what makes a row hard for both models cancels.

It is a rule of selection, not a guarantee: on rows of a kind that was not there, or by bad luck,
the joint model may still be the worse one.
"""

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from securevfl.models.tasks import TaskHead

Used = Literal["joint", "alone"]
"""Which model answers."""

_STEPS: Final = 20
"""Of lambda, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided, and by how much."""

    used: Used
    scale: float
    """lambda: the joint model's weight beside the base's, in [0, 1]."""
    gain: float
    """Mean loss of the primary alone less that of the joint model, a row."""
    error: float
    """One standard error of ``gain``; 0 for a single row."""
    rows: int
    """So many decided."""

    def as_json(self) -> dict[str, Any]:
        """Return it by name, the scale as ``lambda``."""
        fields = asdict(self)
        return {"lambda" if name == "scale" else name: value for name, value in fields.items()}


def decide(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    scale: float | None = None,
) -> Decision:
    """Choose lambda, and who answers.

    lambda is what :func:`choose_scale` says. The joint model is used if lambda is not 0 and the
    mean of loss(alone) - loss(joint) over the rows is more than one standard error of that mean.

    Args:
        head: The task.
        base: Margins of the base, of rows that it was not fitted to.
        joint: Margins of the joint model.
        alone: Margins of the best model of the primary alone.
        targets: The rows' labels, as the head takes them.
        scale: lambda, where more rows than these have chosen it; None: these do.

    References:
        A rule of this project's own; docs/base.md has what was measured of it.
    """
    if scale is None:
        scale = choose_scale(head, base=base, joint=joint, targets=targets)
    losses = head.row_losses(scaled(base, joint, scale), targets)
    gain, error = _gain(head.row_losses(alone, targets) - losses)
    return Decision(
        used="joint" if scale > 0 and gain > error else "alone",
        scale=scale,
        gain=gain,
        error=error,
        rows=len(targets),
    )


def choose_scale(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> float:
    """Return lambda, the one of 0, 0.05, ..., 1 with the least mean loss, the least of equals.

    Args:
        head: The task.
        base: As of :func:`decide`.
        joint: As of :func:`decide`.
        targets: As of :func:`decide`.
    """
    means = {
        step: float(head.row_losses(scaled(base, joint, step / _STEPS), targets).mean())
        for step in range(_STEPS + 1)
    }
    # A joint model that is not finite has no mean, and counts for nothing.
    finite = {step: mean for step, mean in means.items() if mean < float("inf")}
    return min(finite, key=lambda step: finite[step], default=0) / _STEPS


def who_answers(
    head: TaskHead,
    *,
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> Used:
    """Return who answers where lambda was chosen before; by the rule of :func:`decide`."""
    gain, error = _gain(head.row_losses(alone, targets) - head.row_losses(joint, targets))
    return "joint" if gain > error else "alone"


def _gain(differences: Float[Tensor, " rows"]) -> tuple[float, float]:
    """Return the mean of rows' differences, and one standard error of it; 0 for a single row."""
    rows = len(differences)
    error = float(differences.std()) / rows**0.5 if rows > 1 else 0.0
    return float(differences.mean()), error


def scaled(
    base: Float[Tensor, "rows outputs"], joint: Float[Tensor, "rows outputs"], scale: float
) -> Float[Tensor, "rows outputs"]:
    """Return (1 - lambda) base + lambda joint; what counts for nothing may be anything."""
    if scale in (0, 1):
        return joint if scale else torch.clone(base)
    return base + scale * (joint - base)
