"""Messages between parties: a kind, a round number, a few figures and named arrays.

A message holds only JSON figures and arrays of six number types, and no objects: nothing received
is ever executed, imported or unpickled.
"""

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from securevfl.core import errors, interrupts

# The position of a type in this tuple is its code on the wire: append, never reorder.
DTYPES: Final = tuple(np.dtype(name) for name in ("<i8", "<i4", "u1", "<f4", "<f8", "?"))


class MessageKind(enum.IntEnum):
    """Base of the kinds of messages; each package has its own kinds, with codes unique in all.

    A code is a message's number on the wire, and never changes its kind.
    """

    def __init_subclass__(cls) -> None:
        """Register a package's kinds.

        Raises:
            ValueError: If a code already belongs to another kind.
        """
        for kind in cls:
            other = _KINDS.setdefault(kind.value, kind)
            if other is not kind:
                raise ValueError(f"{kind!r}: its code is that of {other!r}")


_KINDS: dict[int, MessageKind] = {}


def kind_of(code: int) -> MessageKind:
    """Return the kind with a code.

    Raises:
        ValueError: If no kind that this process has loaded has it.
    """
    try:
        return _KINDS[code]
    except KeyError:
        raise ValueError(f"there is no message of kind {code}") from None


class StarKind(MessageKind):
    """Messages of the star itself, in every session."""

    SESSION = 1
    PING = 2
    ABORT = 3
    LEAVE = 4
    DONE = 15
    SEALED = 20


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Message:
    """A message as it is sent.

    The arrays of a received message are the receiver's own, and writable.
    """

    kind: MessageKind
    """Purpose of the message."""

    round_number: int = 0
    """The round that it belongs to; 0 outside of rounds."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """A few figures and words, as JSON knows them."""

    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays by name; int64, int32, uint8, float32, float64 or bool."""

    sender: str = ""
    """The party that it came from; set by the transport when it is received."""

    held_bytes: int = 0
    """Memory that it takes, at most; set by the transport when it is received."""

    def __repr__(self) -> str:
        """Return sizes only, so that no log shows contents."""
        shapes = ", ".join(
            f"{name} {array.dtype}{list(array.shape)}" for name, array in self.tensors.items()
        )
        origin = f" from {self.sender}" if self.sender else ""
        return f"<{self.kind.name} round {self.round_number}{origin}: {shapes or 'no arrays'}>"

    def digest(self) -> bytes:
        """Return the SHA-256 of its kind, round, figures and arrays, without its sender."""
        arrays = sorted(self.tensors.items())
        shapes = [(name, array.dtype.str, array.shape) for name, array in arrays]
        figures = json.dumps(dict(self.meta), allow_nan=False, sort_keys=True)
        head = repr((self.kind.value, self.round_number, figures, shapes))
        made = hashlib.sha256(head.encode())
        for _, array in arrays:
            made.update(np.ascontiguousarray(array).data)
        return made.digest()

    @property
    def place(self) -> str:
        """Sender, kind and round, for errors."""
        return f"{self.sender or 'sender'}: {self.kind.name} of round {self.round_number}"

    def tensor(
        self,
        name: str,
        *,
        dtype: npt.DTypeLike,
        shape: tuple[int | None, ...],
        finite: bool = True,
    ) -> npt.NDArray[Any]:
        """Return the array ``name`` after checking its type, shape and values.

        Args:
            name: The array's name.
            dtype: Its type.
            shape: Its shape; None stands for any length.
            finite: Whether NaN and infinity are refused.

        Raises:
            ProtocolError: Naming the sender, the expected and the received value.
        """
        wanted = np.dtype(dtype)
        tensor, place = self.tensors.get(name), self.place
        if tensor is None:
            there = repr(sorted(self.tensors))
            raise errors.ProtocolError(f"{place}: has no array {name!r}, only {there:.200}")
        if tensor.dtype != wanted:
            raise errors.ProtocolError(f"{place}: {name} must be {wanted}, got {tensor.dtype}")
        fits = len(shape) == tensor.ndim and all(
            want is None or want == length for want, length in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if length is None else str(length) for length in shape)
            raise errors.ProtocolError(
                f"{place}: {name} must have shape [{sizes}], got {list(tensor.shape)}"
            )
        if finite and wanted.kind == "f" and not np.isfinite(tensor).all():
            raise errors.ProtocolError(f"{place}: {name} holds a value that is NaN or infinite")
        return tensor

    def raw(self, name: str, length: int) -> bytes:
        """Return the array ``name`` of so many bytes; see :meth:`tensor`."""
        return self.tensor(name, dtype=np.uint8, shape=(length,)).tobytes()

    def figure(self, name: str, kind: type[Any]) -> Any:
        """Return the figure ``name`` of :attr:`meta` after checking its type.

        Raises:
            ProtocolError: Naming the sender, the expected and the received value.
        """
        value = self.meta.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise errors.ProtocolError(
                f"{self.place}: {name} must be {kind.__name__}, got {value!r:.80}"
            )
        return value

    def require_only(self, *names: str) -> None:
        """Refuse figures and arrays with other names, and a figure and an array of one name.

        Raises:
            ProtocolError: Naming the sender and the name.
        """
        figures, arrays = self.meta.keys(), self.tensors.keys()
        if foreign := (figures | arrays) - set(names) | figures & arrays:
            raise errors.ProtocolError(
                f"{self.place}: has {min(foreign)!r:.80}, which is none of its fields"
            )

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the figure ``name`` of :attr:`meta`, which must be a list of whole numbers.

        Raises:
            ProtocolError: Naming the sender, the expected and the received value.
        """
        value = self.figure(name, list)
        if not all(type(number) is int for number in value):
            raise errors.ProtocolError(
                f"{self.place}: {name} must be whole numbers, got {value!r:.80}"
            )
        return tuple(value)


Cover = Literal[
    "no record",
    "masks",
    "aggregates",
    "gradients",
    "positional-encoding averaging",
    "linkage",
    "number of linked rows",
    "record counts",
    "records near rows",
    "kept links",
    "aligned rows",
    "similarities",
    "scaling statistics",
    "sizes and times",
    "failures",
    "ledgers",
    "programs",
    "publication of the model",
    "pretraining, to the primary",
    "pretraining, from the primary",
    "pretraining, aggregation of models",
    "fitting of encoders",
    "labels that class means are fitted to",
]
"""Cover of a message's field. ``"no record"``: it depends on no record and no label. ``"masks"``:
it is uniform to its receiver. Each other one is a channel of :mod:`securevfl.config.disclosure`,
which names its protection in a run, or that it has none."""


class TypedMessage:
    """Base of the dataclasses of messages.

    A subclass names its kind, its sender and receiver, and the cover of each field, and its
    docstring describes its content: ``docs/messages.md`` is generated from these. A subclass with
    content adds ``to_message``, and ``from_message``, which checks everything that a reader relies
    on.
    """

    __slots__ = ()

    KIND: ClassVar[MessageKind]
    """Purpose of the message."""

    WAY: ClassVar[str]
    """Sender and receiver, for example ``"primary to every secondary"``."""

    COVERS: ClassVar[Mapping[Cover, str]]
    """Names of fields by their cover. The name ``lengths`` stands for the fact, number and sizes of
    messages."""

    def __init_subclass__(cls) -> None:
        """Record whether messages of this kind hold anything."""
        # A dataclass with slots is created a second time, with its fields.
        made: Any = cls
        if dataclasses.is_dataclass(made):
            _HOLDS[cls.KIND] = _HOLDS.get(cls.KIND, False) or bool(dataclasses.fields(made))

    def to_message(self) -> Message:
        """Return the message as it is sent; without content, its kind alone."""
        return Message(kind=self.KIND)


_HOLDS: dict[MessageKind, bool] = {}


def require_empty(message: Message) -> None:
    """Refuse content in a message of a kind without content.

    Raises:
        ProtocolError: Naming the sender.
    """
    if not _HOLDS.get(message.kind, True):
        message.require_only()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wire:
    """Rules of a field's form on the wire, see :func:`wire`."""

    name: str = ""
    below: str = ""
    among: str = ""
    least: float | None = None
    most: float | str | None = None
    length: int = 0
    gaps: bool = False


