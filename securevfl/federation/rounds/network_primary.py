"""The primary whose top model is a network: SplitAvg as an autograd function, and its training."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, reads
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.rows import training_batches
from securevfl.federation.messages import AverageRequest, RoundPlan
from securevfl.federation.rounds import cut, primary
from securevfl.federation.rounds.dropout import DropoutStream
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.label_defences import DrawnLabels, protect_gradient
from securevfl.federation.rounds.release import refuse_lost
from securevfl.federation.rounds.updates import set_gradients
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import average_weights
from securevfl.models.alone.choice import choose_scale
from securevfl.models.layers import (
    PositionsTaken,
    alignment,
    load_positions,
    position_weights,
    positions_around,
)
from securevfl.models.optimisers import PacedOptimizer

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


class NetworkPrimary(primary.Primary):
    """Trains the primary's half of the split network, a round for each batch."""

    def __init__(
        self,
        plan: RunPlan,
        data: primary.PrimaryData,
        top: nn.Module,
        exchange: Exchange,
        *,
        optimizer: PacedOptimizer,
        dropout: DropoutStream,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            top: Its half of the split network.
            exchange: Where the secondaries are.
            optimizer: Of ``top``.
            dropout: Its own stream of dropped units.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.optimizer = optimizer
        self.dropout = dropout
        self.drawn: DrawnLabels | None = None
        """What it trains on in the place of labels, under ``training.label_epsilon``."""
        self._positions_taken: PositionsTaken | None = None

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:
        """Train the network over all training rows; see :class:`Primary`."""
        chosen = stream(self.seed, "party-dropout", epoch)
        total, outputs = 0.0, []
        parts = training_batches(
            self.data.training_rows,
            batch_size=self.training.batch_size,
            seed=self.seed,
            epoch=epoch,
        )
        for done, rows in enumerate(parts, 1):
            loss, output = self._train_batch(rows, self._draw_active(chosen), epoch=epoch)
            self.losses.append(loss)
            total += loss * len(rows)
            outputs.append(output)
            self.observe(RoundDone(epoch=epoch, done=done, of=len(parts), loss=loss))
        every = self.plan.average_positions_every
        if every and epoch % every == 0:
            self._average_positions()
        return total / len(self.data.training_rows), np.concatenate(parts), torch.cat(outputs)

    def _train_batch(
        self, rows: npt.NDArray[np.int64], active: tuple[int, ...], *, epoch: int
    ) -> tuple[float, Tensor]:
        plan = self._plan(rows, "train", active)
        if not self.top.training:
            self.top.train()
        losses: list[float] = []
        anchor = torch.zeros((), requires_grad=True)
        # All that this round's device computes is checked before the gradient leaves.
        targets = self._targets(rows) if self.drawn is None else self.drawn.targets_of(rows)
        with self.dropout.active(), read_together() as known:
            aggregate = split_average(
                self.exchange,
                plan,
                protect=lambda gradient: protect_gradient(gradient, targets, self.training),
                anchor=anchor,
            )
            output = self._forward(plan, aggregate)
            loss = (self.drawn or self.head).loss(output, targets)
            stop = refuse_lost("the loss", plan.round_number)

            def keep(value: Tensor) -> None:
                stop(not math.isfinite(value))
                losses.append(float(value))

            known.add(loss.detach(), keep)
            set_gradients(loss, self.optimizer.parameters, anchor)
        self.optimizer.step(epoch=epoch)
        (value,) = losses
        # A GPU's next replay writes where this one's outputs are.
        return value, output.detach().clone()

    def _weight(self, outputs: Tensor, rows: Int64[np.ndarray, " rows"]) -> float:
        """Return lambda as it would be chosen if this epoch were the last."""
        base = self.data.base
        if base is None:
            return 1.0
        known = base[torch.as_tensor(rows, device=base.device)]
        return choose_scale(self.head, base=known, joint=outputs, targets=self._targets(rows))

    def _draw_active(self, chosen: np.random.Generator) -> tuple[int, ...]:
        # [FeT] section 5.1: a portion r_d of the parties is left out of the round, and the average
        # divides by the number of those that remain.
        ranks = self.exchange.ranks
        if self.plan.active == len(ranks):
            return ranks
        return tuple(sorted(chosen.choice(ranks, self.plan.active, replace=False).tolist()))

    def _average_positions(self) -> None:
        number = self.exchange.rounds.next()
        mean = average_weights(
            self.exchange.peers,
            AverageRequest(round_number=number),
            position_weights(self.top),
            weight=1,
            number=number,
        )
        if self._positions_taken is None:
            self._positions_taken = positions_around(self.top, mean)
        load_positions(self.top, mean)

    def explanation(self, others: Mapping[str, PositionsTaken]) -> dict[str, Any]:
        """Return the top model's explanation, and how the first average aligned its encodings."""
        explanation = super().explanation(others)
        if self._positions_taken is not None:
            explanation["alignment"] = alignment(
                self.top.get_submodule("positions"),
                self._positions_taken,
                key_dim=self.data.keys.shape[1],
                others={name: taken.own for name, taken in others.items()},
            )
        return explanation

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            **super().state(),
            "optimizer": self.optimizer.state_dict(),
            "dropout": self.dropout.state,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        super().load_state(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.dropout.state = state["dropout"]
