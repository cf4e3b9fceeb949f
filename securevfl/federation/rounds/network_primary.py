"""The primary with a network as its top model: it trains by rounds of SplitAvg."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from securevfl.core.conventions import stream
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.rows import training_batches
from securevfl.federation.exchange import Exchange, RoundPlan
from securevfl.federation.rounds.cut import (
    load_positions,
    position_weights,
    positions_around,
    with_iso_noise,
)
from securevfl.federation.rounds.party_workers import PartyWorkers, TopRows
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.rounds.release import require_finite
from securevfl.federation.rounds.updates import DropoutStream
from securevfl.federation.rounds.worker_group import WorkerGroup
from securevfl.federation.run_plan import RunPlan
from securevfl.models.alone.choice import choose_scale
from securevfl.models.layers import PositionsTaken, alignment
from securevfl.models.optimisers import PacedOptimizer

# SplitAvg as an autograd function: the aggregate forwards, one gradient for all backwards.


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


# The primary whose top model is a network: it trains by rounds.


class NetworkPrimary(Primary):
    """Trains the primary's half of the split network, a round for each batch."""

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
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
        self._positions_taken: PositionsTaken | None = None
        self._workers: PartyWorkers | None = None

    def share_with(self, group: WorkerGroup) -> None:
        """Compute over this party's own processes from now on.

        Raises:
            ConfigError: If the model looks at all rows of a batch.
        """
        self._workers = PartyWorkers(
            group, TopRows(self.top), stream=self.dropout, device=self.data.features.device
        )

    def _compute(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        if self._workers is None:
            return super()._compute(features, keys, aggregate, similarities)
        read = () if similarities is None else (similarities,)
        return self._workers(features, keys, aggregate, *read)

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
        self.top.train()
        with self.dropout.active():
            aggregate = split_average(self.exchange, plan, iso_scale=self.training.iso_gradients)
            output = self._forward(plan, aggregate)
            loss = self.head.loss(output, self._targets(rows))
            require_finite("the loss", loss.detach(), round_number=plan.round_number)
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step(epoch=epoch)
        return float(loss.detach()), output.detach()

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
        mean = self.exchange.average_positions(position_weights(self.top))
        if self._positions_taken is None:
            self._positions_taken = positions_around(self.top, mean)
        load_positions(self.top, mean)

    def explanation(self, others: Mapping[str, PositionsTaken]) -> dict[str, Any]:
        """Return what the top model tells, and how the first average aligned its encodings."""
        told = super().explanation(others)
        if self._positions_taken is not None:
            told["alignment"] = alignment(
                self.top.get_submodule("positions"),
                self._positions_taken,
                key_dim=self.data.keys.shape[1],
                others={name: taken.own for name, taken in others.items()},
            )
        return told

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