def wire(*, repr: bool = True, **rules: Any) -> Any:  # noqa: A002 -- the name that dataclasses use
    """Declare rules of a field of a :class:`DeclaredMessage` that its type cannot express.

    Args:
        repr: Whether the field is part of the message's ``repr``.
        rules: ``name``, the field's name on the wire; ``least`` and ``most``, bounds of a figure,
            where ``most`` may be the name of a number that the reader passes; ``among``, the name
            of the collection, passed by the reader, that a figure must be in; ``below``, the name
            of the exclusive upper bound of an array's numbers, whose lower bound is 0; ``length``,
            the number of bytes; ``gaps``, whether an array of floats may hold NaN.
    """
    return field(repr=repr, metadata={"wire": _Wire(**rules)})


M = TypeVar("M", bound="DeclaredMessage")


class DeclaredMessage(TypedMessage):
    """Base of messages whose typed fields define their format, with a common reader and checks.

    Figures are fields of type int, float, bool, str, ``Literal`` or ``tuple[int, ...]``; arrays are
    bytes or jaxtyping arrays. The length of an axis is passed by the reader under the axis's name,
    or known from an earlier field, or the axis is a number. An axis ``some_...`` may have any
    length above zero, an axis ``_...`` any length. ``round_number`` is the message's.
    """

    __slots__ = ()

    def to_message(self) -> Message:
        """Return the message as it is sent."""
        figures: dict[str, Any] = {}
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, _, rule in _declared_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, bytes):
                arrays[rule.name or name] = np.frombuffer(value, dtype=np.uint8)
            elif isinstance(value, np.ndarray):
                words = value.dtype == np.uint64
                arrays[rule.name or name] = value.view(np.int64) if words else value
            elif name != "round_number":
                figures[rule.name or name] = list(value) if isinstance(value, tuple) else value
        number: int = getattr(self, "round_number", 0)
        return Message(kind=self.KIND, round_number=number, meta=figures, tensors=arrays)

    @classmethod
    def from_message(cls: type[M], message: Message, **known: Any) -> M:
        """Read a received message, and check everything that its fields declare.

        Args:
            message: The received message.
            known: Lengths of axes, and values that rules refer to.

        Raises:
            ProtocolError: Naming the sender, the expected and the received value.
        """
        fields, sizes = _declared_fields(cls), dict(known)
        own = (rule.name or name for name, _, rule in fields if name != "round_number")
        message.require_only(*own)
        values = {
            name: message.round_number
            if name == "round_number"
            else _read(message, rule.name or name, kind, rule, sizes)
            for name, kind, rule in fields
        }
        return cls(**values)


