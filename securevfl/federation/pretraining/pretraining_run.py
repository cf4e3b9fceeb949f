"""The primary's loop of pretraining, and the mechanism of the projections that it sends."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, PretrainingIteration, PretrainingRound
from securevfl.dp.clipping import clip_rows
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    Projections,
    TopsRequest,
)
from securevfl.federation.pretraining.pretraining_secondary import (
    CollapseWatch,
    IterationFigures,
    LearnerWithRecords,
    PretrainingRows,
    PretrainingSecondary,
    even_batches,
    projection_cut,
)
from securevfl.federation.rounds.cut import with_iso_noise
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session.peers import Peers, average_weights
from securevfl.ledger.ledger import Ledger
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.learner import unit
from securevfl.mpc.codec import RingFormat, quantise, to_float

# What the primary sends in pretraining: as it is, with ISO noise, or accounted for.

# What torch's batch norms call their running statistics.
_STATISTICS: Final = ("running_mean", "running_var")


@runtime_checkable
class ProjectionMechanism(Protocol):
    """Protects the primary's projections before they leave."""

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return what is sent in place of the projections, which are of any length.

        Reveals:
            To every secondary: what is returned.
        """
        ...

    def close(self) -> None:
        """Close the files that are held open."""
        ...


class PlainProjections:
    """Their directions, without lengths; losses read nothing else."""

    def __call__(
        self,
        projections: Float[Tensor, "batch width"],
        *,
        round_number: int,  # noqa: ARG002 - a Sending
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors.

        Reveals:
            To every secondary: a representation of each of the primary's aligned rows.
        """
        return unit(projections)

    def close(self) -> None:
        """Do nothing."""


class IsoProjections:
    """The projections as they are, with ISO noise: a heuristic that promises nothing.

    References:
        [FedHSSL] section VI-B ("applies ISO to the output of its cross-party encoder"), Equation 7.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(
        self,
        projections: Float[Tensor, "batch width"],
        *,
        round_number: int,  # noqa: ARG002 - a Sending
    ) -> Float[Tensor, "batch width"]:
        """Return the projections with noise.

        Reveals:
            To every secondary: the noisy projections, and from the size of their noise how long the
            longest of the batch is. No guarantee goes with them.
        """
        return with_iso_noise(projections, self.scale)

    def close(self) -> None:
        """Do nothing."""


class GaussianProjections:
    """Clipped vectors with discrete Gaussian noise, each batch booked before it is sent.

    The encoder was trained on the rows, so one row may change all B vectors of a batch, by up to
    2C each: this is the unit ``secondary-record`` of a trained encoder (docs/privacy.md, section
    3), with the primary as the only party that contributes.
    """

    def __init__(self, plan: ReleasePlan, ledger: Ledger, *, noise_share_std: float) -> None:
        """Make it.

        Args:
            plan: What pretraining sends in all.
            ledger: Books every batch.
            noise_share_std: ``tau`` at which the plan keeps its promise.
        """
        tau = noise_share_std
        self.ledger = ledger
        self.ring = RingFormat.choose(
            clip_norm=plan.privacy.clip_norm, noise_share_std=tau, parties=1
        )
        self.clip_norm = plan.privacy.clip_norm
        self.noise = ExactDiscreteGaussian(tau / self.ring.granularity)

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Book the batch and return its unit vectors with noise.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing was sent.

        Reveals:
            To every secondary: the noised vectors, covered by the ledger's epsilon.
        """
        # Which rows they are does not matter to the price of a trained encoder.
        rows = np.arange(len(projections))
        self.ledger.charge(round_number=round_number, rows=rows, purpose="pretraining")
        clipped = clip_rows(unit(projections).unsqueeze(1), self.clip_norm).squeeze(1)
        units = quantise(clipped, self.ring)
        units += self.noise.sample(units.shape, device=units.device)
        return to_float(units, self.ring, divisor=1)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


