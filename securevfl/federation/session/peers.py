"""How a stage reaches its parties: written once, for one process and for the star.

The primary's side of a stage calls :class:`Peers`. A secondary's side is a table of handlers, one
for each message type that it takes; its validator refuses what is not due, wherever it runs.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.federation.messages import RoundKind, Share
from securevfl.federation.run_plan import RunPlan
from securevfl.mpc.crypten_bridge import CrypTenBridge
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.sum_to import CrypTenSumTo, InProcessSum, SumTo
from securevfl.transport.message import DeclaredMessage, MessageKind, TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

# Secure sums over the star: what CrypTen's reveal sends and receives.


class PrimaryWire:
    """The primary's end of the wire, from which CrypTen's reveal gets the masked words."""

    def __init__(
        self, transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
    ) -> None:
        self._transport = transport
        self._names = names
        self._deadline_s = deadline_s

    def add_words(
        self, round_number: int, total: Int64[Tensor, " words"], ranks: Sequence[int]
    ) -> None:
        """Receive one share from every rank and add it to ``total`` modulo 2^64.

        Shares are added in the order in which they arrive.

        Reveals:
            To the primary: masked words, whose sum alone means anything.
        """
        summed = total.numpy()
        shares = self._transport.receive_each(
            [self._names[rank] for rank in ranks],
            RoundKind.SHARE,
            round_number=round_number,
            deadline_s=self._deadline_s,
        )
        for message in shares:
            np.add(summed, Share.from_message(message, count=len(summed)).words, out=summed)

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Refuse: the primary keeps its own words to itself.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("the primary collects words and sends none")


class SecondaryWire:
    """A secondary's end of the wire, into which CrypTen's reveal puts the masked words."""

    def __init__(self, transport: SecondaryTransport) -> None:
        self._transport = transport

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Send this round's share.

        Reveals:
            To the primary: words masked by keys that it does not have.
        """
        share = Share(round_number=round_number, words=words.numpy())
        self._transport.send(share.to_message())

    def add_words(self, round_number: int, total: Tensor, ranks: Sequence[int]) -> None:
        """Refuse: only the primary collects.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("only the primary collects words")


def sum_to_primary(
    transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
) -> SumTo:
    """Return the primary's end of secure sums.

    Args:
        transport: The primary's end of the star.
        names: The secondaries by rank.
        deadline_s: How long a secondary may take to send its words, in seconds.
    """
    wire = PrimaryWire(transport, names, deadline_s=deadline_s)
    return CrypTenSumTo(CrypTenBridge(wire, rank=PRIMARY_RANK), None)


def sum_from_secondary(
    transport: SecondaryTransport, plan: RunPlan, pair_keys: Mapping[int, bytes], *, rank: int
) -> tuple[SumTo, PairwiseMasks]:
    """Return a secondary's end of secure sums, and its masks, which are the caller's to close.

    Bound from the start is what a plan has beyond the session's facts, which are in the pair keys:
    the format of words, and how many rows train.

    Args:
        transport: This party's end of the star.
        plan: The run.
        pair_keys: Its keys with every other caller, by rank.
        rank: Its own.
    """
    others = {peer: key for peer, key in pair_keys.items() if peer in plan.secondaries}
    masks = PairwiseMasks(rank, others, degree=plan.config.privacy.mask_degree)
    agreed = repr((plan.cut, plan.training_rows))
    masks.bind(hashlib.sha256(agreed.encode()).digest(), tuple(others))
    return CrypTenSumTo(CrypTenBridge(SecondaryWire(transport), rank=rank), masks), masks


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


Handlers = Mapping[type[TypedMessage], Handler]


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
        self._secondaries = dict(secondaries)

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

    def _handled(self, message: TypedMessage) -> "list[_ReplyHere]":
        replies = [_ReplyHere() for _ in self._secondaries]
        for handlers, reply in zip(self._secondaries.values(), replies, strict=True):
            handlers[type(message)].handle(message, reply)
        return replies


class _ReplyHere:
    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.words: list[Words] = []

    def send(self, message: TypedMessage) -> None:
        self.messages.append(message)

    def prepare(self, count: int, *, round_number: int) -> None:
        pass

    def add(self, words: Words, *, round_number: int) -> None:  # noqa: ARG002 - a Reply
        self.words.append(words)


class PeersOverStar:
    """Secondaries in other processes, over the authenticated star."""

    def __init__(
        self, transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
    ) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            names: The secondaries by rank.
            deadline_s: How long a secondary may take to answer, in seconds.
        """
        self._transport = transport
        self._names = dict(names)
        self._deadline_s = deadline_s
        self._sum_to = sum_to_primary(transport, self._names, deadline_s=deadline_s)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._names)

    def tell(self, message: TypedMessage) -> None:
        """Send a message to every secondary.

        Reveals:
            What :meth:`Peers.tell` reveals.
        """
        self._transport.broadcast(list(self._names.values()), message.to_message())

    def ask(self, message: TypedMessage, answer: type[M], **known: Any) -> list[M]:
        """Send a message to every secondary, and wait for their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        self.tell(message)
        received = self._transport.receive_each(
            list(self._names.values()),
            answer.KIND,
            round_number=getattr(message, "round_number", 0),
            deadline_s=self._deadline_s,
        )
        answers = {one.sender: answer.from_message(one, **known) for one in received}
        # By rank, not by arrival: a sum of floats depends on its order.
        return [answers[name] for name in self._names.values()]

    def total(self, message: TypedMessage, own: Words, *, round_number: int) -> Words:
        """Send a message to every secondary, and add up their masked words.

        Reveals:
            What :meth:`Peers.total` reveals.
        """
        self.tell(message)
        total = self._sum_to(own.cpu(), round_number=round_number, active=self.ranks)
        assert total is not None, "the primary's reveal returns the total"
        return total.to(own.device)


class _ReplyOverStar:
    def __init__(
        self, transport: SecondaryTransport, sum_to: SumTo, ranks: tuple[int, ...]
    ) -> None:
        self._transport = transport
        self._sum_to = sum_to
        self._ranks = ranks

    def send(self, message: TypedMessage) -> None:
        self._transport.send(message.to_message())

    def prepare(self, count: int, *, round_number: int) -> None:
        self._sum_to.prepare(count, round_number=round_number, active=self._ranks)

    def add(self, words: Words, *, round_number: int) -> None:
        self._sum_to(words.cpu(), round_number=round_number, active=self._ranks)


def serve(
    handlers: Handlers,
    transport: SecondaryTransport,
    sum_to: SumTo,
    *,
    ranks: tuple[int, ...],
    deadline_s: float,
) -> None:
    """Handle the primary's messages until one ends the stage.

    Args:
        handlers: What this party does with each message type.
        transport: Its end of the star.
        sum_to: Its end of secure sums.
        ranks: Ranks of all secondaries, which get the same messages.
        deadline_s: How long the primary may be silent, in seconds.

    Raises:
        ProtocolError: If the primary leaves the protocol, fails or falls silent.

    Reveals:
        To the primary: what the handlers answer.
    """
    types: dict[MessageKind, Any] = {one.KIND: one for one in handlers}
    reply, ended = _ReplyOverStar(transport, sum_to, ranks), False
    while not ended:
        message = transport.receive(tuple(types), round_number=None, deadline_s=deadline_s)
        sum_to.bind(message.digest(), ranks)
        kind = types[message.kind]
        handler = handlers[kind]
        ended = bool(handler.handle(kind.from_message(message, **handler.known()), reply))
