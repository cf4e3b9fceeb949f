"""SplitAvg as an autograd function: the aggregate forwards, one gradient for all backwards."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from securevfl.federation.rounds import Exchange, RoundPlan


class _SplitAvg(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, exchange: Exchange, plan: RoundPlan) -> Tensor:
        ctx.exchange = exchange
        ctx.plan = plan
        return exchange.release(plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.plan.wants_gradient:
            ctx.exchange.return_gradient(ctx.plan, gradients[0].contiguous())
        return None, None, None


def split_average(exchange: Exchange, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
    """Return the noisy average of the active secondaries' representations of one batch.

    Calling ``backward`` on a loss of it sends the gradient with respect to the average to every
    active secondary; each divides it by their number, because it holds one term of an average.

    Reveals:
        What :meth:`Exchange.release` and :meth:`Exchange.return_gradient` reveal.

    References:
        [FeT] section 6.1 (SplitAvg) and Algorithm 1, lines 12 to 16.
    """
    # Autograd visits a node only if one of its inputs wants a gradient.
    anchor = torch.zeros((), requires_grad=plan.wants_gradient)
    return cast(Tensor, _SplitAvg.apply(anchor, exchange, plan))  # type: ignore[no-untyped-call]
