"""Openers of a server's backend: parties in this process, in child processes, or elsewhere."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from securevfl.config.federation import FederationConfig, key_spec
from securevfl.core.errors import ConfigError, PartyFailedError, PartyTimeoutError
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.federation.session.membership import active_without, idle_helpers
from securevfl.launch.spawn import KeptProcesses, keeping
from securevfl.runtime import launching
from securevfl.runtime.party import PartySession, party_session
from securevfl.runtime.prediction_session import NamedRows, PredictionSession
from securevfl.runtime.primary_party import PredictingPrimary, predicting
from securevfl.runtime.run_options import PartyJob, RunOptions
from securevfl.runtime.run_tables import rows_of_frame, schema_of
from securevfl.runtime.trained_run import TrainedRun
from securevfl.serving.api import Served
from securevfl.serving.asking import Model
from securevfl.serving.json_rows import RowFormat
from securevfl.transport.identity import Identity
from securevfl.transport.star import PrimaryTransport


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """Saved model with its parties ready for requests."""

    model: Model
    kept: SavedModel
    rows: RowFormat
    processes: KeptProcesses | None = None
    """Processes of the other parties, if they run on this machine."""

    def describe(self, *, max_rows: int) -> Served:
        """Return its description for the API."""
        part = self.kept.primary_part
        return Served(
            federation=self.kept.federation,
            run=self.kept.run,
            task=part.head.task,
            classes=part.classes,
            rows=self.rows,
            max_rows=max_rows,
        )


@contextmanager
def open_model(
    run: TrainedRun, *, observe: Observer, without_lost: bool = False
) -> Iterator[OpenedModel]:
    """Load a run's model, and prepare requests to its parties.

    The parties of a simulated run are in this process, and those of a run on this machine in one
    process each. With an identity, this is the primary, and the other parties join from elsewhere
    (``securevfl party --serve``). A model that answers alone asks nobody.

    Args:
        run: The run that trained.
        observe: Receives progress events.
        without_lost: Whether to go on without a secondary that was lost, between processes.

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
        with between_processes(run.primary_job(observe), without_lost=without_lost) as served:
            yield served
    else:
        with (
            _others_in_processes(run.config, run.options(observe)) as (config, place, processes),
            between_processes(
                replace(run.primary_job(observe), config=config),
                identity=place,
                processes=processes,
                without_lost=without_lost,
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
        kept=own,
        rows=_rows(config, own),
    )


@contextmanager
def between_processes(
    job: PartyJob,
    *,
    identity: Identity | None = None,
    processes: KeptProcesses | None = None,
    without_lost: bool = False,
) -> Iterator[OpenedModel]:
    """Hold the primary's files, and sessions with the other parties.

    Args:
        job: The primary's.
        identity: Its own; None reads it from the job's folder.
        processes: Those of the other parties, where this process has started them.
        without_lost: Whether a session goes on without a secondary that the one before it lost.
    """
    with party_session(job, identity=identity) as party:
        config = party.config
        model = load_model(job.folder / FOLDER, config, party=job.name)
        star = _Star()
        # Another server or request on this table ends here, before it says that it is ready.
        party.files.hold_ledger()
        party.files.log("serving", run=model.run)
        going_on = WithoutLost(party, model, opened=star.hold, observe=job.observe)
        yield OpenedModel(
            model=Model(
                open=going_on.session
                if without_lost
                else lambda: predicting(party, model, opened=star.hold),
                rows=_reader(config, model),
                interrupt=star.end,
            ),
            kept=model,
            rows=_rows(config, model),
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


def _rows(config: FederationConfig, model: SavedModel) -> RowFormat:
    keys = key_spec(config)
    texts: Mapping[str, str] = {}
    if not keys.are_numbers:
        texts = dict(zip(config.primary.key, keys.kinds.values(), strict=True))
    return RowFormat.of(schema_of(model), texts)  # type: ignore[arg-type]


@contextmanager
def _others_in_processes(
    config: FederationConfig, options: RunOptions
) -> Iterator[tuple[FederationConfig, Identity, KeptProcesses]]:
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
        with keeping(commands, on_event=on_event, on_end=on_end) as kept:
            yield here.config, here.identities[primary], kept


class WithoutLost:
    """Sessions of predictions without the secondaries that earlier sessions have lost.

    One that was lost stays out until the server is started again: it is turned away when it comes
    back, so that no session ends for it.
    """

    def __init__(
        self,
        life: PartySession,
        model: SavedModel,
        *,
        opened: Callable[[PrimaryTransport], None],
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            life: The primary's.
            model: Its half of the network.
            opened: See :func:`predicting`.
            observe: Is warned of every secondary that is lost.
        """
        self._life = life
        self._model = model
        self._opened = opened
        self._observe = observe
        self.lost: tuple[str, ...] = ()
        """Names of the lost secondaries."""

    @contextmanager
    def session(self) -> Iterator[PredictingPrimary]:
        """Hold a session with those that are left; see :func:`predicting`.

        Raises:
            ProtocolError: If a party is lost. The next session goes on without it, if enough
                secondaries are left.
        """
        try:
            with predicting(
                self._life, self._model, opened=self._opened, without=self.lost
            ) as session:
                yield session
        except (PartyTimeoutError, PartyFailedError) as error:
            self._leave_out([] if error.party is None else error.party.split(", "))
            raise

    def _leave_out(self, names: list[str]) -> None:
        config = self._life.config
        secondaries = [party.name for party in config.secondaries]
        fresh = [name for name in names if name in secondaries and name not in self.lost]
        if not fresh:
            return
        without = tuple(name for name in secondaries if name in (*self.lost, *fresh))
        try:
            enough = bool(active_without(config, without))
        except ConfigError:
            enough = False
        if not enough:
            self._observe(
                Warned(
                    text=f"{', '.join(fresh)}: lost, and too few secondaries are left to go on "
                    f"(prediction.least_secondaries); waiting for it"
                )
            )
            return
        self.lost = without
        self._observe(
            Warned(text=f"{', '.join(fresh)}: lost; predictions go on without it and say so")
        )
