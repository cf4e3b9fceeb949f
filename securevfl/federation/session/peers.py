"""How a stage reaches its parties: written once, for one process and for the star.

The primary's side of a stage calls :class:`Peers`. A secondary's side is a table of handlers, one
for each message type that it takes; its validator refuses what is not due, wherever it runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from securevfl.core.devices import to_device
from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import Mean
from securevfl.mpc.codec import InProcessSum, Words, decode_mean, encode_weighted
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

    to_all: bool = True
    """True if all secondaries of a session get the message, so that their masks depend on it."""


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

    def is_to_all(self, message: TypedMessage) -> bool:
        """Return whether all secondaries of the session, or of the round, get a message."""
        return self._handlers[type(message)].to_all

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


class Peers(ABC):
    """All secondaries of a run, as the primary reaches them."""

    ahead: int
    """How many rounds may be under way at once, where none depends on another."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""

    def name(self, rank: int) -> str:
        """Return what errors call a secondary."""
        return f"secondary {rank}"

    @property
    def traffic(self) -> int:
        """Bytes that the primary has sent and received so far."""
        return 0

    @abstractmethod
    def tell(self, message: TypedMessage, ranks: Sequence[int] | None = None) -> None:
        """Send a message to every secondary, or to some.

        Reveals:
            To every one of them: the message.
        """

    @abstractmethod
    def ask(
        self,
        message: TypedMessage,
        answer: type[M],
        ranks: Sequence[int] | None = None,
        **known: Any,
    ) -> list[M]:
        """Send a message to every secondary, or to some, and return their answers by rank.

        Args:
            message: What is sent.
            answer: The answers' type.
            ranks: Who gets it; None: every secondary.
            known: Lengths and shapes that answers are checked against.

        Reveals:
            To every one of them: the message. To the primary: the answers.
        """

    @abstractmethod
    def add_up(self, own: Words, ranks: Sequence[int], *, round_number: int) -> Words:
        """Return the sum of the words that secondaries answer with to an earlier message.

        Args:
            own: The primary's words, which may not be used again.
            ranks: Who answers.
            round_number: That of the message.

        Reveals:
            To the primary: the total alone.
        """

    def total(self, message: TypedMessage, own: Words, *, round_number: int) -> Words:
        """Send a message to every secondary, and return the sum of all parties' words.

        Args:
            message: What is sent.
            own: The primary's words, which may not be used again.
            round_number: A new round.

        Reveals:
            To every secondary: the message. To the primary: the total alone.
        """
        self.tell(message)
        return self.add_up(own, self.ranks, round_number=round_number)


class PeersHere(Peers):
    """Secondaries of this process: the same handlers, no wire, no cryptography."""

    ahead = 1

    def __init__(self, secondaries: Mapping[int, Handlers]) -> None:
        """Take the secondaries' handlers by rank."""
        self._secondaries = {rank: HandlerTable(handlers) for rank, handlers in secondaries.items()}
        self._answers: list[Any] = []
        """Messages that answered the last one."""
        self._words: dict[int, list[Words]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._secondaries)

    def tell(self, message: TypedMessage, ranks: Sequence[int] | None = None) -> None:
        """Let secondaries handle a message.

        Reveals:
            What :meth:`Peers.tell` reveals; here all is in one process.
        """
        reply = ReplyHere()
        for rank in self.ranks if ranks is None else ranks:
            self._secondaries[rank].handle(message, reply)
        self._answers = reply.messages
        if reply.words:
            self._words[getattr(message, "round_number", 0)] = reply.words

    def ask(
        self,
        message: TypedMessage,
        answer: type[M],
        ranks: Sequence[int] | None = None,
        **_known: Any,
    ) -> list[M]:
        """Let secondaries handle a message, and return their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        asked = self.ranks if ranks is None else ranks
        self.tell(message, asked)
        answers = self._answers
        assert all(type(reply) is answer for reply in answers), "handlers answer with one type"
        assert len(answers) == len(asked), "every secondary answers once"
        return answers

    def add_up(self, own: Words, ranks: Sequence[int], *, round_number: int) -> Words:  # noqa: ARG002
        """Add up the words with which secondaries have answered.

        Reveals:
            What :meth:`Peers.add_up` reveals.
        """
        words = self._words.pop(round_number)
        return InProcessSum()([to_device(own, words[0].device), *words])


@dataclass
class ReplyHere:
    """Collects the answers to a message of the same process."""

    messages: list[Any] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)

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

    def add(self, words: Words, *, round_number: int) -> None:  # noqa: ARG002
        """Take words.

        Reveals:
            Nothing leaves the process.
        """
        self.words.append(words)


def average_weights(
    peers: Peers,
    request: TypedMessage,
    own: Mapping[str, Tensor],
    *,
    number: int,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the mean of all parties' weights, and send it to every secondary.

    Args:
        peers: The secondaries, which answer the request with words of theirs.
        request: Asks for their weights.
        own: The primary's, by name.
        number: A new round.
        bits: Binary places by tensor, as :func:`securevfl.mpc.codec.encode_weighted` takes them.

    Reveals:
        To every party: the mean, of which each of two parties learns the other's weights.
    """
    if not peers.ranks:
        # Exact, where words of the ring would round.
        return dict(own)
    words = encode_weighted(own, weight=1, parties=len(peers.ranks) + 1, bits=bits)
    total = peers.total(request, words, round_number=number)
    mean = decode_mean(total, {name: own[name].shape for name in own}, bits=bits)
    values = {name: value.cpu().numpy() for name, value in mean.items()}
    peers.tell(Mean(round_number=number, values=values))
    return mean


def shapes_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by which a :class:`Mean` of them is checked."""
    return {name: tuple(value.shape) for name, value in weights.items()}
