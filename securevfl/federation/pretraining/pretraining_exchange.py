"""Exchange between primary and secondaries in pretraining, within one process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, Warned
from securevfl.federation.pretraining.learner_with_records import (
    IterationFigures,
    LearnerWithRecords,
)
from securevfl.federation.rounds.cut import Cut
from securevfl.federation.rounds.secondary import SecondaryData
from securevfl.models.fedhssl.learner import unit
from securevfl.mpc.codec import RingFormat, quantise
from securevfl.mpc.sum_to import InProcessSum, decode_mean, encode_weighted

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


# A secondary in pretraining, the same in a simulation and in a process of its own.

BuildLearner = Callable[[npt.NDArray[np.int64]], LearnerWithRecords]
"""Makes the learner once it is known which of the party's records it may learn from."""


class PretrainingSecondary:
    """Answers the primary's requests in pretraining, with the records linked to its rows."""

    def __init__(
        self,
        data: SecondaryData,
        *,
        build: BuildLearner,
        save: Callable[[int, dict[str, Any]], None],
        observe: Observer,
        restore: Callable[[Callable[[Any], object]], None] | None,
    ) -> None:
        """Prepare a secondary.

        Args:
            data: Its table as tensors, and its links.
            build: Builds its learner with the records that it may learn from.
            save: Keeps a checkpoint's state after so many iterations.
            observe: Hears of warnings.
            restore: Gives the state of a checkpoint to go on from to what it is handed.
        """
        self.data = data
        self._build = build
        self._save = save
        self._restore = restore
        self._learning: LearnerWithRecords | None = None
        self._watch = CollapseWatch(data.name, observe)

    @property
    def learning(self) -> LearnerWithRecords:
        """The learner with its records; made when the first iteration begins."""
        if self._learning is None:
            raise ProtocolError("pretraining: the primary asks for work before an iteration")
        return self._learning

    def begin_iteration(self, iteration: int, held_out: npt.NDArray[np.int64]) -> None:
        """Get ready; the first time, leave out the records of rows that are held out."""
        if self._learning is None:
            self._learning = self._build(self._own_records(self._checked(held_out)))
            if self._restore is not None:
                self._restore(self._learning.learner.load_state)
        self._learning.begin_iteration(iteration)

    def project(
        self, rows: npt.NDArray[np.int64], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors of the rows' records, zeros where a row has none.

        Reveals:
            Nothing by itself; see :class:`securevfl.federation.pretraining.pretraining_exchange`.
        """
        records = self.data.links.link(self._checked(rows)).indices[:, 0]
        return unit(self.learning.project(records, round_number=round_number))

    def learn_cross(self, received: Float[Tensor, "batch width"]) -> None:
        """Learn from the primary's projections of the same rows, whatever their lengths."""
        self.learning.learn_cross([unit(received)])

    def end_iteration(self, iterations: int, *, last: bool) -> IterationFigures:
        """Save, warn of a collapse, and return what the iteration looked like."""
        figures = self.learning.figures()
        self._save(iterations, self.learning.state())
        self._watch(figures, last=last)
        return figures

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


# How the primary reaches the secondaries in pretraining, and the exchange within one process.


@runtime_checkable
class PretrainingExchange(Protocol):
    """What the primary asks of the secondaries, in the order of a run."""

    def begin_iteration(self, iteration: int, held_out: npt.NDArray[np.int64]) -> None:
        """Announce an iteration, counted from 0, and the rows that nobody may learn from.

        Reveals:
            To the secondaries: which rows are for validation and testing, and the iteration.
        """
        ...

    def cross(
        self,
        rows: npt.NDArray[np.int64],
        sent: Float[Tensor, "batch width"],
        *,
        round_number: int,
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
        ...

    def local(self, iteration: int) -> None:
        """Let every secondary learn from its own records; may return before they are done.

        Reveals:
            Nothing.
        """
        ...

    def aggregate(
        self, own: Mapping[str, Tensor], *, weight: int, round_number: int
    ) -> dict[str, Tensor]:
        """Return the mean of all parties' local top encoders.

        Args:
            own: The primary's.
            weight: Its say in the mean: 1, or its records.
            round_number: A new round.

        Reveals:
            To every party: the mean. To the primary: also the sum of the weights, which is the
            number of parties or, with ``weights = "records"``, how many records all have together.
            Of two parties, each learns the other's weights from the mean.
        """
        ...

    def end_iteration(self, iterations: int, *, last: bool) -> list[IterationFigures]:
        """Tell every secondary that so many iterations are done, and that it may save them.

        Returns:
            The secondaries' figures where they are known: in a simulation.

        Reveals:
            To the secondaries: the number of iterations.
        """
        ...


def projection_cut(width: int, *, parties: int) -> Cut:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return Cut(ring=ring, slots=1, shape=(width,))


def projection_words(vectors: Float[Tensor, "batch width"], cut: Cut) -> Int64[Tensor, " words"]:
    """Return a secondary's unit vectors as words of the sum."""
    return cut.encode(quantise(vectors, cut.ring))


class SimulatedPretraining:
    """All parties in one process: the same arithmetic as between processes, no cryptography."""

    def __init__(self, secondaries: Sequence[PretrainingSecondary], *, plain: bool) -> None:
        self.secondaries = tuple(secondaries)
        self.plain = plain

    def begin_iteration(self, iteration: int, held_out: npt.NDArray[np.int64]) -> None:
        """Announce an iteration.

        Reveals:
            What :meth:`PretrainingExchange.begin_iteration` reveals; here all is in one process.
        """
        for secondary in self.secondaries:
            secondary.begin_iteration(iteration, held_out)

    def cross(
        self,
        rows: npt.NDArray[np.int64],
        sent: Float[Tensor, "batch width"],
        *,
        round_number: int,
    ) -> list[Float[Tensor, "batch width"]]:
        """Exchange projections.

        Reveals:
            What :meth:`PretrainingExchange.cross` reveals.
        """
        theirs = [
            secondary.project(rows, round_number=round_number) for secondary in self.secondaries
        ]
        for secondary in self.secondaries:
            secondary.learn_cross(sent)
        if self.plain:
            return theirs
        cut = projection_cut(sent.shape[1], parties=len(theirs))
        words = [projection_words(vectors, cut) for vectors in theirs]
        return [cut.decode(InProcessSum()(words), rows=len(rows), active=len(theirs))]

    def local(self, iteration: int) -> None:
        """Let every secondary learn from its own records.

        Reveals:
            Nothing.
        """
        for secondary in self.secondaries:
            secondary.learning.learn_local(iteration)

    def aggregate(
        self,
        own: Mapping[str, Tensor],
        *,
        weight: int,
        round_number: int,  # noqa: ARG002 - a PretrainingExchange
    ) -> dict[str, Tensor]:
        """Average the local top encoders of all parties.

        Reveals:
            What :meth:`PretrainingExchange.aggregate` reveals.
        """
        parties = len(self.secondaries) + 1
        learners = [secondary.learning for secondary in self.secondaries]
        words = [encode_weighted(own, weight=weight, parties=parties)]
        words += [
            encode_weighted(one.shared_weights(), weight=one.weight, parties=parties)
            for one in learners
        ]
        mean = decode_mean(InProcessSum()(words), {name: own[name].shape for name in own})
        for one in learners:
            one.load_shared(mean)
        return mean

    def end_iteration(
        self,
        iterations: int,
        *,
        last: bool,
    ) -> list[IterationFigures]:
        """Let every secondary save, and return what they saw.

        Reveals:
            What :meth:`PretrainingExchange.end_iteration` reveals.
        """
        return [secondary.end_iteration(iterations, last=last) for secondary in self.secondaries]
