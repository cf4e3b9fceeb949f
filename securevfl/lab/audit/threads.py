"""Parties that are threads of one process: their lines, and a stage's messages over these."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, Queue
from typing import Any

from securevfl.core.errors import ProtocolError
from securevfl.federation.session.peers import Handlers, HandlerTable, M, Peers
from securevfl.mpc.sum_to import Words
from securevfl.transport.channels import Channels, receive_from
from securevfl.transport.message import Message, MessageKind, TypedMessage


class Wires:
    """All messages on their way, by sender and receiver."""

    def __init__(self, deadline_s: float) -> None:
        """Make them.

        Args:
            deadline_s: Seconds that a party waits for a message.
        """
        self.deadline_s = deadline_s
        self._queues: dict[tuple[str, str], Queue[Message]] = defaultdict(Queue)
        self._lock = threading.Lock()

    def queue(self, sender: str, receiver: str) -> Queue[Message]:
        """Return one line; two threads that use it first at the same time get the same one."""
        with self._lock:
            return self._queues[sender, receiver]

    def put(self, sender: str, receiver: str, message: Message) -> None:
        """Send a message: the receiver gets arrays of its own."""
        tensors = {key: value.copy() for key, value in message.tensors.items()}
        self.queue(sender, receiver).put(replace(message, tensors=tensors, sender=sender))

    def of(self, own: str) -> "ThreadLines":
        """Return one party's end."""
        return ThreadLines(self, own)


class ThreadLines:
    """One party's way to all others."""

    def __init__(self, wires: Wires, own: str) -> None:
        self._wires = wires
        self._own = own

    def send(self, message: Message, *names: str) -> None:
        """Send a message to one party or several.

        Reveals:
            To these parties: the message.
        """
        for name in names:
            self._wires.put(self._own, name, message)

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        """Return the next message of a party, which must be of one of the kinds.

        Raises:
            ProtocolError: If it is of another one, or none comes in time.
        """
        try:
            message = self._wires.queue(name, self._own).get(timeout=self._wires.deadline_s)
        except Empty:
            raise ProtocolError(f"{name}: sent nothing") from None
        if message.kind not in kinds:
            raise ProtocolError(f"{name}: sent {message.kind.name}")
        return message

    def check(self) -> None:
        """Do nothing: a party that has failed sends no message in time, which ends all waits."""


def run_lives(lives: Mapping[str, Callable[[], object]]) -> None:
    """Run every party in a thread of its own; the first failure ends the wait for the others.

    Raises:
        Exception: What the first party to fail has raised.
    """
    ended: Queue[Exception | None] = Queue()

    def run(life: Callable[[], object]) -> None:
        try:
            life()
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            ended.put(error)
        else:
            ended.put(None)

    for life in lives.values():
        threading.Thread(target=run, args=(life,), daemon=True).start()
    for _ in lives:
        error = ended.get()
        if error is not None:
            raise error


class ThreadPeers(Peers):
    """Secondaries in other threads, as the primary reaches them; they add nothing up."""

    ahead = 1

    def __init__(self, lines: Channels, names: Mapping[int, str]) -> None:
        """Take the primary's lines, and the secondaries' names by rank."""
        self._lines = lines
        self._names = dict(names)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self._names)

    def tell(self, message: TypedMessage, ranks: Sequence[int] | None = None) -> None:
        """Send a message to secondaries.

        Reveals:
            What :meth:`Peers.tell` reveals.
        """
        names = [self._names[rank] for rank in (self.ranks if ranks is None else ranks)]
        self._lines.send(message.to_message(), *names)

    def ask(
        self,
        message: TypedMessage,
        answer: type[M],
        ranks: Sequence[int] | None = None,
        **known: Any,
    ) -> list[M]:
        """Send a message to secondaries, and wait for their answers.

        Reveals:
            What :meth:`Peers.ask` reveals.
        """
        self.tell(message, ranks)
        return [
            receive_from(self._lines, self._names[rank], answer, **known)
            for rank in (self.ranks if ranks is None else ranks)
        ]

    def add_up(self, own: Words, ranks: Sequence[int], *, round_number: int) -> Words:
        """Refuse: sums need masks.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("threads add up no words")


@dataclass(frozen=True)
class ThreadReply:
    """Answers the primary's message from another thread."""

    lines: Channels
    primary: str
    """The primary's name."""

    def send(self, message: TypedMessage) -> None:
        """Send a message back.

        Reveals:
            What :meth:`Reply.send` reveals.
        """
        self.lines.send(message.to_message(), self.primary)

    def prepare(self, count: int, *, round_number: int) -> None:
        """Do nothing: there are no masks.

        Reveals:
            Nothing.
        """

    def add(self, words: Words, *, round_number: int) -> None:
        """Refuse: sums need masks.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("threads add up no words")


def answer_messages(handlers: Handlers, lines: Channels, primary: str, *, count: int) -> None:
    """Handle some messages of the primary.

    Args:
        handlers: A secondary's.
        lines: The same party's.
        primary: The primary's name.
        count: Messages that are handled.

    Raises:
        ProtocolError: If a message is not due, or not what its type says.

    Reveals:
        To the primary: what the handlers answer.
    """
    table = HandlerTable(handlers)
    for _ in range(count):
        message = lines.receive(primary, *table.kinds)
        table.handle(table.read(message), ThreadReply(lines, primary))
