"""The primary's run of pretraining: cross-party learning, local learning and aggregation."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from securevfl.core import progress
from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, reads, to_device
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session.peers import Peers, average_weights
from securevfl.stages.pretraining.learning import (
    CollapseWatch,
    IterationFigures,
    LearnerWithRecords,
)
from securevfl.stages.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    Projections,
    TopsRequest,
)
from securevfl.stages.pretraining.projections import (
    ProjectionMechanism,
    projection_cut,
    sent_weights,
)
from securevfl.stages.pretraining.rows import PretrainingRows, even_batches
from securevfl.stages.pretraining.secondary import PretrainingSecondary


@dataclass(eq=False)
class PretrainingRun:
    """Iterate cross-party learning, local learning and aggregation.

    References:
        [FedHSSL] Algorithm 1.
    """

    learning: LearnerWithRecords
    """The primary's learner with its records."""
    peers: Peers
    rows: PretrainingRows
    _: KW_ONLY
    steps: tuple[str, ...]
    """Steps of an iteration that the family has."""
    projection_mechanism: ProjectionMechanism
    """Protects the primary's projections."""
    rounds: RoundCounter
    save: Callable[[int, dict[str, Any]], None]
    """Saves a checkpoint's state after so many iterations."""
    observe: progress.Observer
    simulated: Sequence[PretrainingSecondary] = ()
    """Secondaries of this process, whose figures are averaged into the history."""
    history: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._watch = CollapseWatch(self.learning.name, self.observe)

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
            self.learning.begin_iteration(iteration, self.steps)
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
            others = [run.figures for run in self.simulated if run.figures is not None]
            line = self._record(done, [figures, *others], seconds=time.monotonic() - began)
            self.save(done, {"member": self.learning.learner.state(), "history": self.history})
            self._watch(figures, last=last)
            self.observe(progress.PretrainingIteration(iterations=total, **line))

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
                with read_together():
                    own = self.learning.project(rows, round_number=number)
                    sent = self.projection_mechanism(own, round_number=number)
                    targets = self.exchange_projections(rows, sent, round_number=number)
                self.learning.learn_cross(targets)
                self.observe(
                    progress.PretrainingRound(iteration=iteration + 1, done=done, of=len(parts))
                )

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
        (known,) = reads().host(sent)
        batch = CrossBatch(round_number=round_number, rows=rows, sent=known.numpy())
        if self.learning.learner.settings.exchange == "plain":
            answers = self.peers.ask(batch, Projections, shape=tuple(sent.shape))
            return [to_device(answer.vectors, sent.device) for answer in answers]
        active = [self.peers.name(rank) for rank in self.peers.ranks]
        cut = projection_cut(sent.shape[1], parties=len(active))
        words = self.peers.total(batch, cut.zeros(len(rows)), round_number=round_number)
        total = to_device(words, sent.device)
        return [cut.decode(total, rows=len(rows), active=active, round_number=round_number)]

    def _aggregate(self) -> None:
        scale = self.learning.learner.settings.iso_weights
        number = self.rounds.next()
        mean = average_weights(
            self.peers,
            TopsRequest(round_number=number),
            sent_weights(self.learning.learner.shared_weights(), scale),
            weight=self.learning.weight,
            number=number,
            bits=self.learning.bits,
        )
        self.learning.learner.load_shared(mean)

    def _record(
        self, done: int, parties: list[IterationFigures], *, seconds: float
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"iteration": done, "seconds": round(seconds, 3)}
        for name in ("cross_loss", "cross_spread", "local_loss", "local_spread"):
            values = [value for party in parties if (value := getattr(party, name)) is not None]
            if values:
                line[name] = sum(values) / len(values)
        self.history.append(line)
        return line
