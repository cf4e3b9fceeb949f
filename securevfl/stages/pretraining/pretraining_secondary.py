"""One party in pretraining: its learner with its records, and a secondary's handlers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from securevfl.core.conventions import stream
from securevfl.core.devices import read_together, to_device
from securevfl.core.errors import DataError, ProtocolError
from securevfl.core.progress import Observer, Warned
from securevfl.data.rows import RowSplit
from securevfl.federation.messages import Mean
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.release import require_finite
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.federation.session.peers import Handler, Handlers, Next, Reply, StageEnd, shapes_of
from securevfl.models.family import Learner, PretrainingSettings
from securevfl.models.fedhssl.learner import sphere_spread, unit
from securevfl.mpc.codec import quantise
from securevfl.mpc.ring_format import RingFormat
from securevfl.mpc.sum_to import encode_weighted, fraction_bits, words_needed
from securevfl.transport.message import DeclaredMessage, MessageKind, wire

# The messages of pretraining, each checked where it is read.


class PretrainingKind(MessageKind):
    """Kinds of messages of pretraining."""

    PRETRAIN = 32
    CROSS = 33
    PROJECTIONS = 34
    LOCAL = 35
    TOPS = 36
    PRETRAINED = 37


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationBegin(DeclaredMessage):
    """An iteration of pretraining begins.

    It names the primary's rows that are held out for validation and testing.
    """

    KIND: ClassVar = PretrainingKind.PRETRAIN
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "iteration lengths",
        "pretraining, from the primary": "held_out",
    }

    iteration: int
    """Counts from 0."""

    held_out: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossBatch(DeclaredMessage):
    """Row ids of a batch and the primary's projections of them.

    The projections carry the noise that ``pretraining.primary_sends`` or ``iso_projections`` asks
    for.
    """

    KIND: ClassVar = PretrainingKind.CROSS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "round_number",
        "pretraining, from the primary": "rows sent lengths",
    }

    round_number: int
    rows: Int64[np.ndarray, " some_rows"]
    sent: Float32[np.ndarray, "some_rows width"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projections(DeclaredMessage):
    """The secondary's projections of the batch in clear.

    Only in a plain exchange; in an averaged one the secondary sends a share.
    """

    KIND: ClassVar = PretrainingKind.PROJECTIONS
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {
        "no record": "round_number lengths",
        "pretraining, to the primary": "vectors",
    }

    round_number: int
    vectors: Float32[np.ndarray, "*shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnLocally(DeclaredMessage):
    """Learn from your own records."""

    KIND: ClassVar = PretrainingKind.LOCAL
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iteration lengths"}

    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopsRequest(DeclaredMessage):
    """Send your local top encoder's words."""

    KIND: ClassVar = PretrainingKind.TOPS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "round_number lengths"}

    round_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationEnd(DeclaredMessage):
    """So many iterations are done, and whether it was the last."""

    KIND: ClassVar = PretrainingKind.PRETRAINED
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "iterations last lengths"}

    iterations: int = wire(least=1)
    last: bool


# What the primary may still ask of one secondary in pretraining.


