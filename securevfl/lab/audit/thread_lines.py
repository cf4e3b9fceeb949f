"""Message lines between parties that are threads of one process, without a network."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import Empty, Queue

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message, MessageKind


class Wires:
    """All messages on their way, by sender and receiver."""

    def __init__(self, deadline_s: float) -> None:
        """Create the lines.

        Args:
            deadline_s: Seconds that a party waits for a message.
        """
        self.deadline_s = deadline_s
        self._queues: dict[tuple[str, str], Queue[Message]] = defaultdict(Queue)
        self._lock = threading.Lock()

    def queue(self, sender: str, receiver: str) -> Queue[Message]:
        """Return the line from a sender to a receiver; it is safe to call from several threads."""
        with self._lock:
            return self._queues[sender, receiver]

    def put(self, sender: str, receiver: str, message: Message) -> None:
        """Send a message, whose arrays are copied for the receiver."""
        tensors = {key: value.copy() for key, value in message.tensors.items()}
        self.queue(sender, receiver).put(replace(message, tensors=tensors, sender=sender))

    def of(self, own: str) -> "ThreadLines":
        """Return one party's end of all lines."""
        return ThreadLines(self, own)


class ThreadLines:
    """Lines of one party to all others."""

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
    """Run every party in its own thread; the first failure ends the wait for the others.

    Raises:
        Exception: The exception of the first party to fail.
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
