"""A secondary's side of a stage: handlers of messages, and how they answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from securevfl.core.errors import ProtocolError
from securevfl.mpc.sum_to import Words
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage

M = TypeVar("M", bound=DeclaredMessage)


@runtime_checkable
class Reply(Protocol):
    """Answers the primary's message."""

    def send(self, message: TypedMessage) -> None:
        """Send a message back.

        Reveals:
            To the primary: the message.
        """
        ...

    def prepare(self, count: int, *, round_number: int) -> None:
        """Prepare the masks of so many words, while the model computes them.

        Reveals:
            Nothing.
        """
        ...

    def add(self, words: Words, *, round_number: int) -> None:
        """Add words to a sum; the primary learns the total alone.

        Reveals:
            To the primary: the total of all secondaries.
        """
        ...


class StageEnd:
    """What a handler returns where the stage ends with the message."""


Next = type[TypedMessage] | type[StageEnd] | None
"""Result of a handler: the only type that may follow, in the same round; or that the stage ends;
or None, where any may come that starts something."""


@dataclass(frozen=True)
class Handler:
    """A secondary's action on one message type."""

    handle: Callable[[Any, Reply], Next]
    """Validates the message and acts on it."""

    known: Callable[[], Mapping[str, Any]] = dict
    """Lengths and shapes that a received message is checked against."""

    follows: bool = False
    """True if the message comes where another one's handler asks for it, and at no other time."""


Handlers = Mapping[type[TypedMessage], Handler]


class HandlerTable:
    """A secondary's handlers in one stage, and which message may come next."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers: dict[Any, Handler] = dict(handlers)
        self._first = tuple(
            message_type for message_type, how in self._handlers.items() if not how.follows
        )
        self._due: tuple[Any, ...] = self._first
        self.round_number: int | None = None
        """The round of a message that must follow; None where any may come."""

    @property
    def kinds(self) -> tuple[MessageKind, ...]:
        """Kinds of the messages that may come next."""
        return tuple(message_type.KIND for message_type in self._due)

    def read(self, message: Message) -> TypedMessage:
        """Return a received message of one of the :attr:`kinds`, checked.

        Raises:
            ProtocolError: If it is not what its type says.
        """
        kind = next(
            (message_type for message_type in self._due if message_type.KIND is message.kind), None
        )
        if kind is None:
            raise self._not_due(message.kind, message.round_number)
        read: TypedMessage = kind.from_message(message, **self._handlers[kind].known())
        return read

    def handle(self, message: TypedMessage, reply: Reply) -> bool:
        """Handle a message, and return whether the stage ends with it.

        Raises:
            ProtocolError: If it is not due.

        Reveals:
            To the primary: what the handler answers.
        """
        number = getattr(message, "round_number", 0)
        if type(message) not in self._due or self.round_number not in (None, number):
            raise self._not_due(message.KIND, number)
        after = self._handlers[type(message)].handle(message, reply)
        follows = None if after is StageEnd else after
        self._due = self._first if follows is None else (follows,)
        self.round_number = None if follows is None else number
        return after is StageEnd

    def _not_due(self, kind: MessageKind, number: int) -> ProtocolError:
        due = " or ".join(message_kind.name for message_kind in self.kinds)
        return ProtocolError(f"{kind.name} of round {number} where {due} was due")
