"""The class-means stage: messages, and each party's part between processes and in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ProtocolError
from securevfl.federation.encoder_fitting import ClassMeansFitting, sum_format_of
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_facts import RunFacts
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.handshake import Joined
from securevfl.models.frozen import MOST_NUMBERS
from securevfl.mpc import dealt_sums
from securevfl.stages.class_means.class_labels import ClassLabels, keep_of
from securevfl.transport import channels
from securevfl.transport.message import (
    DeclaredMessage,
    Done,
    Message,
    MessageKind,
    StarKind,
    TypedMessage,
    wire,
)
from securevfl.transport.star import PrimaryTransport

# The messages by which class sums meet labels, each checked where it is read.


class ClassMeansKind(MessageKind):
    """Kinds of messages of the class-means stage."""

    CLASS_MEANS_CALL = 43
    CLASS_MEANS_STATE = 44
    CLASS_MEANS_LABELS = 45
    CLASS_MEANS_TURN = 46
    CLASS_MEANS_DEALING = 47
    CLASS_MEANS_SEED = 48
    CLASS_MEANS_SHIFTED = 49
    CLASS_MEANS_NOISE = 50
    CLASS_MEANS_MASKED = 51
    CLASS_MEANS_SUMS = 52
    CLASS_MEANS_DONE = 53


@dataclass(frozen=True, slots=True)
class ClassMeansCall(DeclaredMessage):
    """Encoders are to be fitted before the first release."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_CALL
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassMeansState(DeclaredMessage):
    """Whether the secondary's encoder is fitted, and how many numbers a line of its sums has.

    They have one more than the secondary's records have features, or than a projection leaves.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_STATE
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"no record": "settled numbers lengths"}

    settled: bool
    """True if the encoder was fitted in an earlier session of this run."""

    numbers: int = wire(least=2, most=MOST_NUMBERS + 1)
    """Columns of the class-sum matrix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansLabels(DeclaredMessage):
    """The class of every row that is for learning, and which rows are not.

    Only with ``encoder.labels = "plaintext"``, as they are, and with ``"randomised"``, as they were
    drawn once for all secondaries and for the whole run.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_LABELS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "labels that class means are fitted to": "bins_of_rows",
        "sizes and times": "lengths",
    }

    bins_of_rows: Int64[np.ndarray, " rows"] = wire(name="bins", below="bins", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassMeansTurn(DeclaredMessage):
    """Which secondary's class sums come next, and how many numbers they have."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_TURN
    WAY: ClassVar = "primary to dealer"
    COVERS: ClassVar = {"no record": "secondary numbers lengths"}

    secondary: int = wire(among="due")
    """Its rank."""

    numbers: int = wire(least=2, most=MOST_NUMBERS + 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansDealing(DeclaredMessage):
    """A uniform shift for each row, and what takes a secondary's masks out of its class sums."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_DEALING
    WAY: ClassVar = "dealer to primary"
    COVERS: ClassVar = {"masks": "shifts correction", "sizes and times": "lengths"}

    shifts: Int64[np.ndarray, " rows"] = wire(below="bins", repr=False)
    correction: UInt64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassMeansSeed(TypedMessage):
    """The seed of a secondary's masks, sealed: the primary, which relays it, must not have it.

    With it come the run, the secondary, and the rows, bins and numbers that masks were dealt for.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_SEED
    WAY: ClassVar = "dealer to a secondary"
    COVERS: ClassVar = {"masks": "seed", "sizes and times": "what", "no record": "lengths"}

    seed: bytes = field(repr=False)
    what: dealt_sums.DealtFor
    """Sizes that the dealer dealt masks for, in part on the word of the primary."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        seed = np.frombuffer(self.seed, dtype=np.uint8)
        return Message(kind=self.KIND, meta=asdict(self.what), tensors={"seed": seed})

    @classmethod
    def from_message(cls, message: Message, *, what: dealt_sums.DealtFor) -> "ClassMeansSeed":
        """Read the dealer's.

        Args:
            message: As it came.
            what: What this party's class sums are, by its own plan and table.

        Raises:
            ProtocolError: If it is not of a seed's length, or masks were dealt for other sums: the
                primary, which asks the dealer for them, told it otherwise.
        """
        message.require_only("seed", *asdict(what))
        seed = message.tensor("seed", dtype=np.uint8, shape=(dealt_sums.SEED_BYTES,))
        for name, own in asdict(what).items():
            theirs = message.figure(name, type(own))
            if theirs != own:
                raise ProtocolError(
                    f"{message.sender}: dealt masks for class sums with {name} = {theirs!r:.80}, "
                    f"as the primary asked, and this party's have {own!r}; no sums were sent"
                )
        return cls(seed=seed.tobytes(), what=what)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansShifted(DeclaredMessage):
    """The class of every row, moved on by the dealer's shift."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_SHIFTED
    WAY: ClassVar = "primary to a secondary"
    COVERS: ClassVar = {"masks": "said", "sizes and times": "lengths"}

    said: Int64[np.ndarray, " rows"] = wire(below="bins", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansNoise(DeclaredMessage):
    """A secondary's noise under the dealer's mask."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_NOISE
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"masks": "words", "no record": "lengths"}

    words: UInt64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansMasked(DeclaredMessage):
    """The vectors of some rows, one after another, under the dealer's masks.

    With masked noise and the dealer's correction they come to noised sums by class alone.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_MASKED
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"fitting of encoders": "words", "no record": "lengths"}

    words: UInt64[np.ndarray, "rows bins numbers"] = wire(repr=False)
    """Masked vectors of :func:`securevfl.mpc.dealt_sums.rows_of_piece` rows, or of the rest."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClassMeansSums(DeclaredMessage):
    """A secondary's own class sums, with its noise and with the noise of the labels' promise.

    Only with ``encoder.labels = "shares"``. They are all that it learns of labels.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_SUMS
    WAY: ClassVar = "primary to a secondary"
    COVERS: ClassVar = {"labels that class means are fitted to": "sums", "no record": "lengths"}

    sums: Int64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, slots=True)
