"""The messages by which class sums meet labels, each checked where it is read."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.models.votes import MOST_NUMBERS
from securevfl.mpc.dealt_sums import (
    SEED_BYTES,
    DealtFor,
    SumDealing,
    require_bins,
    rows_of_piece,
)
from securevfl.transport.message import Message, MessageKind, TypedMessage


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
class VotesCall(TypedMessage):
    """Votes are to be fitted before the first release. Tells nothing else."""

    KIND: ClassVar = VotingKind.VOTES_CALL
    WAY: ClassVar = "primary to every secondary"


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesState(TypedMessage):
    """Whether the secondary's votes are fitted already, and how many numbers its class sums have.

    They have one more than the secondary's records have features, or than a projection leaves.
    """

    KIND: ClassVar = VotingKind.VOTES_STATE
    WAY: ClassVar = "secondary to primary"

    settled: bool
    """Whether they are fitted, in an earlier session of this run."""

    numbers: int
    """Of a line of its class sums."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"settled": self.settled, "numbers": self.numbers})

    @classmethod
    def from_message(cls, message: Message) -> "VotesState":
        """Read a secondary's.

        Raises:
            ProtocolError: If no class sums have so many numbers.
        """
        numbers = _numbers(message)
        return cls(settled=message.figure("settled", bool), numbers=numbers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesLabels(TypedMessage):
    """The class of every row that is for learning, and which rows are not.

    Only with ``encoder.labels = "shown"``, as they are, and with ``"randomised"``, as they were
    drawn once for all secondaries and for the whole run.
    """

    KIND: ClassVar = VotingKind.VOTES_LABELS
    WAY: ClassVar = "primary to every secondary"

    bins_of_rows: Int64[np.ndarray, " rows"] = field(repr=False)

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"bins": self.bins_of_rows})

    @classmethod
    def from_message(cls, message: Message, *, rows: int, bins: int) -> "VotesLabels":
        """Read the primary's.

        Raises:
            ProtocolError: If they are not one for each row, or one is no class.
        """
        return cls(bins_of_rows=_bins(message, "bins", rows=rows, bins=bins))


