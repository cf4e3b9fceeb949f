"""Typed messages between parties: a kind, a round number, a few figures and named arrays.

A message can hold nothing but JSON figures and arrays of six number types. It is never an
object: nothing that arrives is ever executed, imported or unpickled.
"""

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import ProtocolError

# The position of a type in this tuple is its code on the wire: append, never reorder.
DTYPES: Final = tuple(np.dtype(name) for name in ("<i8", "<i4", "u1", "<f4", "<f8", "?"))


class MessageKind(enum.IntEnum):
    """What a message is for: each package that speaks has kinds of its own, under one numbering.

    A code is a message's number on the wire. It belongs to one kind for ever.
    """

    def __init_subclass__(cls) -> None:
        """Take the kinds of a package in.

        Raises:
            ValueError: If a code is another kind's already.
        """
        for kind in cls:
            other = _KINDS.setdefault(kind.value, kind)
            if other is not kind:
                raise ValueError(f"{kind!r}: its code is that of {other!r}")


_KINDS: dict[int, MessageKind] = {}


def kind_of(code: int) -> MessageKind:
    """Return the kind that has a code.

    Raises:
        ValueError: If there is none, or none in this process.
    """
    try:
        return _KINDS[code]
    except KeyError:
        raise ValueError(f"there is no message of kind {code}") from None


class StarKind(MessageKind):
    """What the star itself says, whatever it is for."""

    SESSION = 1
    PING = 2
    ABORT = 3
    LEAVE = 4
    DONE = 15
    SEALED = 20


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Message:
    """One message. The arrays of a received message are the receiver's own, and writable."""

    kind: MessageKind
    """What it is for."""

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
        """Sizes only: what is inside is nobody's business in a log."""
        shapes = ", ".join(
            f"{name} {array.dtype}{list(array.shape)}" for name, array in self.tensors.items()
        )
        origin = f" from {self.sender}" if self.sender else ""
        return f"<{self.kind.name} round {self.round_number}{origin}: {shapes or 'no arrays'}>"

    def digest(self) -> bytes:
        """Return the SHA-256 of its kind, round, figures and arrays; not of who sent it."""
        arrays = sorted(self.tensors.items())
        shapes = [(name, array.dtype.str, array.shape) for name, array in arrays]
        figures = json.dumps(dict(self.meta), allow_nan=False, sort_keys=True)
        head = repr((self.kind.value, self.round_number, figures, shapes))
        made = hashlib.sha256(head.encode())
        for _, array in arrays:
            made.update(np.ascontiguousarray(array).data)
        return made.digest()

    def tensor(
        self,
        name: str,
        *,
        dtype: npt.DTypeLike,
        shape: tuple[int | None, ...],
        finite: bool = True,
    ) -> npt.NDArray[Any]:
        """Return the array ``name`` if it is exactly what was agreed on.

        Args:
            name: Which array.
            dtype: Its type.
            shape: Its shape; None stands for any length.
            finite: Whether NaN and infinity are refused.

        Raises:
            ProtocolError: Naming the sender, what was wanted and what came.
        """
        wanted = np.dtype(dtype)
        found = self.tensors.get(name)
        place = f"{self.sender or 'sender'}: {self.kind.name} of round {self.round_number}"
        if found is None:
            there = repr(sorted(self.tensors))
            raise ProtocolError(f"{place}: has no array {name!r}, only {there:.200}")
        if found.dtype != wanted:
            raise ProtocolError(f"{place}: {name} must be {wanted}, got {found.dtype}")
        fits = len(shape) == found.ndim and all(
            want is None or want == length for want, length in zip(shape, found.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if length is None else str(length) for length in shape)
            raise ProtocolError(
                f"{place}: {name} must have shape [{sizes}], got {list(found.shape)}"
            )
        if finite and wanted.kind == "f" and not np.isfinite(found).all():
            raise ProtocolError(f"{place}: {name} holds a value that is NaN or infinite")
        return found

    def figure(self, name: str, kind: type[Any]) -> Any:
        """Return the figure ``name`` of :attr:`meta` if it is of the type ``kind``.

        Raises:
            ProtocolError: Naming the sender, what was wanted and what came.
        """
        place = f"{self.sender or 'sender'}: {self.kind.name} of round {self.round_number}"
        value = self.meta.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ProtocolError(f"{place}: {name} must be {kind.__name__}, got {value!r:.80}")
        return value


class TypedMessage:
    """Base of the dataclasses that are messages to those who send and read them.

    A subclass names its kind and its way, and its docstring says what it tells: the table of who
    tells what to whom in ``docs/threat-model.md`` is made of these. It may add ``to_message``,
    where it holds anything, and ``from_message``, which checks all that a reader relies on.
    """

    __slots__ = ()

    KIND: ClassVar[MessageKind]
    """What it is for."""

    WAY: ClassVar[str]
    """Who tells whom, for example ``"primary to every secondary"``."""

    def to_message(self) -> Message:
        """Return it as it is sent; this one holds nothing but its kind."""
        return Message(kind=self.KIND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStart(TypedMessage):
    """The first frame of a connection: the session's id, and which rank the caller has. Public."""

    KIND: ClassVar = StarKind.SESSION
    WAY: ClassVar = "primary to a caller"

    rank: int

    def to_message(self) -> Message:
        """Return it as it is sent; the session's id is in every frame's head."""
        return Message(kind=self.KIND, meta={"rank": self.rank})


@dataclass(frozen=True, slots=True)
class Ping(TypedMessage):
    """The sender is alive, and whether it has no room for more until its own work is done.

    Its input and output thread says so.
    """

    KIND: ClassVar = StarKind.PING
    WAY: ClassVar = "either way"

    full: bool = False

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"full": True} if self.full else {})

    @classmethod
    def from_message(cls, message: Message) -> "Ping":
        """Read a peer's.

        Raises:
            ProtocolError: If it is malformed.
        """
        return cls(full="full" in message.meta and message.figure("full", bool))


@dataclass(frozen=True, slots=True)
class Leave(TypedMessage):
    """The sender is done; the connection closes after it. Tells nothing else."""

    KIND: ClassVar = StarKind.LEAVE
    WAY: ClassVar = "either way"


@dataclass(frozen=True, slots=True)
class Done(TypedMessage):
    """The run, or the linkage, is over. Tells nothing else."""

    KIND: ClassVar = StarKind.DONE
    WAY: ClassVar = "primary to every caller"
