"""All parties of class means: the primary, secondaries, and a dealer of masks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, UInt64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, Stage
from securevfl.federation.run_plan import RunFacts, RunPlan
from securevfl.federation.session.peers import Handler, Handlers, Peers, Reply
from securevfl.federation.stage import StageAtPrimary, StageAtSecondary
from securevfl.mpc import dealt_sums
from securevfl.stages.class_means.class_labels import ClassLabels, LabelNoise, bins_of, keep_of
from securevfl.stages.class_means.fitting import ClassMeansFitting, sum_format_of
from securevfl.stages.class_means.messages import (
    ClassMeansCall,
    ClassMeansDealing,
    ClassMeansDone,
    ClassMeansKind,
    ClassMeansLabels,
    ClassMeansMasked,
    ClassMeansNoise,
    ClassMeansSeed,
    ClassMeansShifted,
    ClassMeansState,
    ClassMeansSums,
    ClassMeansTurn,
)
from securevfl.stages.class_means.policy import hides_labels
from securevfl.transport.channels import Channels, Kinds, receive_from
from securevfl.transport.message import Done, StarKind, TypedMessage

AT_SECONDARY: Final[Kinds] = (
    ClassMeansKind.CLASS_MEANS_SEED,
    ClassMeansKind.CLASS_MEANS_SHIFTED,
    ClassMeansKind.CLASS_MEANS_SUMS,
    StarKind.SEALED,
)


@dataclass(eq=False)
class MaskedLines:
    """A secondary's way to the primary, and to the dealer of its masks."""

    channels: Channels
    dealer: str
    """The dealer's name."""


@dataclass(eq=False)
class ClassMeansSecondary(StageAtSecondary):
    """A secondary's part: answer the primary's call, once in a session."""

    plan: RunPlan
    """The run, whose encoders are class means."""
    fitting: ClassMeansFitting
    """Adds up this party's records, and fits its encoder."""
    lines: MaskedLines | None = None
    """Way of class sums under masks; None where labels are sent, and in one process."""
    _called: bool = field(default=False, init=False)
    _due: type[TypedMessage] | None = field(default=None, init=False)
    """Message that the fit waits for."""

    @property
    def beside_rounds(self) -> Handlers:
        """Handlers of the call, and of what the primary sends after it."""
        bins = bins_of(self.plan.config)
        sizes = {"rows": self.plan.facts.rows, "bins": bins}
        shape = {"bins": bins, "numbers": self.fitting.format.shape[1]}
        handlers: dict[type[TypedMessage], Handler] = {ClassMeansCall: Handler(self._call)}
        if not hides_labels(self.plan.config):
            handlers[ClassMeansLabels] = Handler(self._fit_to_labels, lambda: sizes, to_all=False)
        elif self.lines is None:
            handlers[ClassMeansShifted] = Handler(self._add_up, lambda: sizes, to_all=False)
            handlers[ClassMeansSums] = Handler(self._fit_to_sums, lambda: shape, to_all=False)
        return handlers

    def _call(self, _call: ClassMeansCall, reply: Reply) -> None:
        """Say whether the encoder is fitted; between processes, go on under masks.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was sent then.
            PrivacyError: If class sums of this run left before and what came of them was lost.
            ProtocolError: If the primary calls twice, or a party leaves the protocol or fails.

        Reveals:
            To the primary: whether the encoder is fitted, and how many numbers class sums have;
            with ``labels = "shares"`` the class sums behind this party's noise, each row in the one
            class that the primary says.
        """
        if self._called:
            raise ProtocolError("the primary calls for class means twice in one session")
        self._called = True
        fitting = self.fitting
        state = ClassMeansState(
            settled=fitting.encoder_fixed,
            numbers=fitting.format.shape[1],
            columns=fitting.seen_columns,
        )
        reply.send(state)
        if state.settled:
            return
        if self.lines is not None:
            fitting.finish(self._sums_under_masks(self.lines.channels, self.lines.dealer))
            reply.send(ClassMeansDone())
            return
        self._due = ClassMeansShifted if hides_labels(self.plan.config) else ClassMeansLabels

    def _fit_to_labels(self, labels: ClassMeansLabels, reply: Reply) -> None:
        """Fit the encoder to noised class sums by the labels that the primary sends."""
        self._require_due(labels)
        self.fitting.begin(leaves=False)
        keep = keep_of(self.plan.config)
        self.fitting.finish(self.fitting.by_labels(labels.bins_of_rows, keep=keep))
        reply.send(ClassMeansDone())

    def _add_up(self, shifted: ClassMeansShifted, reply: Reply) -> None:
        """Answer with class sums behind noise, in one process, where nothing is shifted."""
        self._require_due(shifted)
        fitting = self.fitting
        fitting.begin(leaves=True)
        sums = fitting.format.by_bins(fitting.vectors(), shifted.said) + fitting.noise()
        self._due = ClassMeansSums
        reply.add(torch.from_numpy(sums).flatten(), round_number=0)

    def _fit_to_sums(self, answer: ClassMeansSums, reply: Reply) -> None:
        """Fit the encoder to class sums with both parties' noise."""
        self._require_due(answer)
        self.fitting.finish(answer.sums.astype(np.float64))
        reply.send(ClassMeansDone())

    def _require_due(self, message: TypedMessage) -> None:
        due, self._due = self._due, None
        if type(message) is not due:
            raise ProtocolError(f"{message.KIND.name}: no class means wait for it")

    def _sums_under_masks(
        self, lines: Channels, dealer: str
    ) -> Float64[np.ndarray, "bins numbers"]:
        """Return class sums with both parties' noise, as the primary sends them back."""
        plan, fitting = self.plan, self.fitting
        primary, rows, bins = plan.config.primary.name, plan.facts.rows, bins_of(plan.config)
        shifted_bins = receive_from(lines, primary, ClassMeansShifted, rows=rows, bins=bins).said
        what = dealt_sums.DealtFor(
            run=plan.facts.run,
            secondary=plan.ranks[fitting.name],
            rows=rows,
            bins=bins,
            numbers=fitting.format.shape[1],
        )
        message = lines.receive(dealer, ClassMeansKind.CLASS_MEANS_SEED)
        seed = ClassMeansSeed.from_message(message, what=what).seed
        fitting.begin(leaves=True)
        pieces = dealt_sums.mask_vectors(fitting.vectors(), shifted_bins, seed, what)
        noise = ClassMeansNoise(words=dealt_sums.masked_noise(fitting.noise(), seed, what))
        lines.send(noise.to_message(), primary)
        for words in pieces:
            lines.send(ClassMeansMasked(words=words).to_message(), primary)
        answer = receive_from(lines, primary, ClassMeansSums, bins=bins, numbers=what.numbers)
        return answer.sums.astype(np.float64)


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
    note_columns: Callable[[int], None] = lambda _columns: None
    """Receives the number of columns that directions are fitted to, over all secondaries."""

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
        self.note_columns(sum(state.columns for state in states))
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