class ClassMeansDone(DeclaredMessage):
    """The secondary's encoder is fitted."""

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_DONE
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"no record": "lengths"}


# Class means in a simulation: the same sums and noise as between processes, without masks.


def class_means_in_process(
    secondaries: Sequence[Secondary], make: Callable[[Sequence[str]], ClassLabels]
) -> None:
    """Let every secondary fit its encoder.

    Args:
        secondaries: All of them.
        make: Charges for labels and returns the primary's rows by class, for secondaries of these
            names; asked if it is needed.

    Raises:
        BudgetExceededError: If a secondary's budget forbids it.
        PrivacyError: If the noise leaves nothing to fit to.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    parts = [
        secondary.class_means for secondary in secondaries if secondary.class_means is not None
    ]
    due = [class_means for class_means in parts if not class_means.encoder_fixed]
    if not due:
        return
    class_labels = make([class_means.name for class_means in due])
    for class_means in due:
        hidden = class_labels.label_noise is not None
        class_means.begin(leaves=hidden)
        if class_labels.label_noise is None:
            sums = class_means.by_labels(class_labels.bins_of_rows, keep=class_labels.keep)
        else:
            added = (
                class_means.format.by_bins(class_means.vectors(), class_labels.bins_of_rows)
                + class_means.noise()
            )
            sums = (added + class_labels.label_noise(class_means.format)).astype(np.float64)
            class_labels.returns(class_means.name)
        class_means.finish(sums)


# Class means between processes: what primary, secondary and dealer do before the first release.

_AT_PRIMARY: Final = (
    ClassMeansKind.CLASS_MEANS_STATE,
    ClassMeansKind.CLASS_MEANS_DEALING,
    ClassMeansKind.CLASS_MEANS_NOISE,
    ClassMeansKind.CLASS_MEANS_MASKED,
    ClassMeansKind.CLASS_MEANS_DONE,
    StarKind.SEALED,
)
_AT_SECONDARY: Final = (
    ClassMeansKind.CLASS_MEANS_LABELS,
    ClassMeansKind.CLASS_MEANS_SEED,
    ClassMeansKind.CLASS_MEANS_SHIFTED,
    ClassMeansKind.CLASS_MEANS_SUMS,
    StarKind.SEALED,
)
_AT_DEALER: Final = (ClassMeansKind.CLASS_MEANS_TURN, StarKind.DONE)


@dataclass(eq=False)
class ClassMeansPrimary:
    """The primary's part: call for class means once, and let the dealer go."""

    plan: RunPlan
    """The run, whose encoders are class means."""
    lines: channels.Channels
    """To the secondaries, and to the dealer if there is one."""

    def __post_init__(self) -> None:
        dealer = self.plan.config.helper("dealer")
        self._dealer = (
            dealer.name if self.plan.config.deals_class_sums and dealer is not None else None
        )
        self._waits = self._dealer is not None

    @classmethod
    def over(cls, transport: PrimaryTransport, plan: RunPlan) -> "ClassMeansPrimary":
        """Return the part over the star."""
        lines = channels.PrimaryChannels(
            transport,
            _ranks(plan.config),
            kinds=_AT_PRIMARY,
            deadline_s=plan.config.waits.work.primary_s,
        )
        return cls(plan, lines)

    def __call__(self, make: Callable[[Sequence[str]], ClassLabels]) -> None:
        """Have every encoder fitted that is not fitted yet.

        Args:
            make: Charges for labels and returns this party's rows by class, for secondaries of
                these names; asked if it is needed.

        Raises:
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            With ``labels = "plaintext"`` and ``"randomised"``, to every secondary: the rows'
            classes; a regression's depend on the primary's own columns too. With ``"shares"``, to
            each secondary: its class sums with label noise; to the dealer: how many rows, and how
            many numbers each secondary's sums have.
        """
        names = tuple(self.plan.secondaries.values())
        self.lines.send(ClassMeansCall().to_message(), *names)
        states = {name: channels.receive_from(self.lines, name, ClassMeansState) for name in names}
        due = [name for name in names if not states[name].settled]
        if due:
            self._fit(due, make(due), {name: states[name].numbers for name in due})
        self.end()

    def _fit(
        self, due: Sequence[str], class_labels: ClassLabels, numbers: Mapping[str, int]
    ) -> None:
        if class_labels.label_noise is None:
            labels = ClassMeansLabels(bins_of_rows=class_labels.bins_of_rows)
            self.lines.send(labels.to_message(), *due)
        else:
            for name in due:
                self._sum(name, class_labels, numbers=numbers[name])
        for name in due:
            channels.receive_from(self.lines, name, ClassMeansDone)

    def end(self) -> None:
        """Let the dealer go, if it still waits.

        Reveals:
            To the dealer: that it is not needed any more.
        """
        if self._dealer is not None and self._waits:
            self.lines.send(Done().to_message(), self._dealer)
        self._waits = False

    def _sum(self, name: str, class_labels: ClassLabels, *, numbers: int) -> None:
        """Work out one secondary's class sums under masks, and return them behind label noise."""
        assert self._dealer is not None, "checked with the federation file"
        assert class_labels.label_noise is not None, "sums come back behind it"
        lines, rows = self.lines, len(class_labels.bins_of_rows)
        shape = {"bins": class_labels.bins, "numbers": numbers}
        # First, so that noise which cannot be drawn costs the secondary nothing.
        label_noise = class_labels.label_noise(sum_format_of(self.plan, numbers - 1))
        turn = ClassMeansTurn(secondary=self.plan.ranks[name], numbers=numbers)
        lines.send(turn.to_message(), self._dealer)
        dealing = channels.receive_from(lines, self._dealer, ClassMeansDealing, rows=rows, **shape)
        shifted_bins = dealt_sums.shift_bins(
            class_labels.bins_of_rows, dealing.shifts, bins=class_labels.bins
        )
        lines.send(ClassMeansShifted(said=shifted_bins).to_message(), name)
        noise = channels.receive_from(lines, name, ClassMeansNoise, **shape).words

        def pieces() -> Iterator[UInt64[np.ndarray, "some bins numbers"]]:
            left = rows
            while left:
                piece = min(left, dealt_sums.rows_of_piece(class_labels.bins, numbers))
                left -= piece
                yield channels.receive_from(
                    lines, name, ClassMeansMasked, rows=piece, **shape
                ).words

        sums = dealt_sums.open_sums(
            pieces(),
            noise,
            dealt_sums.SumDealing(shifts=dealing.shifts, correction=dealing.correction),
        )
        class_labels.returns(name)
        lines.send(ClassMeansSums(sums=sums + label_noise).to_message(), name)


