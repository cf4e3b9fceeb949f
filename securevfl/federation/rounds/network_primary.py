"""The primary whose top model is a network: it trains by rounds, through gradients."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from securevfl.core.conventions import stream
from securevfl.core.devices import read_together
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.tables import training_batches
from securevfl.federation.messages import AverageRequest, RoundPlan
from securevfl.federation.released_labels import DrawnLabels
from securevfl.federation.rounds import primary
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.release import refuse_lost
from securevfl.federation.rounds.updates import DropoutStream, set_gradients
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import average_weights
from securevfl.models.alone.choice import choose_scale
from securevfl.models.fet.positions import load_positions, position_weights
from securevfl.models.optimisers import PacedOptimizer


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
            exchange: Rounds with the secondaries.
            optimizer: Of ``top``.
            dropout: Its own stream of dropped units.
            observe: Called with progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.optimizer = optimizer
        self.dropout = dropout
        self.drawn: DrawnLabels | None = None
        """What it trains on in the place of labels, under ``training.label_epsilon``."""

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:
        """Train the network over all training rows; see :class:`Primary`.

        A round's average is a leaf of the primary's graph. Each active secondary divides the
        gradient that it gets by their number, because it holds one term of an average; what the
        primary's own model learns has no noise.

        Reveals:
            What :meth:`Exchange.release` and :meth:`Exchange.return_gradient` reveal.

        References:
            [FeT] section 6.1 (SplitAvg) and Algorithm 1, lines 12 to 16.
        """
        chosen = stream(self.seed, "party-dropout", epoch)
        total, outputs = 0.0, []
        parts = training_batches(
            self.data.training_rows,
            batch_size=self.training.batch_size,
            seed=self.seed,
            epoch=epoch,
        )
        for done, rows in enumerate(parts, 1):
            plan = self._plan(rows, "train", self._draw_active(chosen))
            if not self.top.training:
                self.top.train()
            targets = self.targets_of(rows) if self.drawn is None else self.drawn.targets_of(rows)
            # All that this round's device computes is checked before the gradient leaves.
            with self.dropout.active(), read_together() as known:
                with torch.no_grad():
                    average = self.exchange.release(plan)
                output = self._forward(plan, average.requires_grad_())
                loss = (self.drawn or self.head).loss(output, targets)
                known.add(loss.detach(), self._checked_loss(plan))
                (gradient,) = set_gradients(loss, self.optimizer.parameters, average)
                with torch.no_grad():
                    self.exchange.return_gradient(plan, *known.host(gradient))
            self.optimizer.step(epoch=epoch)
            total += self.losses[-1] * len(rows)
            # A GPU's next replay writes where this one's outputs are.
            outputs.append(output.detach().clone())
            self.observe(RoundDone(epoch=epoch, done=done, of=len(parts), loss=self.losses[-1]))
        every = self.plan.average_positions_every
        if every and epoch % every == 0:
            self._average_positions()
        return total / len(self.data.training_rows), np.concatenate(parts), torch.cat(outputs)

    def _checked_loss(self, plan: RoundPlan) -> Callable[[Tensor], None]:
        """Return what notes a round's loss once it is known, or ends the run."""
        stop = refuse_lost("the loss", plan.round_number)

        def note(loss: Tensor) -> None:
            stop(not math.isfinite(loss))
            self.losses.append(float(loss))

        return note

    def _weight(self, outputs: Tensor, rows: Int64[np.ndarray, " rows"]) -> float:
        """Return lambda as it would be chosen if this epoch were the last."""
        base = self.data.base
        if base is None:
            return 1.0
        known = base[torch.as_tensor(rows, device=base.device)]
        return choose_scale(self.head, base=known, joint=outputs, targets=self.targets_of(rows))

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
            number=number,
        )
        load_positions(self.top, mean)

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
