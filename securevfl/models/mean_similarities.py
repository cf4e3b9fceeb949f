"""Similarities of a row's links as a top model reads them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from securevfl.models.tracing import is_traced


def mean_similarities(
    similarities: Float[Tensor, "batch secondaries links"],
) -> tuple[Float[Tensor, "batch links"], Bool[Tensor, "batch links"]]:
    """Average over the secondaries that have a link in a slot, as SplitAvg averages their vectors.

    Returns:
        The mean similarity of every slot, 0 where no secondary has a link, and which slots have
        one.
    """
    absent = similarities.isnan()
    if not is_traced() and not bool(absent.any()):
        mean = similarities.mean(dim=1)
        return mean, torch.ones_like(mean, dtype=torch.bool)
    count = (~absent).sum(dim=1)
    return similarities.masked_fill(absent, 0.0).sum(dim=1) / count.clamp_min(1), count > 0