@dataclass(eq=False)
class ClassMeansSecondary:
    """A secondary's part: answer the primary's call, once in a session."""

    plan: RunPlan
    """The run, whose encoders are class means."""
    fitting: ClassMeansFitting
    """Adds up this party's records, and fits its encoder."""
    lines: channels.Channels
    """To the primary, and to the dealer if there is one."""
    _called: bool = field(default=False, init=False)

    @classmethod
    def over(
        cls, star: Joined, plan: RunPlan, class_means: ClassMeansFitting
    ) -> "ClassMeansSecondary":
        """Return the part over the star."""
        return cls(plan, class_means, _caller_lines(star, plan.config, kinds=_AT_SECONDARY))

    def __call__(self) -> None:
        """Have this party's encoder fitted, unless an earlier session of the run did that.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was sent then.
            PrivacyError: If class sums of this run left before and what came of them was lost.
            ProtocolError: If the primary calls twice, or a party leaves the protocol or fails.

        Reveals:
            To the primary: whether the encoder is fitted, and how many numbers class sums have;
            with ``labels = "shares"`` the class sums behind this party's noise, each row in the one
            class that the primary says.
        """
        lines, class_means = self.lines, self.fitting
        if self._called:
            raise ProtocolError("the primary calls for class means twice in one session")
        self._called = True
        state = ClassMeansState(
            settled=class_means.encoder_fixed, numbers=class_means.format.shape[1]
        )
        lines.send(state.to_message(), self._primary)
        if state.settled:
            return
        class_means.finish(
            self._by_shares() if self.plan.config.deals_class_sums else self._by_labels()
        )
        lines.send(ClassMeansDone().to_message(), self._primary)

    @property
    def _primary(self) -> str:
        return self.plan.config.primary.name

    def _by_labels(self) -> Float64[np.ndarray, "bins numbers"]:
        """Return noised class sums by the labels that the primary sends."""
        encoder, bins = self.plan.config.encoder, bins_of(self.plan.config)
        assert encoder is not None, "class means are what it says"
        rows = self.plan.facts.rows
        labels = channels.receive_from(
            self.lines, self._primary, ClassMeansLabels, rows=rows, bins=bins
        )
        self.fitting.begin(leaves=False)
        keep = keep_of(self.plan.config) if encoder.labels == "randomised" else None
        return self.fitting.by_labels(labels.bins_of_rows, keep=keep)

    def _by_shares(self) -> Float64[np.ndarray, "bins numbers"]:
        """Return class sums with both parties' noise, as the primary sends them back."""
        lines, class_means, bins = self.lines, self.fitting, bins_of(self.plan.config)
        dealer = self.plan.config.helper("dealer")
        assert dealer is not None, "checked with the federation file"
        rows = self.plan.facts.rows
        shifted_bins = channels.receive_from(
            lines, self._primary, ClassMeansShifted, rows=rows, bins=bins
        ).said
        what = dealt_sums.DealtFor(
            run=self.plan.facts.run,
            secondary=self.plan.ranks[class_means.name],
            rows=rows,
            bins=bins,
            numbers=class_means.format.shape[1],
        )
        message = lines.receive(dealer.name, ClassMeansKind.CLASS_MEANS_SEED)
        seed = ClassMeansSeed.from_message(message, what=what).seed
        class_means.begin(leaves=True)
        pieces = dealt_sums.mask_vectors(class_means.vectors(), shifted_bins, seed, what)
        noise = ClassMeansNoise(words=dealt_sums.masked_noise(class_means.noise(), seed, what))
        lines.send(noise.to_message(), self._primary)
        for words in pieces:
            lines.send(ClassMeansMasked(words=words).to_message(), self._primary)
        answer = channels.receive_from(
            lines, self._primary, ClassMeansSums, bins=bins, numbers=what.numbers
        )
        return answer.sums.astype(np.float64)


