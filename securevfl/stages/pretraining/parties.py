"""Both parts of pretraining: a secondary answers messages, and the primary iterates."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core import progress
from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, reads, to_device
from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer
from securevfl.federation.messages import Mean
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session.peers import (
    Handler,
    Handlers,
    Next,
    Peers,
    Reply,
    StageEnd,
    average_weights,
    shapes_of,
)
from securevfl.federation.stage import StageAtSecondary
from securevfl.models.family import PretrainingSettings
from securevfl.mpc.codec import RingFormat, encode_weighted, quantise, words_needed
from securevfl.stages.pretraining.learner import unit
from securevfl.stages.pretraining.learning import (
    CollapseWatch,
    IterationFigures,
    LearnerWithRecords,
    PretrainingRows,
    even_batches,
)
from securevfl.stages.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    PretrainingValidator,
    Projections,
    TopsRequest,
)

# A vector is of length 1 but for the rounding of float32.
_LONGEST: Final = 1 + 2.0**-20

BuildLearner = Callable[[npt.NDArray[np.int64]], LearnerWithRecords]
"""Makes the learner once it is known which of the party's records it may learn from."""


@dataclass(eq=False)
class PretrainingSecondary(StageAtSecondary):
    """Handles the primary's messages of pretraining, with the records linked to its rows."""

    data: SecondaryData
    """Its table as tensors, and its links."""
    validator: PretrainingValidator
    """Refuses messages that are not due."""
    settings: PretrainingSettings
    _: KW_ONLY
    parties: int
    """Secondaries of the run."""
    build: BuildLearner
    """Builds its learner with the records that it may learn from."""
    save: Callable[[int, dict[str, Any]], None]
    """Saves a checkpoint's state after so many iterations."""
    finish: Callable[[LearnerWithRecords], None]
    """Lets the bottom model start from the encoders, once the last iteration has ended."""
    observe: Observer
    """Receives warnings."""
    log: Callable[..., None]
    restore: Callable[[Callable[[Any], object]], None] | None
    """Loads the state of the checkpoint to resume from."""
    figures: IterationFigures | None = field(default=None, init=False)
    """Losses and spreads of the last iteration that has ended."""
    _learning: LearnerWithRecords | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._plain = self.settings.exchange == "plain"
        self._cut = projection_cut(self.settings.projection_width, parties=self.parties)
        self._watch = CollapseWatch(self.data.name, self.observe)

    @property
    def opening(self) -> Handlers:
        """Handlers of the dialogue before the first round; the last iteration's end closes it."""
        return {
            IterationBegin: Handler(self._begin),
            CrossBatch: Handler(self._cross, lambda: {"width": self._cut.shape[0]}),
            LearnLocally: Handler(self._learn_locally),
            TopsRequest: Handler(self._add_top),
            Mean: Handler(
                self._load_mean,
                lambda: {"shapes": shapes_of(self.learning.learner.shared_weights())},
                follows=True,
            ),
            IterationEnd: Handler(self._end),
        }

    @property
    def learning(self) -> LearnerWithRecords:
        """The learner with its records; made when the first iteration begins."""
        if self._learning is None:
            raise ProtocolError("pretraining: the primary asks for work before an iteration")
        return self._learning

    def _begin(self, begin: IterationBegin, _reply: Reply) -> None:
        """Get ready; the first time, leave out the records of rows that are held out."""
        self.validator.validate_begin(begin)
        if self._learning is None:
            self._learning = self.build(self._own_records(begin.held_out))
            if self.restore is not None:
                self.restore(self._learning.learner.load_state)
        self._learning.begin_iteration(begin.iteration, self.validator.steps)

    def _cross(self, batch: CrossBatch, reply: Reply) -> None:
        """Answer with projections of a batch, and learn from the primary's, of any lengths."""
        self.validator.validate_batch(batch)
        number = batch.round_number
        if not self._plain:
            reply.prepare(self._cut.words(len(batch.rows)), round_number=number)
        with read_together() as known:
            vectors = self.project(batch.rows, round_number=number)
            if self._plain:
                (sent,) = known.host(vectors)
                reply.send(Projections(round_number=number, vectors=sent.numpy()))
            else:
                reply.add(projection_words(vectors, self._cut), round_number=number)
        received = to_device(batch.sent, self.data.features.device)
        self.learning.learn_cross([unit(received)])

    def project(
        self, rows: npt.NDArray[np.int64], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors of the rows' records, zeros where a row has none.

        Reveals:
            Nothing by itself; they are averaged, or sent as :class:`Projections`.
        """
        records = self.data.links.link(rows).indices[:, 0]
        return unit(self.learning.project(records, round_number=round_number))

    def _learn_locally(self, request: LearnLocally, _reply: Reply) -> None:
        self.validator.validate_local(request)
        self.learning.learn_local(request.iteration)

    def _add_top(self, request: TopsRequest, reply: Reply) -> Next:
        """Answer with the weighted words of the local top encoder."""
        number = request.round_number
        self.validator.validate_tops(number)
        own = self.learning.learner.shared_weights()
        reply.prepare(words_needed(shapes_of(own)), round_number=number)
        words = encode_weighted(own, weight=1, parties=self.parties + 1, bits=self.learning.bits)
        reply.add(words, round_number=number)
        return Mean

    def _load_mean(self, mean: Mean, _reply: Reply) -> None:
        device = self.data.features.device
        values = {name: to_device(tensor, device) for name, tensor in mean.values.items()}
        self.learning.learner.load_shared(values)

    def _end(self, end: IterationEnd, _reply: Reply) -> Next:
        """Save, log, and warn of a collapse; the stage ends with the last iteration."""
        self.validator.validate_end(end)
        figures = self.figures = self.learning.figures()
        self.save(end.iterations, self.learning.learner.state())
        self._watch(figures, last=end.last)
        self.log("pretrained", iterations=end.iterations, **asdict(figures))
        if not end.last:
            return None
        self.finish(self.learning)
        return StageEnd

    def _own_records(self, held_out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        own = np.ones(len(self.data.features), dtype=np.bool_)
        if len(held_out):
            linked = self.data.links.link(held_out).indices
            own[linked[linked >= 0]] = False
        return np.flatnonzero(own)


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
            party the mean of all local top encoders.
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
                    targets = self.exchange_projections(rows, unit(own), round_number=number)
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
            sent: The primary's unit vectors.
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
        number = self.rounds.next()
        mean = average_weights(
            self.peers,
            TopsRequest(round_number=number),
            self.learning.learner.shared_weights(),
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


def projection_cut(width: int, *, parties: int) -> CutLayer:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return CutLayer(ring=ring, slots=1, shape=(width,), clip_norm=_LONGEST)


def projection_words(
    vectors: Float[Tensor, "batch width"], cut: CutLayer
) -> Int64[Tensor, " words"]:
    """Return a secondary's unit vectors as words of the sum."""
    return cut.encode(quantise(vectors, cut.ring))