def projection_mechanism(
    settings: PretrainingSettings, *, batches: int, rows: int, ledger: Path, run: str, party: str
) -> ProjectionMechanism:
    """Return what the federation file chooses.

    Args:
        settings: How to pretrain.
        batches: Batches of aligned rows in one pass.
        rows: Aligned rows.
        ledger: The path of the primary's ledger of pretraining.
        run: The run's id.
        party: The primary's name.

    Raises:
        ConfigError: If the ledger is in use, or the noise does not fit the ring.
        PrivacyError: If the ledger was altered.
    """
    if settings.primary_sends == "plain":
        scale = settings.iso_projections
        return IsoProjections(scale) if scale else PlainProjections()
    if settings.epsilon is None:
        raise ConfigError('pretraining.epsilon: primary_sends = "gaussian" needs it')
    passes = settings.iterations * settings.cross_epochs
    plan = ReleasePlan(
        privacy=Privacy(
            mechanism="gaussian",
            epsilon=settings.epsilon,
            delta=settings.delta,
            clip_norm=1.0,
            unit="secondary-record",
            encoder="trained",
        ),
        parties=1,
        min_active=1,
        rounds=passes * batches,
        rows_per_round=-(-rows // batches),
        row_releases=passes * rows,
        # Batches are booked by their sizes, not by their rows.
        releases_per_row=passes * batches,
        links=1,
    )
    tau = plan.noise_share_std()
    book = Ledger(ledger, party=party, plan=plan, noise_share_std=tau, run=run)
    return GaussianProjections(plan, book, noise_share_std=tau)


def sent_weights(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the primary's weights as they enter the mean of all parties': with ISO noise.

    Each parameter gets noise of its own size. A batch norm's running statistics are no parameters,
    and stay as they are: a noised variance may be negative.

    Args:
        weights: The primary's local top encoder and heads, by name.
        scale: lambda of ``pretraining.iso_weights``; 0 adds no noise.

    Reveals:
        Nothing by itself. From the mean, of two parties the other one takes the noisy weights, the
        statistics as they are, and from the noise each parameter's longest row. No guarantee goes
        with them.

    References:
        [FedHSSL] section VI-B ("and parameters of its local top encoder"), Equation 7.
    """
    return {
        name: value if name.endswith(_STATISTICS) else with_iso_noise(value, scale)
        for name, value in weights.items()
    }


# The primary's run of pretraining.


class PretrainingRun:
    """Iterate cross-party learning, local learning and aggregation.

    References:
        [FedHSSL] Algorithm 1.
    """

    def __init__(
        self,
        learning: LearnerWithRecords,
        peers: Peers,
        rows: PretrainingRows,
        *,
        steps: tuple[str, ...],
        projection_mechanism: ProjectionMechanism,
        rounds: RoundCounter,
        save: Callable[[int, dict[str, Any]], None],
        observe: Observer,
        simulated: Sequence[PretrainingSecondary] = (),
    ) -> None:
        """Make it.

        Args:
            learning: The primary's learner with its records.
            peers: The secondaries.
            rows: Which of the primary's rows are for what.
            steps: Steps of an iteration that the family has.
            projection_mechanism: Protects the primary's projections.
            rounds: Gives out the session's round numbers.
            save: Saves a checkpoint's state after so many iterations.
            observe: Receives progress.
            simulated: Secondaries of this process, whose figures are averaged into the history.
        """
        self.learning = learning
        self.peers = peers
        self.rows = rows
        self.steps = steps
        self.projection_mechanism = projection_mechanism
        self.rounds = rounds
        self.save = save
        self.observe = observe
        self.simulated = simulated
        self.history: list[dict[str, Any]] = []
        self._watch = CollapseWatch(learning.name, observe)

    def run(self, *, start: int = 0) -> None:
        """Do the iterations from ``start``, counted from 0, to the last.

        Reveals:
            To the secondaries: which rows are for validation and testing, and the iteration. In
            cross-party steps, what :meth:`exchange_projections` reveals; in aggregation, to every
            party the mean of all local top encoders, and to the primary the sum of their weights:
            the number of parties or, with ``weights = "records"``, of all parties' records.
        """
        total = self.learning.learner.settings.iterations
        if start >= total:
            # All is learned already; secondaries still have to load what they saved.
            self._begin(total - 1)
            self.peers.tell(IterationEnd(iterations=total, last=True))
        for iteration in range(start, total):
            began = time.monotonic()
            self.learning.begin_iteration(iteration)
            self._begin(iteration)
            if "cross" in self.steps:
                self._cross(iteration)
            if "local" in self.steps:
                self.peers.tell(LearnLocally(iteration=iteration))
                self.learning.learn_local(iteration)
            if "aggregate" in self.steps:
                self._aggregate()
            done, last = iteration + 1, iteration + 1 == total
            self.peers.tell(IterationEnd(iterations=done, last=last))
            figures = self.learning.figures()
            others = [one.figures for one in self.simulated if one.figures is not None]
            line = self._record(done, [figures, *others], seconds=time.monotonic() - began)
            self.save(done, {"member": self.learning.state(), "history": self.history})
            self._watch(figures, last=last)
            self.observe(PretrainingIteration(iterations=total, **line))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what was saved after an iteration."""
        self.learning.learner.load_state(state["member"])
        self.history = list(state["history"])

    def _begin(self, iteration: int) -> None:
        self.peers.tell(IterationBegin(iteration=iteration, held_out=self.rows.held_out))

    def _cross(self, iteration: int) -> None:
        settings = self.learning.learner.settings
        for epoch in range(settings.cross_epochs):
            order = stream(self.learning.seed, "pretraining", "aligned", iteration, epoch)
            shuffled = order.permutation(self.rows.aligned)
            parts = even_batches(shuffled, batch_size=settings.batch_size)
            for done, rows in enumerate(parts, 1):
                number = self.rounds.next()
                own = self.learning.project(rows, round_number=number)
                sent = self.projection_mechanism(own, round_number=number)
                targets = self.exchange_projections(rows, sent, round_number=number)
                self.learning.learn_cross(targets)
                self.observe(PretrainingRound(iteration=iteration + 1, done=done, of=len(parts)))

    def exchange_projections(
        self, rows: npt.NDArray[np.int64], sent: Float[Tensor, "batch width"], *, round_number: int
    ) -> list[Float[Tensor, "batch width"]]:
        """Exchange projections of aligned rows; every secondary learns from the primary's.

        Args:
            rows: The batch.
            sent: The primary's projections, protected as its settings say.
            round_number: A new round.

        Returns:
            The average of the secondaries' unit vectors; or, in a plain exchange, each of them.

        Reveals:
            To every secondary: the row ids and ``sent``. To the primary: the average alone, which
            of one secondary is that secondary's; in a plain exchange every secondary's.
        """
        batch = CrossBatch(round_number=round_number, rows=rows, sent=sent.detach().cpu().numpy())
        if self.learning.learner.settings.exchange == "plain":
            answers = self.peers.ask(batch, Projections, shape=tuple(sent.shape))
            return [torch.from_numpy(one.vectors).to(sent.device) for one in answers]
        parties = len(self.peers.ranks)
        cut = projection_cut(sent.shape[1], parties=parties)
        own = cut.zeros(len(rows)).to(sent.device)
        total = self.peers.total(batch, own, round_number=round_number)
        return [cut.decode(total, rows=len(rows), active=parties)]

    def _aggregate(self) -> None:
        scale = self.learning.learner.settings.iso_weights
        number = self.rounds.next()
        mean = average_weights(
            self.peers,
            TopsRequest(round_number=number),
            sent_weights(self.learning.shared_weights(), scale),
            weight=self.learning.weight,
            number=number,
        )
        self.learning.load_shared(mean)

    def _record(
        self, done: int, parties: list[IterationFigures], *, seconds: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"iteration": done, "seconds": round(seconds, 3)}
        for name in ("cross_loss", "cross_spread", "local_loss", "local_spread"):
            values = [value for one in parties if (value := getattr(one, name)) is not None]
            if values:
                line[name] = sum(values) / len(values)
        self.history.append(line)
        return line
