"""HTTP server: the model's parties, socket, signals, and an end that answers every request."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import h11
import pandas as pd
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from securevfl.config.federation import FederationConfig, key_spec
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.federation.session.membership import idle_helpers
from securevfl.launch.spawn import Launch, keeping
from securevfl.runtime import launching
from securevfl.runtime.party import party_session
from securevfl.runtime.prediction_session import NamedRows, PredictionSession
from securevfl.runtime.primary_party import predicting
from securevfl.runtime.run_options import PartyJob, RunOptions
from securevfl.runtime.run_tables import rows_of_frame, schema_of
from securevfl.runtime.trained_run import TrainedRun
from securevfl.serving.api import RowFormat, Served, make_app
from securevfl.serving.asking import LOG, Asker, Model
from securevfl.serving.guard import Guard, Rate, Token
from securevfl.transport.identity import Identity
from securevfl.transport.star import PrimaryTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """Saved model with its parties ready for requests."""

    model: Model
    served: Served
    processes: Launch | None = None
    """Processes of the other parties, if they run on this machine."""


@contextmanager
def open_model(run: TrainedRun, *, observe: Observer) -> Iterator[OpenedModel]:
    """Load a run's model, and prepare requests to its parties.

    The parties of a simulated run are in this process, and those of a run on this machine in one
    process each. With an identity, this is the primary, and the other parties join from elsewhere
    (``securevfl party --serve``). A model that answers alone asks nobody.

    Args:
        run: The run that trained.
        observe: Receives progress events.

    Raises:
        ConfigError: If the run has saved no model, or one that does not fit, or another server or
            run has a ledger that requests are charged to.
        DataError: If a party's table, which the model was trained on, cannot be read any more.
    """
    own = run.model(run.config.primary.name)
    way = run.way(own)
    if way == "alone":
        session = PredictionSession(run.config, own)
        yield _open_local(own, run.config, lambda: nullcontext(session))
    elif way == "here":
        served = in_process(run)
        # One session from start to end: another server or request on these ledgers is refused.
        with served.model.open() as session:
            yield replace(served, model=replace(served.model, open=lambda: nullcontext(session)))
    elif way == "elsewhere":
        with between_processes(run.primary_job(observe)) as served:
            yield served
    else:
        with (
            _others_in_processes(run.config, run.options(observe)) as (config, place, processes),
            between_processes(
                replace(run.primary_job(observe), config=config),
                identity=place,
                processes=processes,
            ) as served,
        ):
            yield served


def in_process(run: TrainedRun) -> OpenedModel:
    """Return a model whose parties are all in this process.

    Raises:
        ConfigError: If a model is missing or damaged.
        DataError: If a party's table cannot be read any more.
    """
    own = run.model(run.config.primary.name)
    return _open_local(own, run.config, lambda: run.session(unheard))


def _open_local(
    own: SavedModel,
    config: FederationConfig,
    session: Callable[[], AbstractContextManager[PredictionSession]],
) -> OpenedModel:
    """Return a model that never waits for parties."""
    return OpenedModel(
        model=Model(open=session, rows=_reader(config, own), interrupt=lambda: None),
        served=_describe(config, own),
    )


@contextmanager
def between_processes(
    job: PartyJob,
    *,
    identity: Identity | None = None,
    processes: Launch | None = None,
) -> Iterator[OpenedModel]:
    """Hold the primary's files, and sessions with the other parties.

    Args:
        job: The primary's.
        identity: Its own; None reads it from the job's folder.
        processes: Those of the other parties, where this process has started them.
    """
    with party_session(job, identity=identity) as party:
        config = party.config
        model = load_model(job.folder / FOLDER, config, party=job.name)
        star = _Star()
        # Another server or request on this table ends here, before it says that it is ready.
        party.files.hold_ledger()
        party.files.log("serving", run=model.run)
        yield OpenedModel(
            model=Model(
                open=lambda: predicting(party, model, opened=star.hold),
                rows=_reader(config, model),
                interrupt=star.end,
            ),
            served=_describe(config, model),
            processes=processes,
        )
        party.files.log("done")


class _Star:
    """The primary's end of the star, as long as it waits for parties."""

    def __init__(self) -> None:
        self._transport: PrimaryTransport | None = None

    def hold(self, transport: PrimaryTransport) -> None:
        self._transport = transport

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort("the server was stopped")


def _reader(config: FederationConfig, model: SavedModel) -> Callable[[pd.DataFrame], NamedRows]:
    return lambda frame: rows_of_frame(config, model, frame, id_column=None, where="rows")


def _describe(config: FederationConfig, model: SavedModel) -> Served:
    """Return the description of a model for the API."""
    keys, part = key_spec(config), model.primary_part
    texts: Mapping[str, str] = {}
    if not keys.are_numbers:
        texts = dict(zip(config.primary.key, keys.kinds.values(), strict=True))
    return Served(
        federation=model.federation,
        run=model.run,
        task=part.head.task,
        classes=part.classes,
        rows=RowFormat.of(schema_of(model), texts),  # type: ignore[arg-type]
    )


@contextmanager
def _others_in_processes(
    config: FederationConfig, options: RunOptions
) -> Iterator[tuple[FederationConfig, Identity, Launch]]:
    """Run every party except the primary in its own process, ready for requests.

    Args:
        config: The federation file; addresses and identities are replaced by this run's own.
        options: Of the run that trained. Observed are every party's warnings, and restarts of
            parties that have ended.

    Yields:
        The federation file as these parties have it, the primary's identity, and the processes.

    Raises:
        ConfigError: If one cannot be started.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """

    def on_event(_name: str, report: Mapping[str, Any]) -> None:
        event = launching.event_of(report)
        if isinstance(event, Warned):
            options.observe(event)

    def on_end(name: str, why: str) -> None:
        options.observe(Warned(text=f"{name}: {why}; it is started again"))

    primary = config.primary.name
    with launching.parties_here(config) as here:
        left_out = {primary, *idle_helpers(config)}
        commands = here.commands(options, of_all=["--serve"], without=left_out)
        with keeping(commands, on_event=on_event, on_end=on_end) as launch:
            yield here.config, here.identities[primary], launch


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


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 64
"""Most connections that wait to be accepted."""

_GRACE_S: Final = 30


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


def application(opened: OpenedModel, token: Token, settings: ServerSettings) -> ASGIApp:
    """Return the guarded application with its asker.

    Args:
        opened: The model.
        token: Token that clients must send.
        settings: Settings of the server.
    """
    asker = Asker(
        opened.model,
        most_rows=settings.max_rows,
        gather_s=settings.gather_s,
        clock=time.monotonic,
    )
    return Guard(
        make_app(
            opened.served,
            asker,
            Rate(settings.rate, time.monotonic),
            max_rows=settings.max_rows,
        ),
        token=token,
        max_bytes=settings.max_bytes,
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
    return uvicorn.Server(config)


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