def _declared_fields(cls: type[Any]) -> tuple[tuple[str, Any, _Wire], ...]:
    """Return the name, type and rules of each field."""
    if cls not in _DECLARED:
        hints = get_type_hints(cls)
        _DECLARED[cls] = tuple(
            (data_field.name, hints[data_field.name], data_field.metadata.get("wire", _Wire()))
            for data_field in dataclasses.fields(cls)
        )
    return _DECLARED[cls]


_DECLARED: dict[type[Any], tuple[tuple[str, Any, _Wire], ...]] = {}


def _read(message: Message, name: str, kind: Any, rule: _Wire, sizes: dict[str, Any]) -> Any:
    """Return one field of a received message, and add the lengths of its axes to ``sizes``."""
    place = message.place
    if kind is bytes:
        return message.raw(name, rule.length)
    if hasattr(kind, "dim_str"):
        return _read_array(message, name, kind, rule, sizes)
    if get_origin(kind) is tuple:
        return message.numbers(name)
    if get_origin(kind) is Literal:
        value = message.figure(name, str)
        if value not in get_args(kind):
            raise errors.ProtocolError(
                f"{place}: {name} must be one of {', '.join(get_args(kind))}, got {value!r:.80}"
            )
        return value
    value = message.figure(name, kind)
    most = sizes[rule.most] if isinstance(rule.most, str) else rule.most
    if kind is float and not math.isfinite(value):
        raise errors.ProtocolError(f"{place}: {name} must be finite, got {value}")
    if (rule.least is not None and value < rule.least) or (most is not None and value > most):
        bounds = " and ".join(
            f"{word} {bound}"
            for word, bound in (("at least", rule.least), ("at most", most))
            if bound is not None
        )
        raise errors.ProtocolError(f"{place}: {name} must be {bounds}, got {value}")
    if rule.among and value not in sizes[rule.among]:
        raise errors.ProtocolError(f"{place}: {name} = {value!r:.80} is not due")
    return value


def _read_array(
    message: Message, name: str, kind: Any, rule: _Wire, sizes: dict[str, Any]
) -> npt.NDArray[Any]:
    shape: list[int | None] = []
    axes, place = kind.dim_str.split(), message.place
    for axis in axes:
        if axis.startswith("*"):
            shape += sizes[axis[1:]]
        elif axis.isdigit():
            shape.append(int(axis))
        else:
            # An unknown length is a mistake of the program, and raises KeyError.
            free = axis not in sizes and axis.startswith(("_", "some_"))
            shape.append(None if free else sizes[axis])
    words = kind.dtypes[0] == "uint64"
    dtype = "int64" if words else kind.dtypes[0]
    array = message.tensor(name, dtype=dtype, shape=tuple(shape), finite=not rule.gaps)
    if rule.gaps and np.isinf(array).any():
        raise errors.ProtocolError(f"{place}: {name} holds a value that is infinite")
    for axis, length in zip(axes, array.shape, strict=False):
        if axis.startswith("some_") and not length:
            raise errors.ProtocolError(f"{place}: {name} must not be empty")
        sizes[axis] = length
    if rule.below and array.size and not 0 <= array.min() <= array.max() < sizes[rule.below]:
        raise errors.ProtocolError(
            f"{place}: {name} must lie in 0 to {sizes[rule.below] - 1}, got {array.min()} to "
            f"{array.max()}"
        )
    return array.view(np.uint64) if words else array


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStart(DeclaredMessage):
    """The first frame of a connection: the session's id and the caller's rank. Public."""

    KIND: ClassVar = StarKind.SESSION
    WAY: ClassVar = "primary to a caller"
    COVERS: ClassVar = {"no record": "rank lengths"}

    rank: int


