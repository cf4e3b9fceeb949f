"""The primary's two kinds: a network that learns by gradients, and a model fitted in one step."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from securevfl.config.federation import FederationConfig
from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, reads
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.rows import training_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import own_inputs
from securevfl.federation.messages import AverageRequest, EpochMark, RoundPlan
from securevfl.federation.rounds import cut, primary
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.label_defences import DrawnLabels, protect_gradient
from securevfl.federation.rounds.release import refuse_lost
from securevfl.federation.rounds.updates import DropoutStream, set_gradients
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import average_weights
from securevfl.models.alone.choice import choose_scale
from securevfl.models.alone.margins import cross_fit
from securevfl.models.alone.saving import require_keepable
from securevfl.models.fet.positions import PositionsTaken, alignment
from securevfl.models.fitted_top import FittedTop, MixedTop, TiedTop, fit_tied
from securevfl.models.optimisers import PacedOptimizer
from securevfl.models.tasks import TaskHead

# SplitAvg as an autograd function: the aggregate forwards, one gradient for all backwards.


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


# The primary whose top model is a network: it trains by rounds.


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
            cut.position_weights(self.top),
            weight=1,
            number=number,
        )
        if self._positions_taken is None:
            self._positions_taken = cut.positions_around(self.top, mean)
        cut.load_positions(self.top, mean)

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


# The primary of a frozen run whose top model is fitted in one go, in place of epochs.


class OneFitPrimary(primary.Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: primary.PrimaryData,
        inputs: primary.PrimaryInputs,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            inputs: The same as the top model reads it.
            top: Not fitted yet.
            exchange: Where released rows are.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.inputs = inputs

    def take_base(self, margins: Float[Tensor, "rows outputs"]) -> None:
        """Let margins of the primary alone answer as far as the top model's do not."""
        inputs = replace(self.inputs, base=margins)
        super().take_base(margins)
        self.inputs = inputs

    def _values(
        self, top: FittedTop, rows: Int64[np.ndarray, " rows"]
    ) -> Float64[np.ndarray, "rows inputs"]:
        """Return what is known of rows: own numbers, released ones, similarities."""
        parts = []
        for plan, average in self._rounds(rows, "train"):
            (features, _, aggregate, similarities), _ = self._read(plan, average)
            parts.append(top.inputs(features, aggregate, similarities))
        return np.concatenate(parts)

    @property
    def epochs(self) -> int:
        """The fit."""
        return 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.is_finished:
            self._run_epoch(after_epoch)


# What of a run differs where its top model is an estimator: how it is built, and what it reads.


def build_fitted_top(config: FederationConfig, table: PartyTable, head: TaskHead) -> FittedTop:
    """Return a top model that is not fitted yet.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table, or new rows of it.
        head: The task.
    """
    positions, width = config.family.cut_shape(config.model)
    reads = config.family.needs_similarities(config.model)
    own = own_inputs(table)
    return FittedTop(
        head,
        words=own.words,
        own=own.values.shape[1],
        released=positions * width,
        similarities=len(config.secondaries) * config.model.neighbours if reads else 0,
    )


def read_by_top(
    config: FederationConfig,
    table: PartyTable,
    *,
    features: Float[Tensor, "rows features"],
    keys: Float[Tensor, "rows dimension"],
) -> tuple[Tensor, Tensor]:
    """Return the primary's own numbers as the top model reads them, as features and as keys.

    What is fitted in one go reads all of them unscaled, as features, and no keys.

    Args:
        config: The federation file.
        table: The rows.
        features: Scaled, as a network reads them.
        keys: Likewise.
    """
    if config.top is None:
        return features, keys
    own = torch.from_numpy(own_inputs(table).values).to(features.device)
    return own, own[:, :0]


# The primary of a frozen run whose top model is an estimator.


class FittedPrimary(OneFitPrimary):
    """Fits an estimator to own numbers, released ones and similarities."""

    top: FittedTop

    def __init__(
        self,
        plan: RunPlan,
        data: primary.PrimaryData,
        inputs: primary.PrimaryInputs,
        top: FittedTop,
        exchange: Exchange,
        *,
        estimator: Any,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            inputs: The same as the estimator reads it.
            top: Not fitted yet.
            exchange: Where released rows are.
            estimator: A name, or one of scikit-learn.
            observe: Hears of progress.
        """
        super().__init__(plan, data, inputs, top, exchange, observe=observe)
        self._estimator = estimator

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        values = self._values(self.top, rows)
        self.top.fill_gaps_by(values)
        targets = self._targets(rows)
        fitted = cross_fit(
            self._estimator,
            self.top.fill_gaps(values),
            targets.cpu().numpy(),
            self.head,
            train=np.arange(len(rows)),
            seed=self.seed,
            where="model.top",
        )
        # Now, rather than when its file is read.
        require_keepable(fitted.model, where="model.top")
        self.top.model = fitted.model
        outputs = self.out_of_fold = torch.from_numpy(fitted.margins).to(targets.device)
        loss = float(self.head.loss(outputs, targets))
        self.losses.append(loss)
        return loss, rows, outputs


# The primary of a frozen run whose top model corrects the base: a convex fit, and trees beside it.

_FOLDS = 5


class TiedPrimary(OneFitPrimary):
    """Fits a tied top model to released numbers, over the base, and weighs trees beside it."""

    top: TiedTop | MixedTop

    def _train_epoch(self, epoch: int) -> tuple[float, Int64[np.ndarray, " train"], Tensor]:  # noqa: ARG002
        """Fit, and return the loss of the training rows out of fold, the rows, their outputs."""
        rows = self.data.training_rows
        tied = self.top if isinstance(self.top, TiedTop) else self.top.tied
        base, targets = self._base(rows), self._targets(rows)
        drawn = stream(self.seed, "tied-folds").permutation(len(rows)) % _FOLDS
        released = torch.cat([average.flatten(1) for _, average in self._rounds(rows, "train")])
        if tied.reader is not None:
            # Of an average of k terms, each with its own noise.
            noise_std = self.plan.noise_share_std / math.sqrt(len(self.plan.secondaries))
            tied.reader.fit(released, noise_std=noise_std)
        fitted, added = fit_tied(
            lambda: copy.deepcopy(tied),
            tied.read(released),
            base,
            targets,
            self.head,
            folds=torch.from_numpy(drawn).to(base.device),
        )
        tied.load_state_dict(fitted.state_dict())
        self.out_of_fold = base + added.to(base)
        if isinstance(self.top, MixedTop):
            values = self._values(self.top.trees, rows)
            self.out_of_fold = self.top.fit(values, self.out_of_fold, targets, seed=self.seed)
        loss = float(self.head.loss(self.out_of_fold, targets))
        self.losses.append(loss)
        return loss, rows, self.out_of_fold

    def _base(self, rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows outputs"]:
        assert self.data.base is not None, "checked with the federation file"
        return self.data.base[torch.as_tensor(rows, device=self.data.base.device)]