AT_DEALER: Kinds = (ClassMeansKind.CLASS_MEANS_TURN, StarKind.DONE)


def parties_of(config: FederationConfig) -> Sequence[str]:
    """Return the names of all that class sums under masks concern; the coordinator may be gone."""
    return [
        party.name
        for party in (config.primary, *config.callers)
        if party.role in ("primary", "secondary", "dealer")
    ]


def deal_class_sums(config: FederationConfig, lines: Channels, facts: RunFacts) -> int:
    """Deal masks for each secondary's class sums, until the primary is done.

    Args:
        config: The federation file, whose encoders are class means.
        lines: To everybody.
        facts: The run's id and the primary's rows, as the primary says. Each secondary compares
            them with what it was told itself.

    Returns:
        For how many secondaries.

    Raises:
        ProtocolError: If the primary asks for the masks of one secondary twice, or fails.

    Reveals:
        To the primary and to each secondary: uniform numbers.
    """
    names = {config.ranks[party.name]: party.name for party in config.secondaries}
    due = dict(names)
    while True:
        message = lines.receive(config.primary.name, ClassMeansKind.CLASS_MEANS_TURN, StarKind.DONE)
        if message.kind is StarKind.DONE:
            return len(names) - len(due)
        turn = ClassMeansTurn.from_message(message, due=due)
        what = dealt_sums.DealtFor(
            run=facts.run,
            secondary=turn.secondary,
            rows=facts.rows,
            bins=bins_of(config),
            numbers=turn.numbers,
        )
        dealing, seed = dealt_sums.deal(what)
        lines.send(ClassMeansSeed(seed=seed, what=what).to_message(), due.pop(turn.secondary))
        lines.send(
            ClassMeansDealing(shifts=dealing.shifts, correction=dealing.correction).to_message(),
            config.primary.name,
        )
