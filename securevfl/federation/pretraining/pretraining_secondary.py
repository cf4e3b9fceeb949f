"""One party in pretraining: its learner with its records, and a secondary's handlers."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from securevfl.core.conventions import stream
from securevfl.core.errors import DataError, ProtocolError
from securevfl.core.progress import Observer, Warned
from securevfl.data.rows import RowSplit
from securevfl.federation.messages import Mean
from securevfl.federation.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    PretrainingValidator,
    Projections,
    TopsRequest,
)
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.release import require_finite
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.session.peers import Handler, Handlers, Reply, shapes_of
from securevfl.models.family import Learner, PretrainingSettings
from securevfl.models.fedhssl.learner import spread, unit
from securevfl.mpc.codec import RingFormat, quantise
from securevfl.mpc.sum_to import encode_weighted, words_needed

# Which of the primary's rows pretraining may see, and for what.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingRows:
    """Row numbers of the primary's table, each part ascending."""

    aligned: Int64[np.ndarray, " aligned"]
    """Rows whose records at all parties learn from one another: linked at every secondary."""

    own: Int64[np.ndarray, " own"]
    """Rows of the primary's local step: all training rows, labelled or not."""

    held_out: Int64[np.ndarray, " held_out"]
    """Validation and test rows; no party learns from them or from their records."""


def pretraining_rows(
    split: RowSplit, *, linked: Bool[np.ndarray, " rows"] | None, aligned: float, seed: int
) -> PretrainingRows:
    """Choose the rows of pretraining.

    Labelled rows that are linked are aligned in any case ([FedHSSL] section IV-A); of the others
    that are linked, as many are drawn as the share still lacks.

    Args:
        split: The primary's rows.
        linked: Which of its rows are linked at every secondary; None where nothing is learned
            across parties, so that nobody asks.
        aligned: Share of the linked training rows, labelled or not, that count as aligned, in
            (0, 1].
        seed: Run seed; the draw uses its stream ``"aligned"``.

    Raises:
        DataError: If fewer than two rows would be aligned: one row has no batch statistics.
    """
    own = np.sort(np.concatenate([split.train, split.unlabelled]))
    train, others = split.train, split.unlabelled
    if linked is not None:
        train, others = train[linked[train]], others[linked[others]]
    possible = len(train) + len(others)
    wanted = round(aligned * possible) - len(train)
    extra = stream(seed, "aligned").permutation(others)[: max(0, wanted)]
    chosen = np.sort(np.concatenate([train, extra]))
    if aligned < 1 and len(split.unlabelled) == 0:
        # All training rows are labelled: then alignment is drawn among them.
        chosen = np.sort(stream(seed, "aligned").permutation(train)[: round(aligned * possible)])
    if len(chosen) < 2:
        raise DataError(
            f"pretraining: {len(chosen)} aligned rows are too few, of {possible} of the "
            f"{len(own)} training rows that are linked at every secondary; at least 2"
        )
    return PretrainingRows(
        aligned=chosen,
        own=own,
        held_out=np.sort(np.concatenate([split.validation, split.test])),
    )


