"""A secondary in pretraining, the same in a simulation and in a process of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer
from securevfl.federation.secondary import SecondaryData
from securevfl.models.fedhssl.losses import unit
from securevfl.pretraining.collapse import CollapseWatch
from securevfl.pretraining.learner_with_records import IterationFigures, LearnerWithRecords

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
            Nothing by itself; see :class:`securevfl.pretraining.exchange`.
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
