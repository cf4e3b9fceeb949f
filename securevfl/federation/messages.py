"""The messages of a session's beginning and of its rounds, each checked where it is read."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from jaxtyping import Float32, Int64

from securevfl.core.errors import ProtocolError
from securevfl.federation.run_plan import RUN_ID_DIGITS, Purpose, RunFacts, prediction_facts
from securevfl.mpc.masks import PUBLIC_BYTES
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage, wire

PROTOCOL_VERSION: Final = 18
"""Version of the order and meaning of messages, which callers and primary share beyond frames."""

SIGNATURE_BYTES: Final = 64
RUN_ID: Final = re.compile(f"[0-9a-f]{{{RUN_ID_DIGITS}}}")


class RoundKind(MessageKind):
    """What parties tell one another to join, and in rounds."""

    HELLO = 5
    WELCOME = 6
    PLAN = 9
    SHARE = 10
    GRADIENT = 11
    AVERAGE = 12
    MEAN = 13
    EPOCH = 14
    READY = 16
    TRAINING_ROWS = 38
    PREDICT = 39
    LINK_COUNT_REQUEST = 64
    LINK_COUNT = 65


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(DeclaredMessage):
    """The protocol's version, the federation file's digest, and a signed key of the session.

    To resume: the run's id, and the epochs and steps of a stage that the caller has.
    """

    KIND: ClassVar = RoundKind.HELLO
    WAY: ClassVar = "caller to primary"
    COVERS: ClassVar = {
        "no record": "digest protocol public signature epochs stage_steps run lengths"
    }

    digest: str
    protocol: int = PROTOCOL_VERSION
    public: bytes = wire(length=PUBLIC_BYTES)
    signature: bytes = wire(length=SIGNATURE_BYTES)
    epochs: tuple[int, ...]
    stage_steps: tuple[int, ...]
    run: str = ""
    """Id of the run that the caller resumes; empty for a fresh start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(TypedMessage):
    """All have joined: every caller's signed public key of the session.

    Also the run's id, the primary's row counts for training, validation and test, where the run
    continues, and which secondaries take part.
    """

    KIND: ClassVar = RoundKind.WELCOME
    WAY: ClassVar = "primary to every caller"
    COVERS: ClassVar = {"sizes and times": "facts", "no record": "keys lengths"}

    facts: RunFacts
    keys: Mapping[str, tuple[bytes, bytes]]
    """By caller: its public key and the signature under it."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors = {}
        for name, (public, signature) in self.keys.items():
            tensors[f"public:{name}"] = np.frombuffer(public, dtype=np.uint8)
            tensors[f"signature:{name}"] = np.frombuffer(signature, dtype=np.uint8)
        meta, active = asdict(self.facts), self.facts.active
        meta["active"] = None if active is None else list(active)
        return Message(kind=self.KIND, meta=meta, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, callers: Callable[[RunFacts], Sequence[str]]
    ) -> "Welcome":
        """Read the primary's.

        Args:
            message: What came.
            callers: Returns the names of those that take part, or refuses what the facts say.

        Raises:
            ProtocolError: If a number or a key is missing or impossible.
        """
        given: dict[str, Any] = {
            field.name: message.figure(field.name, bool if field.name == "predicts" else int)
            for field in fields(RunFacts)
            if field.name not in ("run", "active")
        }
        run = message.figure("run", str)
        if not RUN_ID.fullmatch(run):
            raise ProtocolError("the primary's id of the run is not one")
        active = None if message.meta.get("active") is None else message.numbers("active")
        facts = RunFacts(run=run, active=active, **given)
        parts = (facts.train_rows, facts.validation_rows, facts.test_rows)
        others = (facts.unlabelled_rows, facts.resume_epoch, facts.resume_stage)
        least = 0 if facts.predicts else 1
        if (
            min(parts) < least
            or min(others) < 0
            or sum(parts) + facts.unlabelled_rows != facts.rows
            or facts.predicted_rows
            or (facts.predicts and any((facts.rows, *others)))
        ):
            raise ProtocolError("the primary's row counts do not add up")
        names = callers(facts)
        arrays = [f"{part}:{name}" for part in ("public", "signature") for name in names]
        message.require_only(*(field.name for field in fields(RunFacts)), *arrays)
        keys = {
            name: (
                message.raw(f"public:{name}", PUBLIC_BYTES),
                message.raw(f"signature:{name}", SIGNATURE_BYTES),
            )
            for name in names
        }
        return cls(facts=facts, keys=keys)


@dataclass(frozen=True, slots=True)
class Ready(DeclaredMessage):
    """The caller's table and its budget have room for the run."""

    KIND: ClassVar = RoundKind.READY
    WAY: ClassVar = "caller to primary"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, slots=True)
