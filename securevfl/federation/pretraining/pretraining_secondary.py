"""A secondary in pretraining: it answers the primary with the records linked to its rows."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, Warned
from securevfl.federation.messages import Mean
from securevfl.federation.pretraining.learner_with_records import (
    IterationFigures,
    LearnerWithRecords,
)
from securevfl.federation.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    PretrainingValidator,
    Projections,
    TopsRequest,
)
from securevfl.federation.rounds.cut import Cut
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.session.peers import Handler, Handlers, Reply
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.learner import unit
from securevfl.mpc.codec import RingFormat, quantise
from securevfl.mpc.sum_to import encode_weighted, words_needed

# Watch for encoders that give nearly the same answer for every record.


class CollapseWatch:
    """Warns once of each encoder that is collapsed in two iterations running, or at the end."""

    def __init__(self, party: str, observe: Observer) -> None:
        self._party = party
        self._observe = observe
        self._before: frozenset[str] = frozenset()
        self._warned: set[str] = set()

    def __call__(self, figures: IterationFigures, *, last: bool) -> None:
        """Take an iteration's figures."""
        now = frozenset(figures.collapsed)
        sure = now if last else now & self._before
        self._before = now
        for encoder in sorted(sure - self._warned):
            self._warned.add(encoder)
            text = (
                f"{self._party}: the {encoder} encoder has collapsed: it answers nearly the same "
                f"for every record, and fine-tuning gains nothing from it; lower "
                f"pretraining.learning_rate, raise pretraining.batch_size, or use "
                f'algorithm = "moco"'
            )
            self._observe(Warned(text=text))


# The format in which secondaries' projections are averaged.


def projection_cut(width: int, *, parties: int) -> Cut:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return Cut(ring=ring, slots=1, shape=(width,))


def projection_words(vectors: Float[Tensor, "batch width"], cut: Cut) -> Int64[Tensor, " words"]:
    """Return a secondary's unit vectors as words of the sum."""
    return cut.encode(quantise(vectors, cut.ring))


# A secondary's handlers, the same in a simulation and in a process of its own.

BuildLearner = Callable[[npt.NDArray[np.int64]], LearnerWithRecords]
"""Makes the learner once it is known which of the party's records it may learn from."""


class PretrainingSecondary:
    """Handles the primary's messages of pretraining, with the records linked to its rows."""

    def __init__(
        self,
        data: SecondaryData,
        validator: PretrainingValidator,
        settings: PretrainingSettings,
        *,
        parties: int,
        build: BuildLearner,
        save: Callable[[int, dict[str, Any]], None],
        observe: Observer,
        log: Callable[..., None],
        restore: Callable[[Callable[[Any], object]], None] | None,
    ) -> None:
        """Prepare a secondary.

        Args:
            data: Its table as tensors, and its links.
            validator: Refuses messages that are not due.
            settings: How to pretrain.
            parties: Secondaries of the run.
            build: Builds its learner with the records that it may learn from.
            save: Saves a checkpoint's state after so many iterations.
            observe: Receives warnings.
            log: The party's log.
            restore: Gives the state of a checkpoint to resume from to what it is handed.
        """
        self.data = data
        self.figures: IterationFigures | None = None
        """Losses and spreads of the last iteration that has ended."""
        self._validator = validator
        self._plain = settings.exchange == "plain"
        self._parties = parties
        self._cut = projection_cut(settings.projection_width, parties=parties)
        self._build = build
        self._save = save
        self._log = log
        self._restore = restore
        self._learning: LearnerWithRecords | None = None
        self._watch = CollapseWatch(data.name, observe)

    @property
    def handlers(self) -> Handlers:
        """What it does with each message type."""
        return {
            IterationBegin: Handler(self._begin),
            CrossBatch: Handler(self._cross, lambda: {"width": self._cut.shape[0]}),
            LearnLocally: Handler(self._learn_locally),
            TopsRequest: Handler(self._add_top),
            Mean: Handler(self._load_mean, lambda: {"shapes": self._top_shapes()}),
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
        self._validator.validate_begin(begin)
        if self._learning is None:
            self._learning = self._build(self._own_records(self._checked(begin.held_out)))
            if self._restore is not None:
                self._restore(self._learning.learner.load_state)
        self._learning.begin_iteration(begin.iteration)

    def _cross(self, batch: CrossBatch, reply: Reply) -> None:
        """Answer with projections of a batch, and learn from the primary's, of any lengths."""
        self._validator.validate_batch(batch)
        number = batch.round_number
        if not self._plain:
            reply.prepare(self._cut.words(len(batch.rows)), round_number=number)
        vectors = self.project(batch.rows, round_number=number)
        if self._plain:
            reply.send(Projections(round_number=number, vectors=vectors.cpu().numpy()))
        else:
            reply.add(projection_words(vectors, self._cut), round_number=number)
        received = torch.from_numpy(batch.sent).to(self.data.features.device)
        self.learning.learn_cross([unit(received)])

    def project(
        self, rows: npt.NDArray[np.int64], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors of the rows' records, zeros where a row has none.

        Reveals:
            Nothing by itself; they are averaged, or sent as :class:`Projections`.
        """
        records = self.data.links.link(self._checked(rows)).indices[:, 0]
        return unit(self.learning.project(records, round_number=round_number))

    def _learn_locally(self, request: LearnLocally, _reply: Reply) -> None:
        self._validator.validate_local(request)
        self.learning.learn_local(request.iteration)

    def _add_top(self, request: TopsRequest, reply: Reply) -> None:
        """Answer with the weighted words of the local top encoder."""
        number = request.round_number
        self._validator.validate_tops(number)
        reply.prepare(words_needed(self._top_shapes()), round_number=number)
        own, weight = self.learning.shared_weights(), self.learning.weight
        words = encode_weighted(own, weight=weight, parties=self._parties + 1)
        reply.add(words, round_number=number)

    def _load_mean(self, mean: Mean, _reply: Reply) -> None:
        self._validator.validate_mean(mean)
        device = self.data.features.device
        values = {name: torch.from_numpy(one).to(device) for name, one in mean.values.items()}
        self.learning.load_shared(values)

    def _end(self, end: IterationEnd, _reply: Reply) -> bool:
        """Save, log, and warn of a collapse; return whether it was the last iteration."""
        self._validator.validate_end(end)
        figures = self.figures = self.learning.figures()
        self._save(end.iterations, self.learning.state())
        self._watch(figures, last=end.last)
        self._log("pretrained", iterations=end.iterations, **asdict(figures))
        return end.last

    def _top_shapes(self) -> dict[str, tuple[int, ...]]:
        own = self.learning.shared_weights()
        return {name: tuple(value.shape) for name, value in own.items()}

    def _own_records(self, held_out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        own = np.ones(len(self.data.features), dtype=np.bool_)
        if len(held_out):
            linked = self.data.links.link(held_out).indices
            own[linked[linked >= 0]] = False
        return np.flatnonzero(own)

    def _checked(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(rows) and (rows.min() < 0 or rows.max() >= self.data.primary_rows):
            raise ProtocolError(
                f"pretraining: the primary names rows outside the {self.data.primary_rows} "
                f"that it has"
            )
        return rows
