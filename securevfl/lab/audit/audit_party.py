"""One party's process of an audit: ``python -m securevfl.lab.audit.audit_party FOLDER NAME``."""

import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import EncodingRangeError, PrivacyError, ProtocolError, SecureVflError
from securevfl.federation.messages import RoundKind
from securevfl.federation.over_star import PeersOverStar, serve, sum_from_secondary
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.secondary import save_nothing
from securevfl.federation.run_plan import RoundCounter
from securevfl.federation.session import handshake
from securevfl.federation.session.peers import Handlers, HandlerTable, M, Peers
from securevfl.lab.audit.audit_statistics import RELEASES, ROUNDS_EVENT, AuditSettings
from securevfl.lab.audit.audit_worlds import AuditStage
from securevfl.launch.child import end_with_launcher, report, report_failure
from securevfl.mpc.codec import Words
from securevfl.mpc.masks import SessionKey
from securevfl.transport.channels import Channels, receive_from
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity
from securevfl.transport.message import Done, Message, MessageKind, TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session


def run_audit_party(folder: Path, name: str) -> None:
    """Take part in every round of the job in ``folder``; the primary saves the averages.

    Raises:
        SecureVflError: If this or another party fails.

    Reveals:
        To the primary: averages of made-up rows, noised. To secondaries: public keys.
    """
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    settings = AuditSettings(**job["settings"])
    stages = [AuditStage(settings, release) for release in RELEASES]
    identity = Identity.load(folder / name, name)
    rank = settings.names.index(name)
    address = ("127.0.0.1", int(job["port"]))
    ranks = {party: number for number, party in enumerate(settings.names)}
    limits = TransportLimits(silence_timeout_s=settings.timeout_s)
    pinned = job["pinned"]
    if rank == PRIMARY_RANK:
        primary = PrimaryTransport(address, identity, pinned, new_session(), ranks, limits=limits)
        with primary:
            _reveal(primary, stages, folder)
    else:
        secondary = SecondaryTransport(address, identity, pinned, ranks, limits=limits)
        with secondary:
            _contribute(secondary, stages, folder, identity=identity, rank=rank, pinned=pinned)


def _reveal(transport: PrimaryTransport, stages: Sequence[AuditStage], folder: Path) -> None:
    config, deadline_s = stages[0].config, stages[0].settings.timeout_s
    names = {rank: name for name, rank in config.ranks.items() if rank != PRIMARY_RANK}
    transport.listen()
    transport.wait_for_parties(deadline_s)
    hellos = {}
    for name in names.values():
        message = transport.receive(name, RoundKind.HELLO, round_number=0, deadline_s=deadline_s)
        hellos[name] = handshake.read_hello(config, message)
    transport.broadcast(list(hellos), handshake.welcome(hellos, stages[0].facts).to_message())
    rounds = RoundCounter()
    started = time.monotonic()
    for stage in stages:
        exchange = RoundExchange(
            PeersOverStar(transport, names, wait=config.waits.work),
            stage.plan.cut,
            device=torch.device("cpu"),
            # One session, so no number may come again in its second stage.
            rounds=rounds,
        )
        np.save(folder / f"{stage.release}.npy", stage.run(exchange))
        transport.broadcast(list(hellos), Done().to_message())
    report(ROUNDS_EVENT, seconds=time.monotonic() - started)


def _contribute(
    transport: SecondaryTransport,
    stages: Sequence[AuditStage],
    folder: Path,
    *,
    identity: Identity,
    rank: int,
    pinned: dict[str, str],
) -> None:
    config, deadline_s = stages[0].config, stages[0].settings.timeout_s
    with contextlib.ExitStack() as ending:
        secondaries = []
        # Built before the first round, so that no round waits for it.
        for stage in stages:
            secondaries.append(stage.secondary(rank, folder / identity.name))
            ending.callback(secondaries[-1].close)
        transport.connect(deadline_s)
        key = SessionKey(session=transport.session, rank=rank, name=identity.name)
        hello = handshake.hello(config, identity=identity, key=key, epochs=[])
        transport.send(hello.to_message())
        message = transport.receive(RoundKind.WELCOME, round_number=0, deadline_s=deadline_s)
        _, pair_keys = handshake.open_welcome(config, message, key=key, pinned=pinned)
        sum_to, masks = sum_from_secondary(transport, stages[0].plan, pair_keys, rank=rank)
        ending.callback(masks.close)
        for stage, secondary in zip(stages, secondaries, strict=True):
            serve(
                secondary.handlers(save_nothing),
                transport,
                sum_to,
                ranks=tuple(stage.plan.secondaries),
                deadline_s=config.waits.work.for_primary_s,
                follow_s=config.waits.answer.for_primary_s,
            )


def main(arguments: Sequence[str]) -> None:
    """Run one party for the launcher, and report its failure."""
    end_with_launcher()
    folder, name = Path(arguments[0]), arguments[1]
    try:
        run_audit_party(folder, name)
    except SecureVflError as error:
        origin = error.party if isinstance(error, ProtocolError) else None
        # Data of an audit are within every range: who refuses to encode them was not clipped.
        refused = isinstance(error, EncodingRangeError)
        code = PrivacyError.exit_code if refused else error.exit_code
        report_failure(party=origin or name, reason=str(error), exit_code=code)
        sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])


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
