"""SplitAvg as an autograd function: the aggregate forwards, one gradient for all backwards."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from securevfl.federation.iso_noise import with_iso_noise
from securevfl.federation.rounds import Exchange, RoundPlan


class _SplitAvg(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, exchange: Exchange, plan: RoundPlan, iso_scale: float
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.plan = plan
        ctx.iso_scale = iso_scale
        return exchange.release(plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        if ctx.plan.wants_gradient:
            returned = with_iso_noise(gradients[0].contiguous(), ctx.iso_scale)
            ctx.exchange.return_gradient(ctx.plan, returned)
        return None, None, None, None


def split_average(
    exchange: Exchange, plan: RoundPlan, *, iso_scale: float = 0.0
) -> Float[Tensor, "batch positions width"]:
    """Return the noisy average of the active secondaries' representations of one batch.

    Calling ``backward`` on a loss of it sends the gradient with respect to the average to every
    active secondary; each divides it by their number, because it holds one term of an average. What
    the primary's own model learns has no noise.

    Args:
        exchange: Where the secondaries are.
        plan: The round.
        iso_scale: lambda of the ISO noise on the gradient that is sent, which promises nothing; 0
            adds none.

    Reveals:
        What :meth:`Exchange.release` and :meth:`Exchange.return_gradient` reveal; with ISO noise,
        in place of the gradient, a noisy one, and from the size of its noise the length of the
        batch's longest.

    References:
        [FeT] section 6.1 (SplitAvg) and Algorithm 1, lines 12 to 16; [FedHSSL] section VI-B
        ("Party 1 applies ISO to gradients sent back to the passive party"), Equation 7.
    """
    # Autograd visits a node only if one of its inputs wants a gradient.
    anchor = torch.zeros((), requires_grad=plan.wants_gradient)
    return cast(Tensor, _SplitAvg.apply(anchor, exchange, plan, iso_scale))  # type: ignore[no-untyped-call]