class LinkCountRequest(DeclaredMessage):
    """All secondaries have linked: say how many rows are linked."""

    KIND: ClassVar = RoundKind.LINK_COUNT_REQUEST
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCount(DeclaredMessage):
    """How many of the primary's rows have a record at the sender.

    Where epsilon is promised, behind noise of the sender's own, a part of the run's epsilon.
    """

    KIND: ClassVar = RoundKind.LINK_COUNT
    WAY: ClassVar = "secondary to primary"
    COVERS: ClassVar = {"number of linked rows": "linked", "no record": "lengths"}

    linked: int = wire(least=0, most="rows")
    """Noised number of linked rows, the same in all sessions of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRows(DeclaredMessage):
    """How many of the primary's labelled training rows are linked at every secondary.

    Only with ``training.rows = "aligned"``: training rounds have these rows and no others.
    """

    KIND: ClassVar = RoundKind.TRAINING_ROWS
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"aligned rows": "rows lengths"}

    rows: int = wire(least=1, most="most")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundPlan(DeclaredMessage):
    """Row ids of a round, its active secondaries and its purpose."""

    KIND: ClassVar = RoundKind.PLAN
    WAY: ClassVar = "primary to every active secondary"
    COVERS: ClassVar = {
        "no record": "round_number purpose active",
        "sizes and times": "rows lengths",
    }

    round_number: int
    """Counts from 1 within a session and never repeats, for any purpose."""

    active: tuple[int, ...]
    """Ranks of the secondaries that take part; the others compute nothing (party dropout)."""

    purpose: Purpose
    """Use that the primary makes of the aggregate; every purpose is charged alike."""

    rows: Int64[np.ndarray, " some_rows"] = wire(repr=False)
    """Primary row ids of the batch, shape (B,)."""

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of the aggregate goes back to the active secondaries."""
        return self.purpose == "train"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share(DeclaredMessage):
    """The secondary's masked words; only the sum over all active secondaries can be read."""

    KIND: ClassVar = RoundKind.SHARE
    WAY: ClassVar = "active secondary to primary"
    COVERS: ClassVar = {
        "aggregates": "words",
        "positional-encoding averaging": "words",
        "pretraining, to the primary": "words",
        "pretraining, aggregation of models": "words",
        "no record": "round_number lengths",
    }

    round_number: int
    words: Int64[np.ndarray, " count"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gradient(DeclaredMessage):
    """The gradient of the loss with respect to the aggregate, one for all.

    Labels may be inferred from it.
    """

    KIND: ClassVar = RoundKind.GRADIENT
    WAY: ClassVar = "primary to every active secondary"
    COVERS: ClassVar = {
        "gradients": "gradient",
        "no record": "round_number",
        "sizes and times": "lengths",
    }

    round_number: int
    gradient: Float32[np.ndarray, "*shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageRequest(DeclaredMessage):
    """Send your positional encodings' words."""

    KIND: ClassVar = RoundKind.AVERAGE
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {"no record": "round_number lengths"}

    round_number: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mean(TypedMessage):
    """The mean of all parties' parameters: positional encodings, or local top encoders."""

    KIND: ClassVar = RoundKind.MEAN
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "positional-encoding averaging": "values",
        "pretraining, aggregation of models": "values",
        "no record": "round_number lengths",
    }

    round_number: int
    values: Mapping[str, npt.NDArray[Any]]

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, round_number=self.round_number, tensors=dict(self.values))

    @classmethod
    def from_message(cls, message: Message, *, shapes: Mapping[str, tuple[int, ...]]) -> "Mean":
        """Read the primary's.

        Raises:
            ProtocolError: If a parameter is missing, of another shape, or not finite.
        """
        message.require_only(*shapes)
        values = {
            name: message.tensor(name, dtype=np.float32, shape=shape)
            for name, shape in shapes.items()
        }
        return cls(round_number=message.round_number, values=values)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochMark(DeclaredMessage):
    """An epoch has ended, and whether it was the best; or training has, and the best comes back."""

    KIND: ClassVar = RoundKind.EPOCH
    WAY: ClassVar = "primary to every secondary"
    COVERS: ClassVar = {
        "no record": "epoch",
        "gradients": "best restore_best lengths",
    }

    epoch: int = wire(least=1)
    """Epochs done, from 1."""

    best: bool
    """Keep this epoch's weights as the best ones."""

    restore_best: bool = False
    """Go back to the best weights: training is over and the test rows come next."""


# More rows than any table has.
_MOST_ROWS: Final = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest(DeclaredMessage):
    """A request for predictions of new rows by the saved model.

    Some rows take part in linking alone: those of training, among which a record chose its rows.
    """

    KIND: ClassVar = RoundKind.PREDICT
    WAY: ClassVar = "primary to every caller"
    COVERS: ClassVar = {
        "no record": "run active",
        "sizes and times": "rows predicted_rows lengths",
    }

    run: str
    """The request's own id in all ledgers."""
    rows: int
    """Rows that are linked."""
    predicted_rows: int
    """How many of them, the last ones, are predicted."""
    active: tuple[int, ...]
    """Ranks of the secondaries that answer, ascending."""

    @property
    def facts(self) -> RunFacts:
        """The session's facts for this request."""
        return prediction_facts(
            run=self.run, rows=self.rows, predicted_rows=self.predicted_rows, active=self.active
        )

    @classmethod
    def of(cls, facts: RunFacts, *, active: tuple[int, ...]) -> "PredictRequest":
        """Return the request that announces a session's facts, answered by active secondaries."""
        return cls(
            run=facts.run,
            rows=facts.rows,
            predicted_rows=facts.predicted_rows,
            active=active,
        )

    @classmethod
    def from_message(cls, message: Message, **known: Any) -> "PredictRequest":
        """Read the primary's.

        Raises:
            ProtocolError: If the id is invalid, or the numbers are impossible.
        """
        read = super(PredictRequest, cls).from_message(message, **known)
        if not RUN_ID.fullmatch(read.run):
            raise ProtocolError("the primary's id of a request is invalid")
        rows, predicted = read.rows, read.predicted_rows
        if not 1 <= predicted <= rows <= _MOST_ROWS:
            raise ProtocolError(f"the primary asks for {predicted} predictions of {rows} rows")
        return read
