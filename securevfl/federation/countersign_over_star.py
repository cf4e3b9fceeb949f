"""Both ends of countersigning over the star: a meeting at the start, then heads at every point."""

import time
from collections.abc import Callable
from typing import Final

from securevfl.core.errors import ProtocolError
from securevfl.federation.countersign import START, Countersigner
from securevfl.federation.countersign_messages import (
    CountersignRequest,
    Heads,
    LedgerKind,
    Memories,
    Request,
)
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

Log = Callable[..., None]
_NO_ROUND: Final = 0


class PrimaryCountersigning:
    """The primary's end: it collects, passes on, and only then checks, like everybody else."""

    def __init__(
        self, signer: Countersigner, transport: PrimaryTransport, *, deadline_s: float, log: Log
    ) -> None:
        """Make it.

        Args:
            signer: The primary's own part.
            transport: Its end of the star.
            deadline_s: How long a secondary may take to answer, in seconds.
            log: The primary's log.
        """
        self._signer = signer
        self._transport = transport
        self._deadline_s = deadline_s
        self._log = log

    def start(self) -> None:
        """Open the meeting, and let every ledger be shown to go on from what others remember.

        Raises:
            AuthenticationError: If something is not signed by the identity that is pinned.
            ProtocolError: Naming a party whose ledger does not go on.

        Reveals:
            To every secondary: what :class:`Memories` and :class:`Heads` tell, of all parties.
        """
        signer = self._signer
        memories = {signer.name: signer.memory()}
        for message in self._collect(LedgerKind.MEMORIES):
            theirs = Memories.from_message(
                message, senders=[message.sender], parties=signer.parties
            )
            memories.update(theirs.memories)
        told = Memories(parties=signer.parties, memories=memories)
        self._transport.broadcast(signer.others, told.to_message())
        signer.open(memories)
        self.meet(START)

    def request(self, point: Request) -> None:
        """Ask for heads where no other message says that they are due, and exchange them.

        Raises:
            AuthenticationError: As :meth:`start` does.
            ProtocolError: As :meth:`start` does.

        Reveals:
            To every secondary: what :class:`Heads` tells, of all parties.
        """
        asked = CountersignRequest(point=point)
        self._transport.broadcast(self._signer.others, asked.to_message())
        self.meet(point)

    def meet(self, point: str) -> None:
        """Exchange heads at a point that every party knows.

        Raises:
            AuthenticationError: As :meth:`start` does.
            ProtocolError: As :meth:`start` does.

        Reveals:
            To every secondary: what :class:`Heads` tells, of all parties.
        """
        begin, signer = time.monotonic(), self._signer
        heads = {signer.name: signer.state(point)}
        for message in self._collect(LedgerKind.HEADS):
            heads.update(Heads.from_message(message, senders=[message.sender]).heads)
        self._transport.broadcast(signer.others, Heads(heads=heads).to_message())
        signer.keep(point, heads)
        self._log("countersigned", point=point, wall_s=round(time.monotonic() - begin, 6))

    def _collect(self, kind: LedgerKind) -> list[Message]:
        return list(
            self._transport.receive_each(
                self._signer.others, kind, round_number=_NO_ROUND, deadline_s=self._deadline_s
            )
        )


class SecondaryCountersigning:
    """A secondary's end: it states its head when that is due, and keeps what the others signed."""

    def __init__(
        self,
        signer: Countersigner,
        transport: SecondaryTransport,
        *,
        frozen: bool,
        deadline_s: float,
        log: Log,
    ) -> None:
        """Make it.

        Args:
            signer: This party's own part.
            transport: Its end of the star.
            frozen: Whether all rows are released at once, which the primary may mark.
            deadline_s: How long the others may take, in seconds.
            log: This party's log.
        """
        self._signer = signer
        self._transport = transport
        self._deadline_s = deadline_s
        self._log = log
        self._due: set[str] = {"end", "released"} if frozen else {"end"}

    def start(self) -> None:
        """Open the meeting; see :meth:`PrimaryCountersigning.start`.

        Raises:
            AuthenticationError: If something is not signed by the identity that is pinned.
            ProtocolError: Naming a party whose ledger does not go on.

        Reveals:
            To all parties: what :class:`Memories` and :class:`Heads` tell, of this one.
        """
        signer = self._signer
        own = Memories(parties=signer.parties, memories={signer.name: signer.memory()})
        self._transport.send(own.to_message())
        told = Memories.from_message(
            self._receive(LedgerKind.MEMORIES), senders=signer.parties, parties=signer.parties
        )
        signer.open(told.memories)
        self.meet(START)

    def answer(self, message: Message) -> bool:
        """Do what the primary asks for; return whether the run has ended with it.

        Raises:
            AuthenticationError: As :meth:`start` does.
            ProtocolError: As :meth:`start` does, and if it is not due.

        Reveals:
            To all parties: what :class:`Heads` tells, of this one.
        """
        point = CountersignRequest.from_message(message).point
        if point not in self._due:
            raise ProtocolError(
                f"the primary asks for ledger heads ({point}) where none are due; nothing is signed"
            )
        self._due.discard(point)
        self.meet(point)
        return point == "end"

    def meet(self, point: str) -> None:
        """Exchange heads at a point that every party knows.

        Raises:
            AuthenticationError: As :meth:`start` does.
            ProtocolError: As :meth:`start` does.

        Reveals:
            To all parties: what :class:`Heads` tells, of this one.
        """
        begin, signer = time.monotonic(), self._signer
        self._transport.send(Heads(heads={signer.name: signer.state(point)}).to_message())
        told = Heads.from_message(self._receive(LedgerKind.HEADS), senders=signer.parties)
        signer.keep(point, told.heads)
        self._log("countersigned", point=point, wall_s=round(time.monotonic() - begin, 6))

    def _receive(self, kind: LedgerKind) -> Message:
        return self._transport.receive(kind, round_number=_NO_ROUND, deadline_s=self._deadline_s)