def deal_over_star(star: Joined, config: FederationConfig) -> int:
    """Take the dealer's part over the star; see :func:`deal_class_sums`."""
    lines = _caller_lines(star, config, kinds=_AT_DEALER)
    return deal_class_sums(config, lines, star.facts)


def deal_class_sums(config: FederationConfig, lines: channels.Channels, facts: RunFacts) -> int:
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


def bins_of(config: FederationConfig) -> int:
    """Return how many lines class sums have: classes, and one for rows not for learning."""
    _, classes = config.family.cut_shape(config.model)
    return classes + 1


def _ranks(config: FederationConfig) -> dict[str, int]:
    """Return name to rank of everybody who takes part; a coordinator may have left by then."""
    takes_part = {config.primary.name, *(party.name for party in config.secondaries)}
    dealer = config.helper("dealer")
    if config.deals_class_sums and dealer is not None:
        takes_part.add(dealer.name)
    return {name: rank for name, rank in config.ranks.items() if name in takes_part}


def _caller_lines(
    star: Joined, config: FederationConfig, *, kinds: channels.Kinds
) -> channels.CallerChannels:
    return channels.CallerChannels(
        star.transport,
        _ranks(config),
        star.sealed,
        kinds=kinds,
        deadline_s=config.waits.work.for_primary_s,
        between_s=config.waits.work.secondary_s,
    )
