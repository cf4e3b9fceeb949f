"""One authenticated connection: what waits to be sent, what has arrived, and the bytes between.

Only the thread that owns all sockets calls :meth:`Connection.read` and :meth:`Connection.write`;
OpenSSL allows one user of a connection at a time. Other threads touch the two queues alone.
"""

import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from securevfl.core import checks
from securevfl.core.errors import ProtocolError
from securevfl.transport.framing import EncodedMessage, FrameReader
from securevfl.transport.message import Message
from securevfl.transport.tls import broken_in_words

# One peer's turn: enough for a whole share of usual size, so that peers are served in turn.
_TURN_BYTES: Final = 4 << 20
# TLS says nothing of what it has sent before the whole of what it was given is: over a slow line a
# large array would look like a party that takes nothing in. In whole records it costs no more.
_RECORD_BYTES: Final = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportLimits:
    """What a transport waits for and takes in, at most."""

    silence_timeout_s: float = 10.0
    """Seconds without any sign of life, after which a party counts as lost."""

    lowest_rate: float = 1000.0
    """Bytes a second that a party must take of what waits to be sent to it, over
    ``silence_timeout_s``; below it counts as lost. 0: any."""

    handshake_timeout_s: float = 10.0
    """Seconds for a caller to prove who it is."""

    farewell_timeout_s: float = 2.0
    """Seconds to deliver the last messages when the federation ends or fails."""

    max_message_bytes: int = 1 << 30
    """Largest body of one message; memory is set aside for it."""

    max_waiting_messages: int = 4096
    """Messages of one party that may wait to be read."""

    def __post_init__(self) -> None:
        checks.positive(
            silence_timeout_s=self.silence_timeout_s,
            handshake_timeout_s=self.handshake_timeout_s,
            farewell_timeout_s=self.farewell_timeout_s,
        )
        checks.at_least(0, lowest_rate=self.lowest_rate)
        checks.at_least(
            1,
            max_message_bytes=self.max_message_bytes,
            max_waiting_messages=self.max_waiting_messages,
        )


class Outgoing:
    """A message in a queue; ``sent`` once TLS has taken its last byte."""

    __slots__ = ("encoded", "sent")

    def __init__(self, encoded: EncodedMessage) -> None:
        self.encoded = encoded
        self.sent = False


class Connection:
    """The connection to one party, after its identity has been proved."""

    def __init__(
        self,
        *,
        peer: str,
        connection: ssl.SSLSocket,
        reader: FrameReader,
        session: bytes,
        own_rank: int,
        max_waiting: int,
    ) -> None:
        self.peer = peer
        self.socket = connection
        self.incoming: deque[Message] = deque()
        self.outgoing: deque[Outgoing] = deque()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.last_heard = self.last_sent = self.last_progress = time.monotonic()
        self._waiting_since: float | None = None
        self._sent_by_then = 0
        self.blocked = False
        """Whether the last write stopped because the network takes no more."""
        self.unread = False
        """Whether the last read stopped because its turn was over."""
        self.peer_left = False
        """Whether the party has said that it is done."""
        self.ended = False
        """Whether nothing more can arrive."""
        self.end_reason = "its connection closed: the process ended or the network broke"
        """Why, in words."""
        self._reader = reader
        self.session = session
        self._own_rank = own_rank
        self._max_waiting = max_waiting
        self._sequence = 0
        self._current: Outgoing | None = None
        self._buffers: deque[memoryview] = deque()

    @property
    def has_output(self) -> bool:
        """Whether bytes wait to be sent."""
        return self._current is not None or bool(self.outgoing)

    def rate(self, now: float, *, over_s: float) -> float | None:
        """Return the bytes a second that went out since bytes began to wait, once in ``over_s``.

        None: nothing waits, or it is not time yet.
        """
        if not self.has_output:
            self._waiting_since = None
            return None
        if self._waiting_since is None:
            self._waiting_since, self._sent_by_then = now, self.bytes_sent
        seconds = now - self._waiting_since
        if seconds < over_s:
            return None
        taken, self._waiting_since = self.bytes_sent - self._sent_by_then, None
        return taken / seconds

    def forgive(self, now: float) -> None:
        """Count from now on: it was this process that stood still."""
        self.last_heard = self.last_progress = now
        self._waiting_since = None

    def drop_unsent(self) -> None:
        """Forget the messages that have not begun to be sent; one that has is finished."""
        self.outgoing.clear()

    def keep(self, message: Message) -> None:
        """Put a received message where the party's own thread finds it.

        Raises:
            ProtocolError: If too many wait already.
        """
        if len(self.incoming) >= self._max_waiting:
            raise ProtocolError(
                f"{self.peer}: sends faster than the protocol allows; "
                f"{len(self.incoming)} messages wait"
            )
        self.incoming.append(message)

    def read(self, now: float) -> list[Message]:
        """Take in what has arrived, for one turn.

        Sets :attr:`ended` when the connection closed or broke; what came before that counts.

        Raises:
            ProtocolError: If it is not what may come next.
        """
        messages: list[Message] = []
        taken = 0
        self.unread = True
        while taken < _TURN_BYTES:
            try:
                count = self.socket.recv_into(self._reader.target())
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.unread = False
                break
            except OSError as error:
                self.unread = False
                self.ended = True
                self.end_reason = f"its connection broke: {broken_in_words(error)}"
                break
            if count == 0:
                self.unread = False
                self.ended = True
                break
            taken += count
            message = self._reader.advance(count)
            if message is not None:
                messages.append(message)
        if taken:
            self.bytes_received += taken
            self.last_heard = now
        return messages

    def write(self, now: float) -> bool:
        """Send what waits, as far as the network takes it; return whether a message went out.

        Raises:
            OSError: If the connection broke.
        """
        finished = False
        written = 0
        self.blocked = False
        while written < _TURN_BYTES and self._next_buffer():
            try:
                count = self.socket.send(self._buffers[0][:_RECORD_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.blocked = True
                break
            written += count
            if count < len(self._buffers[0]):
                self._buffers[0] = self._buffers[0][count:]
                continue
            self._buffers.popleft()
            if not self._buffers and self._current is not None:
                self._current.sent = True
                self._current = None
                finished = True
        if written:
            self.bytes_sent += written
            self.last_sent = now
        if written or not self.has_output:
            self.last_progress = now
        return finished

    def half_close(self) -> None:
        """Say that nothing more will be sent, so that the peer reads everything before."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.ended = True  # the other end is gone, which is what was wanted

    def _next_buffer(self) -> bool:
        if self._buffers:
            return True
        if not self.outgoing:
            return False
        self._current = self.outgoing.popleft()
        frame = self._current.encoded.frame(
            session=self.session, sender_rank=self._own_rank, sequence=self._sequence
        )
        self._sequence += 1
        self._buffers.extend(frame)
        return True
