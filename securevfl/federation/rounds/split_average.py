"""SplitAvg as an autograd function: the average forwards, one gradient for all backwards."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from securevfl.core.devices import reads
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds import cut
from securevfl.federation.rounds.exchanges import Exchange

Protect = Callable[[cut.CutRows], cut.CutRows]


class _SplitAvg(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, exchange: Exchange, plan: RoundPlan, protect: Protect
    ) -> Tensor:
        # Of a GPU's tensors backward runs in another thread.
        ctx.reads = reads()
        ctx.exchange = exchange
        ctx.plan = plan
        ctx.protect = protect
        return exchange.release(plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        if ctx.plan.wants_gradient:
            returned = ctx.protect(gradients[0].contiguous())
            ctx.exchange.return_gradient(ctx.plan, *ctx.reads.host(returned))
        return None, None, None, None


def split_average(
    exchange: Exchange,
    plan: RoundPlan,
    *,
    protect: Protect = lambda gradient: gradient,
    anchor: Tensor | None = None,
) -> cut.CutRows:
    """Return the noisy average of the active secondaries' representations of one batch.

    Calling ``backward`` on a loss of it sends the gradient with respect to the average to every
    active secondary; each divides it by their number, because it holds one term of an average. What
    the primary's own model learns has no noise.

    Args:
        exchange: Where the secondaries are.
        plan: The round.
        protect: Returns what is sent in the place of the gradient, by a heuristic of
            :mod:`securevfl.federation.rounds.label_defences`, which promises nothing.
        anchor: A number that wants a gradient: asking for it sends the average's.

    Reveals:
        What :meth:`Exchange.release` and :meth:`Exchange.return_gradient` reveal; with ISO noise,
        in place of the gradient, a noisy one, and from the size of its noise the length of the
        batch's longest.

    References:
        [FeT] section 6.1 (SplitAvg) and Algorithm 1, lines 12 to 16; [FedHSSL] section VI-B
        ("Party 1 applies ISO to gradients sent back to the passive party"), Equation 7.
    """
    # Autograd visits a node only if one of its inputs wants a gradient.
    if anchor is None:
        anchor = torch.zeros((), requires_grad=plan.wants_gradient)
    return cast(Tensor, _SplitAvg.apply(anchor, exchange, plan, protect))  # type: ignore[no-untyped-call]