def even_batches(rows: Int64[np.ndarray, " rows"], *, batch_size: int) -> list[np.ndarray]:
    """Cut rows into batches of nearly one size, at most ``batch_size``, in the order given.

    A short last batch would have batch statistics of its own.
    """
    return np.array_split(rows, max(1, -(-len(rows) // batch_size)))


# One party in pretraining: its learner on its own records, wherever the others are.

COLLAPSED = 0.1
"""Spread below which representations count as collapsed; evenly spread ones have 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFigures:
    """What one party sees of one iteration; None where it has no such step."""

    cross_loss: float | None
    """Mean loss against other parties' projections."""

    cross_spread: float | None
    """Spread of the party's own projections in the last batch, 0 to about 1."""

    local_loss: float | None
    """Mean loss between views of own records, with guidance."""

    local_spread: float | None
    """Spread of its targets in the last batch."""

    @property
    def collapsed(self) -> tuple[str, ...]:
        """Names of the encoders whose representations have collapsed."""
        spreads = {"cross-party": self.cross_spread, "local": self.local_spread}
        return tuple(n for n, value in spreads.items() if value is not None and value < COLLAPSED)


class LearnerWithRecords:
    """A party's learner with the party's records.

    The primary's aligned rows are its own records; a secondary looks its records up by its links.
    """

    def __init__(
        self,
        learner: Learner,
        features: Float[Tensor, "records features"],
        own: npt.NDArray[np.int64],
        *,
        name: str,
        seed: int,
    ) -> None:
        self.learner = learner
        self.features = features
        self.own = own
        self.name = name
        self.seed = seed
        self._present: Tensor | None = None
        self._cross_losses: list[Tensor] = []
        self._local_losses: list[Tensor] = []
        self._spreads: dict[str, float] = {}

    @property
    def weight(self) -> int:
        """The party's say in aggregated weights.

        References:
            [FedHSSL] Algorithm 1, line 32: 1/K, so all equal. ``weights = "records"`` weighs by
            the records that each learns from.
        """
        return len(self.own) if self.learner.settings.weights == "records" else 1

    def begin_iteration(self, iteration: int) -> None:
        """Get ready for an iteration, counted from 0."""
        self.learner.begin_iteration(iteration)
        self._cross_losses, self._local_losses, self._spreads = [], [], {}

    def project(
        self, records: npt.NDArray[np.int64], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return projections of records, for others; zeros where there is no record (-1).

        Raises:
            PrivacyError: If training has diverged; nothing was sent.

        Reveals:
            Nothing by itself.
        """
        index = torch.as_tensor(records, device=self.features.device)
        present = index >= 0
        width = self.learner.settings.projection_width
        out = torch.zeros(len(index), width, device=self.features.device)
        # One row alone has no batch statistics, and is left out.
        self._present = present if int(present.sum()) >= 2 else None
        if self._present is not None:
            vectors = self.learner.project(self.features[index[present]])
            require_finite("a projection", vectors, round_number=round_number)
            self._spreads["cross"] = spread(unit(vectors))
            out[present] = vectors
        return out

    def learn_cross(self, targets: list[Float[Tensor, "batch width"]]) -> None:
        """Learn from what came back for the last :meth:`project`."""
        if self._present is None:
            return
        chosen = [target[self._present] for target in targets]
        self._present = None
        self._cross_losses.append(self.learner.learn_cross(chosen))

    def learn_local(self, iteration: int) -> None:
        """Go through the party's own records, as often as the settings say."""
        settings = self.learner.settings
        for epoch in range(settings.local_epochs):
            order = stream(self.seed, "pretraining", self.name, iteration, epoch)
            shuffled = order.permutation(self.own)
            target = None
            for part in even_batches(shuffled, batch_size=settings.batch_size):
                index = torch.as_tensor(part, device=self.features.device)
                loss, target = self.learner.learn_local(self.features[index])
                self._local_losses.append(loss)
            assert target is not None
            self._spreads["local"] = spread(target)

    def figures(self) -> IterationFigures:
        """Return this iteration's losses and spreads so far."""
        return IterationFigures(
            cross_loss=_mean(self._cross_losses),
            cross_spread=self._spreads.get("cross"),
            local_loss=_mean(self._local_losses),
            local_spread=self._spreads.get("local"),
        )

    def shared_weights(self) -> dict[str, Tensor]:
        """Return the weights of the local top encoder, which parties average."""
        return self.learner.shared_weights()

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load averaged weights into the local top encoder."""
        self.learner.load_shared(weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return self.learner.state()


def _mean(losses: list[Tensor]) -> float | None:
    return float(torch.stack(losses).mean()) if losses else None


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


def projection_cut(width: int, *, parties: int) -> CutLayer:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return CutLayer(ring=ring, slots=1, shape=(width,))


def projection_words(
    vectors: Float[Tensor, "batch width"], cut: CutLayer
) -> Int64[Tensor, " words"]:
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
            TopsRequest: Handler(self._add_top, then=Mean),
            Mean: Handler(
                self._load_mean, lambda: {"shapes": shapes_of(self.learning.shared_weights())}
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
        own, weight = self.learning.shared_weights(), self.learning.weight
        reply.prepare(words_needed(shapes_of(own)), round_number=number)
        words = encode_weighted(own, weight=weight, parties=self._parties + 1)
        reply.add(words, round_number=number)

    def _load_mean(self, mean: Mean, _reply: Reply) -> None:
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
