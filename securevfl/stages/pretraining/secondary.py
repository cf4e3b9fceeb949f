"""A secondary in pretraining: what it does with each of the primary's messages."""

from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from securevfl.core.devices import read_together, to_device
from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer
from securevfl.federation.messages import Mean
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.session.peers import Handler, Handlers, Next, Reply, StageEnd, shapes_of
from securevfl.federation.stage import StageAtSecondary
from securevfl.models.fedhssl.learner import unit
from securevfl.models.pretraining import PretrainingSettings
from securevfl.mpc.sum_to import encode_weighted, words_needed
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
    PretrainingValidator,
    Projections,
    TopsRequest,
)
from securevfl.stages.pretraining.projections import projection_cut, projection_words

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
        own, weight = self.learning.learner.shared_weights(), self.learning.weight
        reply.prepare(words_needed(shapes_of(own)), round_number=number)
        words = encode_weighted(
            own, weight=weight, parties=self.parties + 1, bits=self.learning.bits
        )
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
