"""How the primary reaches the secondaries in pretraining, and the exchange within one process."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.federation.cut import Cut
from securevfl.mpc.codec import quantise
from securevfl.mpc.ring_format import RingFormat
from securevfl.mpc.secure_mean import decode_mean, encode_weighted
from securevfl.mpc.sum_to import InProcessSum
from securevfl.pretraining.learner_with_records import IterationFigures
from securevfl.pretraining.secondary import PretrainingSecondary


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
