"""The primary's run of pretraining, over any exchange."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from securevfl.core.progress import Observer, PretrainingIteration, PretrainingRound
from securevfl.core.seeds import stream
from securevfl.federation.rounds import RoundCounter
from securevfl.pretraining.collapse import CollapseWatch
from securevfl.pretraining.exchange import PretrainingExchange
from securevfl.pretraining.learner_with_records import IterationFigures, LearnerWithRecords
from securevfl.pretraining.rows import PretrainingRows, even_batches
from securevfl.pretraining.sending import Sending, sent_weights


class PretrainingRun:
    """Iterate cross-party learning, local learning and aggregation.

    References:
        [FedHSSL] Algorithm 1.
    """

    def __init__(
        self,
        learning: LearnerWithRecords,
        exchange: PretrainingExchange,
        rows: PretrainingRows,
        *,
        steps: tuple[str, ...],
        sending: Sending,
        rounds: RoundCounter,
        seed: int,
        save: Callable[[int, dict[str, Any]], None],
        observe: Observer,
    ) -> None:
        self.learning = learning
        self.exchange = exchange
        self.rows = rows
        self.steps = steps
        self.sending = sending
        self.rounds = rounds
        self.seed = seed
        self.save = save
        self.observe = observe
        self.history: list[dict[str, Any]] = []
        self._watch = CollapseWatch(learning.name, observe)

    def run(self, *, start: int = 0) -> None:
        """Do the iterations from ``start``, counted from 0, to the last.

        Reveals:
            What :class:`PretrainingExchange` says of each of its methods.
        """
        total = self.learning.learner.settings.iterations
        if start >= total:
            # All is learned already; secondaries still have to load what they saved.
            self.exchange.begin_iteration(total - 1, self.rows.held_out)
            self.exchange.end_iteration(total, last=True)
        for iteration in range(start, total):
            began = time.monotonic()
            self.learning.begin_iteration(iteration)
            self.exchange.begin_iteration(iteration, self.rows.held_out)
            if "cross" in self.steps:
                self._cross(iteration)
            if "local" in self.steps:
                self.exchange.local(iteration)
                self.learning.learn_local(iteration)
            if "aggregate" in self.steps:
                self._aggregate()
            done, last = iteration + 1, iteration + 1 == total
            others = self.exchange.end_iteration(done, last=last)
            figures = self.learning.figures()
            line = self._record(done, [figures, *others], seconds=time.monotonic() - began)
            self.save(done, {"member": self.learning.state(), "history": self.history})
            self._watch(figures, last=last)
            self.observe(PretrainingIteration(iterations=total, **line))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what was saved after an iteration."""
        self.learning.learner.load_state(state["member"])
        self.history = list(state["history"])

    def _cross(self, iteration: int) -> None:
        settings = self.learning.learner.settings
        for epoch in range(settings.cross_epochs):
            order = stream(self.seed, "pretraining", "aligned", iteration, epoch)
            shuffled = order.permutation(self.rows.aligned)
            parts = even_batches(shuffled, batch_size=settings.batch_size)
            for done, rows in enumerate(parts, 1):
                number = self.rounds.next()
                own = self.learning.project(rows, round_number=number)
                sent = self.sending(own, round_number=number)
                targets = self.exchange.cross(rows, sent, round_number=number)
                self.learning.learn_cross(targets)
                self.observe(PretrainingRound(iteration=iteration + 1, done=done, of=len(parts)))

    def _aggregate(self) -> None:
        scale = self.learning.learner.settings.iso_weights
        mean = self.exchange.aggregate(
            sent_weights(self.learning.shared_weights(), scale),
            weight=self.learning.weight,
            round_number=self.rounds.next(),
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
