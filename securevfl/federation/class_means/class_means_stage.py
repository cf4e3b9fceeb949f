"""The class-means stage: messages, and each party's part between processes and in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Float64, Int64, UInt64

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ProtocolError
from securevfl.federation.class_means.ballot import Ballot, keep_of
from securevfl.federation.encoder_fitting import Voter, sums_of
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan
from securevfl.federation.session.handshake import Joined
from securevfl.models.frozen import MOST_NUMBERS
from securevfl.mpc.dealt_sums import (
    SEED_BYTES,
    DealtFor,
    SumDealing,
    deal,
    masked,
    masked_noise,
    opened,
    rows_of_piece,
    shifted,
)
from securevfl.transport.channels import CallerLines, Kinds, Lines, PrimaryLines, read_from
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


class VotingKind(MessageKind):
    """What parties tell one another to fit votes."""

    VOTES_CALL = 43
    VOTES_STATE = 44
    VOTES_LABELS = 45
    VOTES_TURN = 46
    VOTES_DEALING = 47
    VOTES_SEED = 48
    VOTES_SHIFTED = 49
    VOTES_NOISE = 50
    VOTES_MASKED = 51
    VOTES_SUMS = 52
    VOTES_DONE = 53


@dataclass(frozen=True, slots=True)
class VotesCall(DeclaredMessage):
    """Votes are to be fitted before the first release. Tells nothing else."""

    KIND: ClassVar = VotingKind.VOTES_CALL
    WAY: ClassVar = "primary to every secondary"


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesState(DeclaredMessage):
    """Whether the secondary's votes are fitted already, and how many numbers its class sums have.

    They have one more than the secondary's records have features, or than a projection leaves.
    """

    KIND: ClassVar = VotingKind.VOTES_STATE
    WAY: ClassVar = "secondary to primary"

    settled: bool
    """Whether they are fitted, in an earlier session of this run."""

    numbers: int = wire(least=2, most=MOST_NUMBERS + 1)
    """Of a line of its class sums."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesLabels(DeclaredMessage):
    """The class of every row that is for learning, and which rows are not.

    Only with ``encoder.labels = "shown"``, as they are, and with ``"randomised"``, as they were
    drawn once for all secondaries and for the whole run.
    """

    KIND: ClassVar = VotingKind.VOTES_LABELS
    WAY: ClassVar = "primary to every secondary"

    bins_of_rows: Int64[np.ndarray, " rows"] = wire(name="bins", below="bins", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesTurn(DeclaredMessage):
    """Which secondary's class sums come next, and how many numbers they have."""

    KIND: ClassVar = VotingKind.VOTES_TURN
    WAY: ClassVar = "primary to dealer"

    secondary: int = wire(among="due")
    """Its rank."""

    numbers: int = wire(least=2, most=MOST_NUMBERS + 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesDealing(DeclaredMessage):
    """A uniform shift for each row, and what takes a secondary's masks out of its class sums."""

    KIND: ClassVar = VotingKind.VOTES_DEALING
    WAY: ClassVar = "dealer to primary"

    shifts: Int64[np.ndarray, " rows"] = wire(below="bins", repr=False)
    correction: UInt64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesSeed(TypedMessage):
    """The seed of a secondary's masks, sealed: the primary, which relays it, must not have it.

    With it come the run, the secondary, and the rows, bins and numbers that masks were dealt for.
    """

    KIND: ClassVar = VotingKind.VOTES_SEED
    WAY: ClassVar = "dealer to a secondary"

    seed: bytes = field(repr=False)
    what: DealtFor
    """What the dealer has dealt masks for: in part what the primary told it."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        seed = np.frombuffer(self.seed, dtype=np.uint8)
        return Message(kind=self.KIND, meta=asdict(self.what), tensors={"seed": seed})

    @classmethod
    def from_message(cls, message: Message, *, what: DealtFor) -> "VotesSeed":
        """Read the dealer's.

        Args:
            message: As it came.
            what: What this party's class sums are, by its own plan and table.

        Raises:
            ProtocolError: If it is not of a seed's length, or masks were dealt for other sums: the
                primary, which asks the dealer for them, told it otherwise.
        """
        seed = message.tensor("seed", dtype=np.uint8, shape=(SEED_BYTES,))
        for name, own in asdict(what).items():
            theirs = message.figure(name, type(own))
            if theirs != own:
                raise ProtocolError(
                    f"{message.sender}: dealt masks for class sums with {name} = {theirs!r:.80}, "
                    f"as the primary asked, and this party's have {own!r}; no sums were sent"
                )
        return cls(seed=seed.tobytes(), what=what)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesShifted(DeclaredMessage):
    """The class of every row, moved on by the dealer's shift: uniform numbers."""

    KIND: ClassVar = VotingKind.VOTES_SHIFTED
    WAY: ClassVar = "primary to a secondary"

    said: Int64[np.ndarray, " rows"] = wire(below="bins", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesNoise(DeclaredMessage):
    """A secondary's noise under the dealer's mask: uniform numbers."""

    KIND: ClassVar = VotingKind.VOTES_NOISE
    WAY: ClassVar = "secondary to primary"

    words: UInt64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesMasked(DeclaredMessage):
    """The vectors of some rows, one after another, under the dealer's masks: uniform numbers.

    With the masked noise and the dealer's correction they come to each class's sum of vectors with
    the secondary's noise, and to nothing else.
    """

    KIND: ClassVar = VotingKind.VOTES_MASKED
    WAY: ClassVar = "secondary to primary"

    words: UInt64[np.ndarray, "rows bins numbers"] = wire(repr=False)
    """Of so many rows as :func:`securevfl.mpc.dealt_sums.rows_of_piece` says, or what is left."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesSums(DeclaredMessage):
    """A secondary's own class sums, with its noise and with the noise of the labels' promise.

    Only with ``encoder.labels = "shares"``. They are all that it learns of labels.
    """

    KIND: ClassVar = VotingKind.VOTES_SUMS
    WAY: ClassVar = "primary to a secondary"

    sums: Int64[np.ndarray, "bins numbers"] = wire(repr=False)


@dataclass(frozen=True, slots=True)
class VotesDone(DeclaredMessage):
    """The secondary's votes are fitted. Tells nothing else."""

    KIND: ClassVar = VotingKind.VOTES_DONE
    WAY: ClassVar = "secondary to primary"


# Votes in a simulation: the same sums and noise as between processes, without masks.


def vote_in_process(
    secondaries: Sequence[Secondary], make: Callable[[Sequence[str]], Ballot]
) -> None:
    """Let every secondary fit its votes.

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
    voters = [secondary.voter for secondary in secondaries if secondary.voter is not None]
    due = [voter for voter in voters if not voter.settled]
    if not due:
        return
    ballot = make([voter.name for voter in due])
    for voter in due:
        hidden = ballot.label_noise is not None
        voter.begin(leaves=hidden)
        if ballot.label_noise is None:
            sums = voter.by_labels(ballot.bins_of_rows, keep=ballot.keep)
        else:
            added = voter.format.by_bins(voter.vectors(), ballot.bins_of_rows) + voter.noise()
            sums = (added + ballot.label_noise(voter.format)).astype(np.float64)
            ballot.returns(voter.name)
        voter.finish(sums)


# Votes between processes: what primary, secondary and dealer do before the first release.

_AT_PRIMARY: Final = (
    VotingKind.VOTES_STATE,
    VotingKind.VOTES_DEALING,
    VotingKind.VOTES_NOISE,
    VotingKind.VOTES_MASKED,
    VotingKind.VOTES_DONE,
    StarKind.SEALED,
)
_AT_SECONDARY: Final = (
    VotingKind.VOTES_LABELS,
    VotingKind.VOTES_SEED,
    VotingKind.VOTES_SHIFTED,
    VotingKind.VOTES_SUMS,
    StarKind.SEALED,
)
_AT_DEALER: Final = (VotingKind.VOTES_TURN, StarKind.DONE)


class PrimaryVoting:
    """The primary's part: call for votes once, and let the dealer go."""

    def __init__(self, plan: RunPlan, lines: Lines) -> None:
        """Prepare it.

        Args:
            plan: The run, whose encoders vote.
            lines: To the secondaries, and to the dealer if there is one.
        """
        self._plan = plan
        self._lines = lines
        dealer = plan.config.helper("dealer")
        self._dealer = dealer.name if plan.config.deals_votes and dealer is not None else None
        self._waits = self._dealer is not None

    @classmethod
    def over(cls, transport: PrimaryTransport, plan: RunPlan) -> "PrimaryVoting":
        """Return the part over the star."""
        deadline_s = plan.config.runtime.idle_timeout_s
        lines = PrimaryLines(
            transport, _ranks(plan.config), kinds=_AT_PRIMARY, deadline_s=deadline_s
        )
        return cls(plan, lines)

    def __call__(self, make: Callable[[Sequence[str]], Ballot]) -> None:
        """Have every secondary's votes fitted that are not fitted yet.

        Args:
            make: Charges for labels and returns this party's rows by class, for secondaries of
                these names; asked if it is needed.

        Raises:
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            With ``labels = "shown"`` and ``"randomised"``, to every secondary: the ballot's bins.
            With ``"shares"``, to each secondary: its class sums with the ballot's label noise; to
            the dealer: how many rows, and how many numbers each secondary's sums have.
        """
        names = tuple(self._plan.secondaries.values())
        self._lines.send(VotesCall().to_message(), *names)
        states = {name: read_from(self._lines, name, VotesState) for name in names}
        due = [name for name in names if not states[name].settled]
        if due:
            self._fit(due, make(due), {name: states[name].numbers for name in due})
        self.end()

    def _fit(self, due: Sequence[str], ballot: Ballot, numbers: Mapping[str, int]) -> None:
        if ballot.label_noise is None:
            labels = VotesLabels(bins_of_rows=ballot.bins_of_rows)
            self._lines.send(labels.to_message(), *due)
        else:
            for name in due:
                self._sum(name, ballot, numbers=numbers[name])
        for name in due:
            read_from(self._lines, name, VotesDone)

    def end(self) -> None:
        """Let the dealer go, if it still waits.

        Reveals:
            To the dealer: that it is not needed any more.
        """
        if self._dealer is not None and self._waits:
            self._lines.send(Done().to_message(), self._dealer)
        self._waits = False

    def _sum(self, name: str, ballot: Ballot, *, numbers: int) -> None:
        """Work out one secondary's class sums under masks, and return them behind label noise."""
        assert self._dealer is not None, "checked with the federation file"
        assert ballot.label_noise is not None, "sums come back behind it"
        lines, rows = self._lines, len(ballot.bins_of_rows)
        shape = {"bins": ballot.bins, "numbers": numbers}
        # First, so that noise which cannot be drawn costs the secondary nothing.
        label_noise = ballot.label_noise(sums_of(self._plan, numbers - 1))
        turn = VotesTurn(secondary=self._plan.ranks[name], numbers=numbers)
        lines.send(turn.to_message(), self._dealer)
        dealing = read_from(lines, self._dealer, VotesDealing, rows=rows, **shape)
        said = shifted(ballot.bins_of_rows, dealing.shifts, bins=ballot.bins)
        lines.send(VotesShifted(said=said).to_message(), name)
        noise = read_from(lines, name, VotesNoise, **shape).words

        def pieces() -> Iterator[UInt64[np.ndarray, "some bins numbers"]]:
            left = rows
            while left:
                piece = min(left, rows_of_piece(ballot.bins, numbers))
                left -= piece
                yield read_from(lines, name, VotesMasked, rows=piece, **shape).words

        sums = opened(
            pieces(), noise, SumDealing(shifts=dealing.shifts, correction=dealing.correction)
        )
        ballot.returns(name)
        lines.send(VotesSums(sums=sums + label_noise).to_message(), name)


class SecondaryVoting:
    """A secondary's part: answer the primary's call, once in a session."""

    def __init__(self, plan: RunPlan, voter: Voter, lines: Lines) -> None:
        """Prepare it.

        Args:
            plan: The run, whose encoders vote.
            voter: Adds up this party's records, and fits its votes.
            lines: To the primary, and to the dealer if there is one.
        """
        self._plan = plan
        self._voter = voter
        self._lines = lines
        self._called = False

    @classmethod
    def over(cls, star: Joined, plan: RunPlan, voter: Voter) -> "SecondaryVoting":
        """Return the part over the star."""
        return cls(plan, voter, _caller_lines(star, plan.config, kinds=_AT_SECONDARY))

    def __call__(self) -> None:
        """Have this party's votes fitted, unless an earlier session of the run did that.

        Raises:
            BudgetExceededError: If the budget forbids it; nothing was sent then.
            PrivacyError: If class sums of this run left before and what came of them was lost.
            ProtocolError: If the primary calls twice, or a party leaves the protocol or fails.

        Reveals:
            To the primary: whether votes are fitted, and how many numbers class sums have; with
            ``labels = "shares"`` the class sums behind this party's noise, each row in the one
            class that the primary says.
        """
        lines, voter = self._lines, self._voter
        if self._called:
            raise ProtocolError("the primary calls for votes twice in one session")
        self._called = True
        state = VotesState(settled=voter.settled, numbers=voter.format.shape[1])
        lines.send(state.to_message(), self._primary)
        if state.settled:
            return
        voter.finish(self._by_shares() if self._plan.config.deals_votes else self._by_labels())
        lines.send(VotesDone().to_message(), self._primary)

    @property
    def _primary(self) -> str:
        return self._plan.config.primary.name

    def _by_labels(self) -> Float64[np.ndarray, "bins numbers"]:
        """Return noised class sums by the labels that the primary sends."""
        encoder, bins = self._plan.config.encoder, bins_of(self._plan.config)
        assert encoder is not None, "votes are what it says"
        rows = self._plan.facts.rows
        labels = read_from(self._lines, self._primary, VotesLabels, rows=rows, bins=bins)
        self._voter.begin(leaves=False)
        keep = keep_of(self._plan.config) if encoder.labels == "randomised" else None
        return self._voter.by_labels(labels.bins_of_rows, keep=keep)

    def _by_shares(self) -> Float64[np.ndarray, "bins numbers"]:
        """Return class sums with both parties' noise, as the primary sends them back."""
        lines, voter, bins = self._lines, self._voter, bins_of(self._plan.config)
        dealer = self._plan.config.helper("dealer")
        assert dealer is not None, "checked with the federation file"
        # Parties wait for their turns; their sums are made meanwhile, and stay here until then.
        vectors = voter.vectors()
        said = read_from(lines, self._primary, VotesShifted, rows=len(vectors), bins=bins).said
        what = DealtFor(
            run=self._plan.facts.run,
            secondary=self._plan.ranks[voter.name],
            rows=len(vectors),
            bins=bins,
            numbers=vectors.shape[1],
        )
        message = lines.receive(dealer.name, VotingKind.VOTES_SEED)
        seed = VotesSeed.from_message(message, what=what).seed
        pieces = masked(vectors, said, seed, what)
        voter.begin(leaves=True)
        noise = VotesNoise(words=masked_noise(voter.noise(), seed, what))
        lines.send(noise.to_message(), self._primary)
        for words in pieces:
            lines.send(VotesMasked(words=words).to_message(), self._primary)
        answer = read_from(lines, self._primary, VotesSums, bins=bins, numbers=what.numbers)
        return answer.sums.astype(np.float64)


def deal_over(star: Joined, config: FederationConfig) -> int:
    """Take the dealer's part over the star; see :func:`deal_for_votes`."""
    lines = _caller_lines(star, config, kinds=_AT_DEALER)
    return deal_for_votes(config, lines, star.facts)


def deal_for_votes(config: FederationConfig, lines: Lines, facts: RunFacts) -> int:
    """Deal masks for each secondary's class sums, until the primary says that votes are fitted.

    Args:
        config: The federation file, whose encoders vote.
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
        message = lines.receive(config.primary.name, VotingKind.VOTES_TURN, StarKind.DONE)
        if message.kind is StarKind.DONE:
            return len(names) - len(due)
        turn = VotesTurn.from_message(message, due=due)
        what = DealtFor(
            run=facts.run,
            secondary=turn.secondary,
            rows=facts.rows,
            bins=bins_of(config),
            numbers=turn.numbers,
        )
        dealing, seed = deal(what)
        lines.send(VotesSeed(seed=seed, what=what).to_message(), due.pop(turn.secondary))
        lines.send(
            VotesDealing(shifts=dealing.shifts, correction=dealing.correction).to_message(),
            config.primary.name,
        )


def bins_of(config: FederationConfig) -> int:
    """Return how many lines class sums have: votes' numbers, and one for rows not for learning."""
    _, classes = config.family.cut_shape(config.model)
    return classes + 1


def _ranks(config: FederationConfig) -> dict[str, int]:
    """Return name to rank of everybody who takes part; a coordinator may have left by then."""
    takes_part = {config.primary.name, *(party.name for party in config.secondaries)}
    dealer = config.helper("dealer")
    if config.deals_votes and dealer is not None:
        takes_part.add(dealer.name)
    return {name: rank for name, rank in config.ranks.items() if name in takes_part}


def _caller_lines(star: Joined, config: FederationConfig, *, kinds: Kinds) -> CallerLines:
    return CallerLines(
        star.transport,
        _ranks(config),
        star.sealed,
        kinds=kinds,
        deadline_s=config.runtime.idle_timeout_s,
    )
