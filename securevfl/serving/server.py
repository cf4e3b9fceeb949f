"""HTTP server: socket, signals, and an end that answers every request."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from securevfl.core.errors import ConfigError
from securevfl.serving.api import make_app
from securevfl.serving.asking import Asker
from securevfl.serving.guard import Guard, Rate, Token
from securevfl.serving.opening import OpenedModel
from securevfl.serving.prometheus import ServiceMetrics

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


LOG: Final = logging.getLogger("securevfl.serving")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 64
"""Most connections that wait to be accepted."""

_GRACE_S: Final = 30
_QUIET_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Settings of a server."""

    max_rows: int = 1000
    """Most rows of one request, and of combined requests."""
    max_bytes: int = 4 * 2**20
    """Most bytes of one body."""
    rate: float | None = None
    """Predicted rows a second, over all clients; None for no limit."""
    gather_s: float = 0.005
    """Most seconds that a request waits for others to join it."""
    hosts: frozenset[str] | None = None
    """Names that clients may call the server; None: any."""


class _RequestLog:
    """Listener that counts requests and logs them for the operator."""

    def __init__(self, figures: ServiceMetrics) -> None:
        self._figures = figures

    def note_request(self, requests: int, rows: int, seconds: float) -> None:
        self._figures.count_request(rows, seconds)
        LOG.info("asked for %d rows of %d requests in %.1f ms", rows, requests, 1000 * seconds)

    def warn(self, text: str) -> None:
        LOG.warning("%s", text)


def application(opened: OpenedModel, token: Token | None, settings: ServerSettings) -> ASGIApp:
    """Return the guarded application with its asker.

    Args:
        opened: The model.
        token: Token that clients must send; None requires none.
        settings: Settings of the server.
    """
    figures = ServiceMetrics()
    asker = Asker(
        opened.model,
        most_rows=settings.max_rows,
        gather_s=settings.gather_s,
        listener=_RequestLog(figures),
        clock=time.monotonic,
    )
    return Guard(
        make_app(
            opened.describe(max_rows=settings.max_rows),
            asker,
            figures,
            Rate(settings.rate, time.monotonic),
        ),
        token=token,
        hosts=settings.hosts,
        max_bytes=settings.max_bytes,
        figures=figures,
        log=LOG.info,
        clock=time.monotonic,
    )


def run_server(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C; received requests are answered before it returns.

    Args:
        app: The application.
        listener: Bound.
    """
    with _signals_end_quietly():
        server_of(app, ConnectionLimits.of_this_process()).run(sockets=[listener])


def server_of(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Server:
    """Return a server with limited connections.

    Args:
        app: The application.
        limits: Limits of connections.
    """
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(GuardedConnection, limits=limits)),
        loop="asyncio",
        ws="none",  # a web socket would pass by the guard
        backlog=_BACKLOG,
        log_level="warning",
        access_log=False,  # the guard's leaves queries out
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """uvicorn server that logs one line instead of the event loop's traceback."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        last = -_QUIET_S

        def say(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # A lack of descriptors comes back with every connection that waits.
            nonlocal last
            if loop.time() - last >= _QUIET_S:
                last = loop.time()
                error = context.get("exception")
                LOG.warning("%s (%s)", context["message"], _error_name(error))

        loop.set_exception_handler(say)
        await super().serve(sockets)


def _error_name(error: object) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    return type(error).__name__


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 lets the system choose.

    Raises:
        ConfigError: If the address is in use, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named: asyncio sends small answers at once on no other socket, and each
    # would wait 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: cannot listen there ({error})") from None
    return listener


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Let a server end in order, and this process with exit code 0.

    uvicorn takes the signals while it runs, and raises them once more when it has ended.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        """Go on: the server has ended, which is all that was asked for."""

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
