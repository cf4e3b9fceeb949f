"""What a trained FedSim makes of similarities and of places in the sorted list of links."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

_STEPS: Final = 32


def similarity_curve(
    gate: nn.Module, *, low: float, high: float, points: int = 61
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """Return similarities from ``low`` to ``high`` (in units of sigma_0) and their weights.

    Where each output of a pair has a weight of its own, their mean is returned.

    References:
        [FedSim] appendix F.5, the similarity model's plot.
    """
    device = next(gate.parameters()).device
    similarities = torch.linspace(low, high, points, device=device)
    with torch.no_grad():
        return similarities, gate(similarities).mean(dim=-1)


def merge_importance(
    merge: nn.Module, pairs: Float[Tensor, "rows links pair_outputs"]
) -> Float[Tensor, "links pair_outputs"]:
    """Return how much each place and output of the sorted pairs moves the merge gate's output.

    Integrated gradients from zeros, which is what absent links are, to the pairs as they are, by
    the midpoint rule; the mean of the absolute values over rows. Of several classes, the one that
    each row is taken for counts.

    References:
        [IG] Sundararajan et al. 2017 (arXiv:1703.01365), equations (1) and (3); [FedSim] appendix
        F.5.
    """
    merge.eval()
    pairs = pairs.detach()
    with torch.no_grad():
        chosen = merge(pairs).argmax(dim=1, keepdim=True)
    total = torch.zeros_like(pairs)
    with torch.enable_grad():
        for step in range(_STEPS):
            part = (pairs * ((step + 0.5) / _STEPS)).requires_grad_()
            output = merge(part).gather(1, chosen).sum()
            total += torch.autograd.grad(output, part)[0]
    return (pairs * total / _STEPS).abs().mean(dim=0)