@dataclass(frozen=True, kw_only=True, slots=True)
class VotesTurn(TypedMessage):
    """Which secondary's class sums come next, and how many numbers they have."""

    KIND: ClassVar = VotingKind.VOTES_TURN
    WAY: ClassVar = "primary to dealer"

    secondary: int
    """Its rank."""

    numbers: int

    def to_message(self) -> Message:
        """Return it as it is sent."""
        meta = {"secondary": self.secondary, "numbers": self.numbers}
        return Message(kind=self.KIND, meta=meta)

    @classmethod
    def from_message(cls, message: Message, *, due: Collection[int]) -> "VotesTurn":
        """Read the primary's.

        Args:
            message: As it came.
            due: Ranks of the secondaries that had no turn yet.

        Raises:
            ProtocolError: If it names nobody, or a secondary twice, or no class sums have so many
                numbers.
        """
        rank = message.figure("secondary", int)
        if rank not in due:
            raise ProtocolError(
                f"{message.sender}: asked for votes' masks for rank {rank}, which had its turn or "
                f"is no secondary"
            )
        return cls(secondary=rank, numbers=_numbers(message))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesDealing(TypedMessage):
    """A uniform shift for each row, and what takes a secondary's masks out of its class sums."""

    KIND: ClassVar = VotingKind.VOTES_DEALING
    WAY: ClassVar = "dealer to primary"

    dealing: SumDealing

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors = {
            "shifts": self.dealing.shifts,
            "correction": self.dealing.correction.view(np.int64),
        }
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, rows: int, bins: int, numbers: int
    ) -> "VotesDealing":
        """Read the dealer's.

        Raises:
            ProtocolError: If it is for other rows or sums, or a shift is out of range.
        """
        shifts = _bins(message, "shifts", rows=rows, bins=bins)
        correction = message.tensor("correction", dtype=np.int64, shape=(bins, numbers))
        return cls(dealing=SumDealing(shifts=shifts, correction=correction.view(np.uint64)))


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
class VotesShifted(TypedMessage):
    """The class of every row, moved on by the dealer's shift: uniform numbers."""

    KIND: ClassVar = VotingKind.VOTES_SHIFTED
    WAY: ClassVar = "primary to a secondary"

    said: Int64[np.ndarray, " rows"] = field(repr=False)

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"said": self.said})

    @classmethod
    def from_message(cls, message: Message, *, rows: int, bins: int) -> "VotesShifted":
        """Read the primary's.

        Raises:
            ProtocolError: If they are not one for each row, or one is out of range.
        """
        return cls(said=_bins(message, "said", rows=rows, bins=bins))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesNoise(TypedMessage):
    """A secondary's noise under the dealer's mask: uniform numbers."""

    KIND: ClassVar = VotingKind.VOTES_NOISE
    WAY: ClassVar = "secondary to primary"

    words: UInt64[np.ndarray, "bins numbers"] = field(repr=False)

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"words": self.words.view(np.int64)})

    @classmethod
    def from_message(cls, message: Message, *, bins: int, numbers: int) -> "VotesNoise":
        """Read a secondary's.

        Raises:
            ProtocolError: If it is not of the sums' shape.
        """
        words = message.tensor("words", dtype=np.int64, shape=(bins, numbers))
        return cls(words=words.view(np.uint64))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesMasked(TypedMessage):
    """The vectors of some rows, one after another, under the dealer's masks: uniform numbers.

    With the masked noise and the dealer's correction they come to each class's sum of vectors with
    the secondary's noise, and to nothing else.
    """

    KIND: ClassVar = VotingKind.VOTES_MASKED
    WAY: ClassVar = "secondary to primary"

    words: UInt64[np.ndarray, "some bins numbers"] = field(repr=False)

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"words": self.words.view(np.int64)})

    @classmethod
    def from_message(cls, message: Message, *, left: int, bins: int, numbers: int) -> "VotesMasked":
        """Read a secondary's.

        Args:
            message: As it came.
            left: Rows of which nothing has come yet.
            bins: Lines of the sums.
            numbers: Of a line.

        Raises:
            ProtocolError: If it is not of the rows that are due.
        """
        rows = min(left, rows_of_piece(bins, numbers))
        words = message.tensor("words", dtype=np.int64, shape=(rows, bins, numbers))
        return cls(words=words.view(np.uint64))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VotesSums(TypedMessage):
    """A secondary's own class sums, with its noise and with the noise of the labels' promise.

    Only with ``encoder.labels = "shares"``. They are all that it learns of labels.
    """

    KIND: ClassVar = VotingKind.VOTES_SUMS
    WAY: ClassVar = "primary to a secondary"

    sums: Int64[np.ndarray, "bins numbers"] = field(repr=False)

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"sums": self.sums})

    @classmethod
    def from_message(cls, message: Message, *, bins: int, numbers: int) -> "VotesSums":
        """Read the primary's.

        Raises:
            ProtocolError: If they are not of the sums' shape.
        """
        return cls(sums=message.tensor("sums", dtype=np.int64, shape=(bins, numbers)))


@dataclass(frozen=True, slots=True)
class VotesDone(TypedMessage):
    """The secondary's votes are fitted. Tells nothing else."""

    KIND: ClassVar = VotingKind.VOTES_DONE
    WAY: ClassVar = "secondary to primary"


def _numbers(message: Message) -> int:
    """Return how many numbers class sums have, as a message says.

    Raises:
        ProtocolError: If none have so many.
    """
    numbers: int = message.figure("numbers", int)
    if not 2 <= numbers <= MOST_NUMBERS + 1:
        raise ProtocolError(f"{message.sender}: spoke of class sums of {numbers} numbers")
    return numbers


def _bins(message: Message, name: str, *, rows: int, bins: int) -> Int64[np.ndarray, " rows"]:
    """Return a number in [0, bins) for each row.

    Raises:
        ProtocolError: If it is something else.
    """
    values = message.tensor(name, dtype=np.int64, shape=(rows,))
    require_bins(values, bins, whose=f"{message.sender}: {message.kind.name}: {name}")
    return values
