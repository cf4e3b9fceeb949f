"""Metrics of a set of rows, each one number."""

from jaxtyping import Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from securevfl.core.errors import DataError


def rmse(outputs: Float[Tensor, "rows 1"], targets: Float[Tensor, " rows"]) -> float:
    """Return the root mean squared error, in the units of ``targets``."""
    return float((outputs[:, 0].double() - targets.double()).square().mean().sqrt())


def accuracy(outputs: Float[Tensor, "rows classes"], targets: Int[Tensor, " rows"]) -> float:
    """Return the share of rows whose largest output is the target's, in [0, 1]."""
    return float((outputs.argmax(dim=1) == targets).double().mean())


def auc(outputs: Float[Tensor, "rows 1"], targets: Float[Tensor, " rows"]) -> float:
    """Return the area under the ROC curve, in [0, 1]; ties count one half.

    Raises:
        DataError: If all targets are of one class: the area is not defined then.
    """
    if not bool((targets != targets[0]).any()):
        raise DataError(
            f"AUC needs rows of both classes, and all {len(targets)} rows have the label "
            f"{targets[0].item():g}; give this split more rows"
        )
    return float(
        roc_auc_score(targets.cpu().numpy(), outputs[:, 0].detach().double().cpu().numpy())
    )