@dataclass(frozen=True, slots=True)
class Ping(TypedMessage):
    """Heartbeat: the sender is alive; ``full`` if it has no room for messages for now.

    The sender's socket thread sends it.
    """

    KIND: ClassVar = StarKind.PING
    WAY: ClassVar = "either way"
    COVERS: ClassVar = {"sizes and times": "full lengths"}

    full: bool = False

    def to_message(self) -> Message:
        """Return the message as it is sent."""
        return Message(kind=self.KIND, meta={"full": True} if self.full else {})

    @classmethod
    def from_message(cls, message: Message) -> "Ping":
        """Read a peer's heartbeat.

        Raises:
            ProtocolError: If it is malformed.
        """
        message.require_only("full")
        return cls(full="full" in message.meta and message.figure("full", bool))


@dataclass(frozen=True, slots=True)
class Leave(TypedMessage):
    """The sender is done; the connection is closed after it."""

    KIND: ClassVar = StarKind.LEAVE
    WAY: ClassVar = "either way"
    COVERS: ClassVar = {"no record": "lengths"}


@dataclass(frozen=True, slots=True)
class Done(DeclaredMessage):
    """The run, or the linkage, is over."""

    KIND: ClassVar = StarKind.DONE
    WAY: ClassVar = "primary to every caller"
    COVERS: ClassVar = {"no record": "lengths"}


FailureKind = Literal["failed", "lost", "twice", "timeout", "absent", "protocol", "authentication"]

_ERRORS: Final[dict[FailureKind, type[errors.ProtocolError]]] = {
    "failed": errors.PartyFailedError,
    "lost": errors.PartyLostError,
    "twice": errors.PartyTwiceError,
    "timeout": errors.PartyTimeoutError,
    "absent": errors.PartyAbsentError,
    "protocol": errors.ProtocolError,
    "authentication": errors.AuthenticationError,
}
# A reason is one sentence; what is longer is cut.
_MAX_REASON: Final = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(TypedMessage):
    """The party that failed and the reason, sent to every party. Never holds data."""

    KIND: ClassVar = StarKind.ABORT
    WAY: ClassVar = "either way; the primary passes it on"
    COVERS: ClassVar = {"failures": "party reason kind lengths"}

    party: str
    """The party where it began."""

    reason: str
    """One sentence without private data: every party reads it."""

    kind: FailureKind = "failed"
    """Kind of error that the waits of every party raise."""

    def error(self) -> errors.ProtocolError:
        """Return an exception that names the party and the reason."""
        error = _ERRORS[self.kind](f"{self.party}: {self.reason}")
        error.party = self.party
        return error

    def to_message(self) -> Message:
        """Return the message for a peer.

        Reveals:
            To the receiver: the party's name, the kind of failure and the reason.
        """
        meta = {"party": self.party, "reason": self.reason[:_MAX_REASON], "kind": self.kind}
        return Message(kind=self.KIND, meta=meta)

    @classmethod
    def from_message(cls, message: Message, *, relayed: bool) -> "Failure":
        """Read a received failure.

        Args:
            message: The received message.
            relayed: Whether the sender may report others' failures, which only the primary may; a
                secondary's report of another party counts as the secondary's failure.
        """
        message.require_only("party", "reason", "kind")
        party, reason = message.figure("party", str), message.figure("reason", str)
        if not relayed:
            reason = reason if party == message.sender else f"it reports of {party}: {reason}"
            party = message.sender
        reason = errors.printable_text(reason, _MAX_REASON)
        kind = message.figure("kind", str)
        return cls(
            party=errors.printable_text(party, _MAX_REASON),
            reason=reason,
            kind=kind if kind in get_args(FailureKind) else "failed",
        )


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of failure that an error of this party is for the others.

    A party that its operator interrupted, or that lacked disk or memory, can be started again.
    """
    error = interrupts.behind(error)
    known = errors.of_this_machine(error) or error
    mendable = isinstance(known, KeyboardInterrupt | errors.StorageError | errors.OutOfMemoryError)
    return "lost" if mendable else "failed"


def public_reason(error: BaseException) -> str:
    """Return the text about an error of this party that other organisations may read.

    An unexpected error's text may quote a table, so only its class is named.
    """
    error = interrupts.behind(error)
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted by its operator"
    known = error if isinstance(error, errors.SecureVflError) else errors.of_this_machine(error)
    if known is not None:
        return known.for_others()
    return f"stopped by an unexpected {type(error).__name__} (its own log says more)"