@dataclass(eq=False)
class PretrainingValidator:
    """Validates the primary's messages against the plan of pretraining.

    Iterations come in order, each with the steps that the family has: batches of rows that are
    linked here and not held out, each row so often as ``pretraining.cross_epochs`` says; local
    learning once; an average of local top encoders once. What is held out stays what it was.
    """

    settings: PretrainingSettings
    _: KW_ONLY
    steps: tuple[str, ...]
    """Steps of an iteration that the family has."""
    learning_rows: int
    """The primary's rows that are neither for validation nor for testing."""
    linked: Bool[np.ndarray, " rows"]
    """True for each of the primary's rows that has a link at this secondary."""
    done: int
    """Iterations that are done."""
    take_round: Callable[[int], None]
    """Refuses a round number that the session has used."""
    _held_out: np.ndarray | None = field(default=None, init=False)
    _batches: int = field(default=0, init=False)
    _open: bool = field(default=False, init=False)
    _steps_done: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._total, self._passes = self.settings.iterations, self.settings.cross_epochs
        self._rows = len(self.linked)
        self.done = min(self.done, self._total)
        # Where all is learned already, the last iteration is opened once more, and stays empty.
        self._empty = self.done == self._total
        self._uses = np.zeros(self._rows, dtype=np.int64)

    def validate_begin(self, begin: IterationBegin) -> None:
        """Take the beginning of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due, or holds out other rows than before.
        """
        due = self._total - 1 if self._empty else self.done
        if self._open or begin.iteration != due or due >= self._total:
            raise ProtocolError(
                f"pretraining: iteration {begin.iteration + 1} is not due; {self.done} of "
                f"{self._total} are done"
            )
        held = begin.held_out
        outside = len(held) and (held.min() < 0 or held.max() >= self._rows)
        if (
            outside
            or len(np.unique(held)) != self._rows - self.learning_rows
            or len(held) != len(np.unique(held))
        ):
            raise ProtocolError(
                f"pretraining: the primary holds out {len(held)} rows; its validation and test "
                f"rows are {self._rows - self.learning_rows}"
            )
        if self._held_out is not None and not np.array_equal(held, self._held_out):
            raise ProtocolError("pretraining: the primary holds out other rows than before")
        self._held_out = held
        self._open = True
        self._uses[:] = 0
        self._batches = 0
        self._steps_done.clear()

    def validate_batch(self, batch: CrossBatch) -> None:
        """Take a batch into account, or refuse it.

        Raises:
            ProtocolError: If no batch is due, or it names rows that it must not.
        """
        where, rows = f"round {batch.round_number}", batch.rows
        self.take_round(batch.round_number)
        self._require_step("cross", after={"local", "aggregate"}, where=where)
        most = self._passes * math.ceil(self.learning_rows / self.settings.batch_size)
        if len(rows) > self.settings.batch_size or self._batches >= most:
            raise ProtocolError(
                f"{where}: the primary names {len(rows)} rows in batch {self._batches + 1} of an "
                f"iteration, which has at most {most} of {self.settings.batch_size}"
            )
        if rows.min() < 0 or rows.max() >= self._rows:
            raise ProtocolError(
                f"{where}: the primary names rows outside the {self._rows} that it has"
            )
        strangers = int((~self.linked[rows]).sum())
        if strangers:
            raise ProtocolError(
                f"{where}: the primary names {strangers} rows that have no link here, and only "
                f"aligned rows are learned from across parties"
            )
        held = np.zeros(0, dtype=np.int64) if self._held_out is None else self._held_out
        again = len(np.unique(rows)) != len(rows) or (self._uses[rows] >= self._passes).any()
        if again or np.isin(rows, held).any():
            raise ProtocolError(
                f"{where}: the primary names rows that are held out, or more often than "
                f"pretraining.cross_epochs = {self._passes}"
            )
        self._uses[rows] += 1
        self._batches += 1

    def validate_local(self, request: LearnLocally) -> None:
        """Take local learning into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if request.iteration != self.done:
            raise ProtocolError(f"pretraining: iteration {request.iteration + 1} is not due")
        self._require_step("local", after={"local", "aggregate"}, where="local learning")
        self._steps_done.add("local")

    def validate_tops(self, round_number: int) -> None:
        """Take an average of local top encoders into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        self.take_round(round_number)
        self._require_step("aggregate", after={"aggregate"}, where=f"round {round_number}")
        self._steps_done.add("aggregate")

    def validate_end(self, end: IterationEnd) -> None:
        """Take the end of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        due = self._total if self._empty else self.done + 1
        if not self._open or end.iterations != due or end.last != (due == self._total):
            raise ProtocolError(
                f"pretraining: the end of iteration {end.iterations} is not due; {self.done} of "
                f"{self._total} are done"
            )
        self._open = False
        self.done = due

    def _require_step(self, step: str, *, after: set[str], where: str) -> None:
        if not self._open or self._empty or step not in self.steps or after & self._steps_done:
            raise ProtocolError(f"{where}: the step {step!r} of pretraining is not due")


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
    def collapsed_encoders(self) -> tuple[str, ...]:
        """Names of the encoders whose representations have collapsed."""
        spreads = {"cross-party": self.cross_spread, "local": self.local_spread}
        return tuple(n for n, value in spreads.items() if value is not None and value < COLLAPSED)


@dataclass(eq=False)
class LearnerWithRecords:
    """A party's learner with the party's records.

    The primary's aligned rows are its own records; a secondary looks its records up by its links.
    """

    learner: Learner
    features: Float[Tensor, "records features"]
    own: npt.NDArray[np.int64]
    """Records of its local pretraining."""
    _: KW_ONLY
    name: str
    seed: int
    bits: Mapping[str, int] = field(default_factory=dict, init=False)
    """Binary places of the next mean of weights, by tensor."""
    _present: Tensor | None = field(default=None, init=False)
    _cross_losses: list[Tensor] = field(default_factory=list, init=False)
    _local_losses: list[Tensor] = field(default_factory=list, init=False)
    _spreads: dict[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def weight(self) -> int:
        """The party's say in aggregated weights.

        References:
            [FedHSSL] Algorithm 1, line 32: 1/K, so all equal. ``weights = "records"`` weighs by
            the records that each learns from.
        """
        return len(self.own) if self.learner.settings.weights == "records" else 1

    def begin_iteration(self, iteration: int, steps: Sequence[str]) -> None:
        """Get ready for an iteration, counted from 0, with these steps."""
        if iteration and "aggregate" in steps:
            # What is shared is the last mean still, and so the same at every party.
            self.bits = fraction_bits(self.learner.shared_weights())
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
        device = self.features.device
        present = np.flatnonzero(records >= 0)
        out = torch.zeros(len(records), self.learner.settings.projection_width, device=device)
        # One row alone has no batch statistics, and is left out.
        self._present = to_device(present, device) if len(present) >= 2 else None
        if self._present is not None:
            vectors = self.learner.project(self.features[to_device(records[present], device)])
            require_finite("a projection", vectors, round_number=round_number)
            self._spreads["cross"] = sphere_spread(unit(vectors))
            out[self._present] = vectors
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
                index = to_device(part, self.features.device)
                loss, target = self.learner.learn_local(self.features[index])
                self._local_losses.append(loss)
            assert target is not None
            self._spreads["local"] = sphere_spread(target)

    def figures(self) -> IterationFigures:
        """Return this iteration's losses and spreads so far."""
        return IterationFigures(
            cross_loss=_mean(self._cross_losses),
            cross_spread=_float_or_none(self._spreads.get("cross")),
            local_loss=_mean(self._local_losses),
            local_spread=_float_or_none(self._spreads.get("local")),
        )


