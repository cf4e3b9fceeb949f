"""Messages by which class sums meet labels, each checked where it is read."""

from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.models.frozen import MOST_FEATURES
from securevfl.mpc import dealt_sums
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage, wire


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

    They have one more than the secondary's records have features.
    """

    KIND: ClassVar = ClassMeansKind.CLASS_MEANS_STATE
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"no record": "settled numbers columns lengths"}

    settled: bool
    """True if the encoder was fitted in an earlier session of this run."""

    numbers: int = wire(least=2, most=MOST_FEATURES + 1)
    """Columns of the class-sum matrix."""

    columns: int = wire(least=0, most=MOST_FEATURES)
    """Numbers of a record in which labels can be seen behind its noise."""


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

    numbers: int = wire(least=2, most=MOST_FEATURES + 1)


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
