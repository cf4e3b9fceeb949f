"""Lines between parties that are threads of one process, for protocols without a network."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import Empty, Queue
from typing import Any

from helpers.patience import PATIENCE_S

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message, MessageKind

_DEADLINE_S = PATIENCE_S


class Wires:
    """All messages on their way, by sender and receiver; what travelled stays to be looked at."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], Queue[Message]] = defaultdict(Queue)
        self._lock = threading.Lock()
        self.travelled: list[tuple[str, str, Message]] = []

    def queue(self, sender: str, receiver: str) -> Queue[Message]:
        """Return one line; two threads that use it first at the same time get the same one."""
        with self._lock:
            return self._queues[sender, receiver]

    def desk(self, own: str) -> "ThreadDesk":
        """Return one party's end."""
        return ThreadDesk(self, own)


class ThreadDesk:
    """A desk whose messages go to a queue."""

    def __init__(self, wires: Wires, own: str) -> None:
        self._wires = wires
        self._own = own

    def send(self, name: str, message: Message) -> None:
        tensors = {key: value.copy() for key, value in message.tensors.items()}
        sent = replace(message, tensors=tensors, sender=self._own)
        self._wires.travelled.append((self._own, name, sent))
        self._wires.queue(self._own, name).put(sent)

    def receive(self, name: str, *kinds: MessageKind) -> Message:
        try:
            message = self._wires.queue(name, self._own).get(timeout=_DEADLINE_S)
        except Empty:
            raise ProtocolError(f"{name}: sent nothing") from None
        if message.kind not in kinds:
            raise ProtocolError(f"{name}: sent {message.kind.name}")
        return message


def run_all(parties: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run every party in a thread of its own; return what each returned or raised."""
    results: dict[str, Any] = {}
    ended: Queue[bool] = Queue()

    def life(name: str, run: Callable[[], Any]) -> None:
        try:
            results[name] = run()
        except Exception as error:
            results[name] = error
        ended.put(isinstance(results[name], Exception))

    for item in parties.items():
        threading.Thread(target=life, args=item, daemon=True).start()
    failed = False
    for _ in parties:
        # A party whose peer has failed waits in vain; its result is not looked at then.
        try:
            failed |= ended.get(timeout=1 if failed else _DEADLINE_S)
        except Empty:
            break
    return results