def _mean(losses: list[Tensor]) -> float | None:
    return _float_or_none(torch.stack(losses).mean() if losses else None)


def _float_or_none(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


# Watch for encoders that give nearly the same answer for every record.


@dataclass
class CollapseWatch:
    """Warns once of each encoder that is collapsed in two iterations running, or at the end."""

    party: str
    observe: Observer
    _before: frozenset[str] = field(default_factory=frozenset, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __call__(self, figures: IterationFigures, *, last: bool) -> None:
        """Take an iteration's figures."""
        now = frozenset(figures.collapsed_encoders)
        sure = now if last else now & self._before
        self._before = now
        for encoder in sorted(sure - self._warned):
            self._warned.add(encoder)
            text = (
                f"{self.party}: the {encoder} encoder has collapsed: it answers nearly the same "
                f"for every record, and fine-tuning gains nothing from it; lower "
                f"pretraining.learning_rate, raise pretraining.batch_size, or use "
                f'algorithm = "moco"'
            )
            self.observe(Warned(text=text))


# The format in which secondaries' projections are averaged.


# A vector is of length 1 but for the rounding of float32.
_LONGEST: Final = 1 + 2.0**-20


def projection_cut(width: int, *, parties: int) -> CutLayer:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return CutLayer(ring=ring, slots=1, shape=(width,), clip_norm=_LONGEST)


def projection_words(
    vectors: Float[Tensor, "batch width"], cut: CutLayer
) -> Int64[Tensor, " words"]:
    """Return a secondary's unit vectors as words of the sum."""
    return cut.encode(quantise(vectors, cut.ring))


# A secondary's handlers, the same in a simulation and in a process of its own.

BuildLearner = Callable[[npt.NDArray[np.int64]], LearnerWithRecords]
"""Makes the learner once it is known which of the party's records it may learn from."""


@dataclass(eq=False)
class PretrainingSecondary:
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
    def handlers(self) -> Handlers:
        """What it does with each message type."""
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
        return StageEnd if end.last else None

    def _own_records(self, held_out: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        own = np.ones(len(self.data.features), dtype=np.bool_)
        if len(held_out):
            linked = self.data.links.link(held_out).indices
            own[linked[linked >= 0]] = False
        return np.flatnonzero(own)
