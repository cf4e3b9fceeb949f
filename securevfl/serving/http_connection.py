"""HTTP connections with limits on their number, and on silent and unread ones.

uvicorn closes connections that are idle between two requests, and no others. These close also if a
client sends no whole head of a request, goes on sending a body after its answer, or does not read
its answers.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST: Final = 512
_PIECE: Final = 1 << 14
"""Most bytes of one read, so that parsing of tiny chunks does not block others for long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits of one server's connections."""

    most: int
    """Most connections at once; one more closes the longest waiting one."""
    head_s: float = 10.0
    """Seconds for the first line and the headers of a request, from the connection's begin or from
    the last answer on."""
    linger_s: float = 1.0
    """Seconds during which the rest of an answered request's body is discarded."""
    answer_s: float = 30.0
    """Seconds for which an answer may wait to be read."""

    @classmethod
    def of_this_process(cls) -> "ConnectionLimits":
        """Return limits that leave three quarters of this process's file descriptors free."""
        try:
            import resource
        except ImportError:  # not on Windows
            return cls(most=_MOST)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(most=max(1, min(_MOST, descriptors // 4)) if descriptors > 0 else _MOST)


class GuardedConnection(H11Protocol):
    """Connection that is closed at its limits; a new one may close the longest waiting one."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._next: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    @property
    def _waits_until(self) -> float | None:
        """Time at which the wait for a request ends; None while a request is answered."""
        waits = self.cycle is None or self.cycle.response_complete
        return self._next.when() if waits and self._next is not None else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the wait for a request; too many connections close the longest waiting one."""
        super().connection_made(transport)
        transport.max_size = _PIECE  # type: ignore[attr-defined]
        self._wait(self._limits.head_s)
        there: list[Any] = [
            connection for connection in self.connections if not connection.transport.is_closing()
        ]
        if len(there) > self._limits.most:
            waiting = [
                (connection._waits_until, connection)
                for connection in there
                if connection._waits_until is not None
            ]
            min(waiting, key=lambda pair: pair[0])[1].transport.abort()

    def on_response_complete(self) -> None:
        """Start the wait for the next request; it is shorter if this body still comes."""
        rest = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        self._wait(self._limits.linger_s if rest else self._limits.head_s)

    def pause_writing(self) -> None:
        """Start the time limit for the client to read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the time limit: the client has read."""
        super().resume_writing()
        self._cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        super().connection_lost(exc)
        self._cancel(self._next)
        self._cancel(self._unread)

    def _wait(self, seconds: float) -> None:
        self._cancel(self._next)
        self._next = self.loop.call_later(seconds, self._end_wait)

    def _end_wait(self) -> None:
        if self._waits_until is not None:
            # Not close(), which waits until the client has read what was sent.
            self.transport.abort()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
