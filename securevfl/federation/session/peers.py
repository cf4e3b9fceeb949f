"""How a stage reaches its parties: written once, for one process and for the star.

The primary's side of a stage calls :class:`Peers`. A secondary's side is a table of handlers, one
for each message type that it takes; its validator refuses what is not due, wherever it runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Int64
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import Mean
from securevfl.mpc.sum_to import InProcessSum, decode_mean, encode_weighted
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage

# A secondary's side of a stage: handlers, and how they answer.

M = TypeVar("M", bound=DeclaredMessage)
Words = Int64[Tensor, " words"]


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


@dataclass(frozen=True)
class Handler:
    """A secondary's action on one message type."""

    handle: Callable[[Any, Reply], bool | None]
    """Validates the message and acts on it; returns True where the stage ends."""

    known: Callable[[], Mapping[str, Any]] = dict
    """Lengths and shapes that a received message is checked against."""

    then: type[TypedMessage] | None = None
    """The only message type that may follow, in the same round; it comes at no other time."""


Handlers = Mapping[type[TypedMessage], Handler]


class HandlerTable:
    """A secondary's handlers in one stage, and which message may come next."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers: dict[Any, Handler] = dict(handlers)
        following = {one.then for one in handlers.values()}
        self._first = tuple(one for one in self._handlers if one not in following)
        self._due: tuple[Any, ...] = self._first
        self.round_number: int | None = None
        """The round of a message that must follow; None where any may come."""

    @property
    def kinds(self) -> tuple[MessageKind, ...]:
        """Kinds of the messages that may come next."""
        return tuple(one.KIND for one in self._due)

    def read(self, message: Message) -> TypedMessage:
        """Return a received message of one of the :attr:`kinds`, checked.

        Raises:
            ProtocolError: If it is not what its type says.
        """
        kind = next((one for one in self._due if one.KIND is message.kind), None)
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
        handler = self._handlers[type(message)]
        ended = handler.handle(message, reply)
        self._due = self._first if handler.then is None else (handler.then,)
        self.round_number = None if handler.then is None else number
        return bool(ended)

    def _not_due(self, kind: MessageKind, number: int) -> ProtocolError:
        due = " or ".join(one.name for one in self.kinds)
        return ProtocolError(f"{kind.name} of round {number} where {due} was due")


# The primary's side of a stage: all secondaries, in this process or over the star.


@runtime_checkable
class Peers(Protocol):
    """All secondaries of a run, as the primary reaches them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        ...

    def tell(self, message: TypedMessage) -> None:
        """Send a message to every secondary.

        Reveals:
            To every secondary: the message.
        """
        ...

    def ask(self, message: TypedMessage, answer: type[M], **known: Any) -> list[M]:
        """Send a message to every secondary, and return their answers by rank.

        Args:
            message: What is sent.
            answer: The answers' type.
            known: Lengths and shapes that answers are checked against.

        Reveals:
            To every secondary: the message. To the primary: the answers.
        """
        ...

    def total(self, message: TypedMessage, own: Words, *, round_number: int) -> Words:
        """Send a message to every secondary, and return the sum of all parties' words.

        Args:
            message: What is sent.
            own: The primary's words, which may not be used again.
            round_number: A new round.

        Reveals:
            To every secondary: the message. To the primary: the total alone.
        """
        ...


class PeersHere:
    """Secondaries of this process: the same handlers, no wire, no cryptography."""

    def __init__(self, secondaries: Mapping[int, Handlers]) -> None:
        """Take the secondaries' handlers by rank."""
        self._secondaries = {rank: HandlerTable(one) for rank, one in secondaries.items()}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._secondaries)

    def tell(self, message: TypedMessage) -> None:
        """Let every secondary handle a message.

        Reveals:
            What :meth:`Peers.tell` reveals; here all is in one process.
        """
        self._handled(message)

    def ask(self, message: TypedMessage, answer: type[M], **_known: Any) -> list[M]:
        """Let every secondary handle a message, and return their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        answers = [one for reply in self._handled(message) for one in reply.messages]
        assert all(type(one) is answer for one in answers), "handlers answer with one type"
        assert len(answers) == len(self._secondaries), "every secondary answers once"
        return answers

    def total(
        self,
        message: TypedMessage,
        own: Words,
        *,
        round_number: int,  # noqa: ARG002 - Peers
    ) -> Words:
        """Let every secondary handle a message, and add up their words.

        Reveals:
            What :meth:`Peers.total` reveals.
        """
        theirs = [one for reply in self._handled(message) for one in reply.words]
        return InProcessSum()([own, *theirs])

    def _handled(self, message: TypedMessage) -> "list[ReplyHere]":
        replies = [ReplyHere() for _ in self._secondaries]
        for table, reply in zip(self._secondaries.values(), replies, strict=True):
            table.handle(message, reply)
        return replies


class ReplyHere:
    """Collects the answers to a message of the same process."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.words: list[Words] = []

    def send(self, message: TypedMessage) -> None:
        """Take a message.

        Reveals:
            Nothing leaves the process.
        """
        self.messages.append(message)

    def prepare(self, count: int, *, round_number: int) -> None:
        """Do nothing: there are no masks.

        Reveals:
            Nothing.
        """

    def add(self, words: Words, *, round_number: int) -> None:  # noqa: ARG002 - a Reply
        """Take words.

        Reveals:
            Nothing leaves the process.
        """
        self.words.append(words)


# The mean of all parties' weights, of which every party learns the mean alone.


def average_weights(
    peers: Peers, request: TypedMessage, own: Mapping[str, Tensor], *, weight: float, number: int
) -> dict[str, Tensor]:
    """Return the weighted mean of all parties' weights, and send it to every secondary.

    Args:
        peers: The secondaries, which answer the request with words of theirs.
        request: Asks for their weights.
        own: The primary's, by name.
        weight: Of the primary's in the mean.
        number: A new round.

    Reveals:
        To every party: the mean. To the primary: also the sum of the weights. Of two parties, each
        learns the other's from the mean.
    """
    if not peers.ranks:
        # Exact, where words of the ring would round.
        return dict(own)
    words = encode_weighted(own, weight=weight, parties=len(peers.ranks) + 1)
    total = peers.total(request, words, round_number=number)
    mean = decode_mean(total, {name: own[name].shape for name in own})
    values = {name: value.cpu().numpy() for name, value in mean.items()}
    peers.tell(Mean(round_number=number, values=values))
    return mean


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by which a :class:`Mean` of them is checked."""
    return {name: tuple(value.shape) for name, value in weights.items()}
