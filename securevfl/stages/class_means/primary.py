"""The primary's part in class means: labels meet the secondaries' records, before any release."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import UInt64

from securevfl.core.progress import Observer, Stage
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.peers import Peers
from securevfl.federation.stage import StageAtPrimary
from securevfl.mpc import dealt_sums
from securevfl.stages.class_means.class_labels import ClassLabels, LabelNoise
from securevfl.stages.class_means.fitting import sum_format_of
from securevfl.stages.class_means.messages import (
    ClassMeansCall,
    ClassMeansDealing,
    ClassMeansDone,
    ClassMeansKind,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansNoise,
    ClassMeansShifted,
    ClassMeansState,
    ClassMeansSums,
    ClassMeansTurn,
)
from securevfl.transport.channels import Channels, Kinds, receive_from
from securevfl.transport.message import Done, StarKind

AT_PRIMARY: Final[Kinds] = (
    ClassMeansKind.CLASS_MEANS_DEALING,
    ClassMeansKind.CLASS_MEANS_NOISE,
    ClassMeansKind.CLASS_MEANS_MASKED,
    ClassMeansKind.CLASS_MEANS_DONE,
    StarKind.SEALED,
)


class HiddenSums(ABC):
    """Class sums by labels that stay with the primary, and go back behind noise."""

    @abstractmethod
    def fit(self, numbers: Mapping[int, int], labels: ClassLabels, label_noise: LabelNoise) -> None:
        """Have secondaries' encoders fitted.

        Args:
            numbers: Columns of the class sums of each secondary that is not fitted yet, by rank.
            labels: Rows by class.
            label_noise: Noise that hides them.

        Raises:
            ConfigError: If that noise cannot be drawn.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To each secondary: its class sums with label noise. To this party: the same with the
            secondary's noise. To a dealer: how many rows there are, and how many numbers.
        """

    @abstractmethod
    def end(self) -> None:
        """Let a dealer go, if it still waits.

        Reveals:
            To the dealer: that it is not needed any more.
        """


@dataclass(eq=False)
class SumsInOneProcess(HiddenSums):
    """Class sums of secondaries in this process, which add them up without masks."""

    plan: RunPlan
    peers: Peers

    def fit(self, numbers: Mapping[int, int], labels: ClassLabels, label_noise: LabelNoise) -> None:
        """Have encoders fitted; see :meth:`HiddenSums.fit`.

        Reveals:
            Nothing leaves the process.
        """
        for rank, columns in numbers.items():
            shape = labels.bins, columns
            self.peers.tell(ClassMeansShifted(said=labels.bins_of_rows), (rank,))
            zeros = torch.zeros(labels.bins * columns, dtype=torch.int64)
            sums = self.peers.add_up(zeros, (rank,), round_number=0).numpy().reshape(shape)
            sums += label_noise(sum_format_of(self.plan, columns - 1))
            labels.note_returned(self.plan.secondaries[rank])
            self.peers.ask(ClassMeansSums(sums=sums), ClassMeansDone, (rank,))

    def end(self) -> None:
        """Do nothing: there is no dealer.

        Reveals:
            Nothing.
        """


@dataclass(eq=False)
class SumsUnderMasks(HiddenSums):
    """Class sums between processes, under masks of a dealer."""

    plan: RunPlan
    lines: Channels
    """Channels to the secondaries and to the dealer."""
    dealer: str
    """The dealer's name."""

    def __post_init__(self) -> None:
        self._waits = True

    def fit(self, numbers: Mapping[int, int], labels: ClassLabels, label_noise: LabelNoise) -> None:
        """Have encoders fitted, one secondary after another; see :meth:`HiddenSums.fit`.

        Reveals:
            What :meth:`HiddenSums.fit` says.
        """
        for rank, columns in numbers.items():
            self._fit(rank, columns, labels, label_noise)
        for rank in numbers:
            receive_from(self.lines, self.plan.secondaries[rank], ClassMeansDone)

    def _fit(self, rank: int, columns: int, labels: ClassLabels, label_noise: LabelNoise) -> None:
        lines, rows, name = self.lines, len(labels.bins_of_rows), self.plan.secondaries[rank]
        shape = {"bins": labels.bins, "numbers": columns}
        # First, so that noise which cannot be drawn costs the secondary nothing.
        noise = label_noise(sum_format_of(self.plan, columns - 1))
        lines.send(ClassMeansTurn(secondary=rank, numbers=columns).to_message(), self.dealer)
        dealing = receive_from(lines, self.dealer, ClassMeansDealing, rows=rows, **shape)
        shifted_bins = dealt_sums.shift_bins(labels.bins_of_rows, dealing.shifts, bins=labels.bins)
        lines.send(ClassMeansShifted(said=shifted_bins).to_message(), name)
        masked_noise = receive_from(lines, name, ClassMeansNoise, **shape).words
        sums = dealt_sums.open_sums(
            self._pieces(name, rows, labels.bins, columns),
            masked_noise,
            dealt_sums.SumDealing(shifts=dealing.shifts, correction=dealing.correction),
        )
        labels.note_returned(name)
        lines.send(ClassMeansSums(sums=sums + noise).to_message(), name)

    def _pieces(
        self, name: str, rows: int, bins: int, columns: int
    ) -> Iterator[UInt64[np.ndarray, "some bins numbers"]]:
        """Yield a secondary's masked vectors, some rows at a time."""
        left = rows
        while left:
            piece = min(left, dealt_sums.rows_of_piece(bins, columns))
            left -= piece
            yield receive_from(
                self.lines, name, ClassMeansMasked, rows=piece, bins=bins, numbers=columns
            ).words

    def end(self) -> None:
        """Let the dealer go, if it still waits.

        Reveals:
            To the dealer: that it is not needed any more.
        """
        if self._waits:
            self.lines.send(Done().to_message(), self.dealer)
        self._waits = False


@dataclass(eq=False)
class ClassMeansPrimary(StageAtPrimary):
    """The primary's part: call for class means once, before the first release."""

    plan: RunPlan
    """The run, whose encoders are class means."""
    peers: Peers
    make: Callable[[Sequence[str]], ClassLabels]
    """Charges for labels and returns this party's rows by class, for secondaries of these names."""
    sums: HiddenSums | None
    """Class sums by labels that stay at home; None where labels are sent."""
    observe: Observer

    def before_release(self) -> None:
        """Have every encoder fitted that is not fitted yet.

        Raises:
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            With ``labels = "plaintext"`` and ``"randomised"``, to every secondary: the rows'
            classes; a regression's depend on the primary's own columns too. With ``"shares"``:
            what :meth:`HiddenSums.fit` says.
        """
        self.observe(Stage(text="fitting class means"))
        states = self.peers.ask(ClassMeansCall(), ClassMeansState)
        numbers = {
            rank: state.numbers
            for rank, state in zip(self.peers.ranks, states, strict=True)
            if not state.settled
        }
        if numbers:
            labels = self.make([self.plan.secondaries[rank] for rank in numbers])
            if self.sums is not None and labels.label_noise is not None:
                self.sums.fit(numbers, labels, labels.label_noise)
            else:
                told = ClassMeansLabels(bins_of_rows=labels.bins_of_rows)
                self.peers.ask(told, ClassMeansDone, tuple(numbers))
        self.end()

    def end(self) -> None:
        """Let the dealer go, if there is one that still waits.

        Reveals:
            To the dealer: that it is not needed any more.
        """
        if self.sums is not None:
            self.sums.end()
