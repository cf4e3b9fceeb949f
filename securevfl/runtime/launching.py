"""A whole federation on this machine: one process per party, restarted where it was killed."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.config.rules import require_helpers, require_own_files
from securevfl.config.sections import parse_address
from securevfl.core import errors, files, progress
from securevfl.core.formatting import toml_text
from securevfl.core.memory import give_back_memory, loading
from securevfl.core.stages import load_session
from securevfl.data.tables import PartyTable
from securevfl.federation.checkpoint import has_begun
from securevfl.federation.session.membership import idle_helpers
from securevfl.launch.process import PartyCommand, PartyExit, PartyFailure
from securevfl.launch.spawn import reserved_port, run_party_processes
from securevfl.runtime import handing_over
from securevfl.runtime.party import PartySession, party_session
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.run_folder import RunFigures, write_figures
from securevfl.runtime.run_options import PartyJob, PredictionJob, Program, RunOptions
from securevfl.transport.identity import Identity, fleeting

if TYPE_CHECKING:
    import pandas as pd


def going_on(command: PartyCommand, run_folder: Path) -> PartyCommand:
    """Return the command that resumes a party, or starts it if it never began the run."""
    begun = has_begun(run_folder / "parties" / command.name)
    resume = ["--resume"] if begun and "--resume" not in command.arguments else []
    return replace(command, arguments=[*command.arguments, *resume])


class StartAgain:
    """Says how parties that were killed are started again, as often as a run may be lost."""

    def __init__(
        self, config: FederationConfig, run_folder: Path, observe: progress.Observer
    ) -> None:
        self._config, self._run_folder, self._observe = config, run_folder, observe
        self._killed = 0
        self._away: set[str] = set()
        # Once for each that was killed, at most: no mistake of ours may go round for ever.
        self._called_back: Counter[str] = Counter()

    def note_event(self, name: str, event: progress.ProgressEvent | None) -> None:
        """Note a party's first event in a session: its planned spending, or that it helps."""
        helps = self._config.party(name).is_helper
        if isinstance(event, progress.Stage if helps else progress.SpendingPlanned):
            self._away.discard(name)

    def __call__(self, command: PartyCommand, failure: PartyFailure | None) -> PartyCommand | None:
        """Return how a party is started again; None: it is not.

        Args:
            command: How it was started.
            failure: What became of it; None: it has ended well.
        """
        if failure is None:
            # It ended with a session that one of those who are still away was killed in: that one
            # has the end of the run before it, and for that needs those who are through.
            if not self._is_needed() or self._called_back[command.name] >= self._killed:
                return None
            self._called_back[command.name] += 1
        else:
            self._killed += 1
            if self._killed >= self._config.runtime.most_losses:
                return None
            self._observe(
                progress.Warned(text=f"{failure.party}: {failure.reason}; it is started again")
            )
            self._away.add(command.name)
        return going_on(command, self._run_folder)

    def _is_needed(self) -> bool:
        """Whether a party is away that the run needs to end."""
        return bool(self._away)


# Longer than any run on one machine: real deadlines are those of [runtime].
_LAUNCH_DEADLINE_S = 7 * 24 * 3600.0

# Events of any party that the user sees; of others, the primary's alone.
_OF_ALL = (
    progress.Warned,
    progress.SpendingPlanned,
    progress.LinksCounted,
    progress.CiphertextsMade,
)

# Placeholders among a party's arguments for content that it is handed.
_FEDERATION: Final = "FED.toml"
_IDENTITY: Final = "IDENTITY"
_HANDED: Final = "HANDED"

_PROGRAM: Final = (sys.executable, "-m", "securevfl.cli.main")
_FORK_SERVER: Final = "securevfl.cli.fork_server_program"

OUTCOME_EVENT: Final = "outcome"
"""Last event of a launched primary: the run's figures, or those of its predictions."""


def train_in_processes(
    config: FederationConfig,
    options: RunOptions,
    *,
    tables: Mapping[str, PartyTable] = MappingProxyType({}),
    with_alone: bool = True,
) -> RunFigures:
    """Run every party of a federation in its own process on this machine.

    Args:
        config: The federation file; addresses and identities are replaced by this run's own.
        options: Where and how. The run folder gets no report. Observed are the primary's progress,
            every party's warnings and spending, and the ciphertexts that secondaries prepare.
        tables: Parties' tables by name, where they are in memory.
        with_alone: Whether to find the local baseline, the primary's best model alone.

    Returns:
        The run's figures, as ``metrics.json`` has them.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    in_memory: dict[str, dict[str, Any]] = _tables_by_party(tables)
    own = {"base": options.base, "top": options.top, "with_alone": with_alone}
    in_memory.setdefault(config.primary.name, {}).update(own)
    content, exits = _run_parties(config, options, in_memory=in_memory)
    try:
        figures = RunFigures.from_json(content)
    except (TypeError, KeyError):
        raise errors.SecureVflError("the primary ended without the figures of a run") from None
    memory = {name: end.peak_memory_bytes for name, end in exits.items()}
    figures = replace(figures, peak_memory_bytes=memory)
    write_figures(options.run_folder, figures)
    return figures


def predict_in_processes(
    config: FederationConfig,
    options: RunOptions,
    prediction: PredictionJob,
    *,
    tables: Mapping[str, PartyTable] = MappingProxyType({}),
) -> dict[str, Any]:
    """Predict new rows, every party in its own process; see :func:`train_in_processes`.

    Args:
        config: The federation file.
        options: Of the run that trained.
        prediction: The new rows.
        tables: Parties' tables by name, where they are in memory.

    Returns:
        What :meth:`Predictions.metadata` says; the primary has written the file.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real request reveals. This machine holds all of it.
    """
    in_memory: dict[str, dict[str, Any]] = _tables_by_party(tables)
    in_memory.setdefault(config.primary.name, {})["prediction"] = prediction
    content, _ = _run_parties(
        config,
        options,
        of_all=["--serve", "--once"],
        without=[*prediction.without, *idle_helpers(config)],
        in_memory=in_memory,
    )
    return dict(content)


def processes_with_program(
    config: FederationConfig,
    options: RunOptions,
    program: Program,
    frames: "Mapping[str, pd.DataFrame]",
) -> None:
    """Run a program between all parties, each in its own process; see :func:`train_in_processes`.

    Args:
        config: The federation file, which pins the program.
        options: Where and how.
        program: The program.
        frames: Parties' tables by name, where they are in memory.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what the program opens. This machine holds all of it.
    """
    named = ["--program", str(program.path), "--function", program.function]
    without = [party.name for party in config.parties if party.role == "coordinator"]
    in_memory = {name: {"frame": frame} for name, frame in frames.items()}
    _run_parties(config, options, of_all=named, without=without, in_memory=in_memory)


def _tables_by_party(tables: Mapping[str, PartyTable]) -> dict[str, dict[str, Any]]:
    """Return what parties have from memory: fields of :class:`PartyJob`, by party name."""
    return {name: {"table": table} for name, table in tables.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class _PartiesHere:
    """A federation whose parties are processes of this machine, with identities of their own."""

    config: FederationConfig
    identities: Mapping[str, Identity]

    def commands(
        self,
        options: RunOptions,
        *,
        of_all: Sequence[str],
        without: Collection[str] = (),
        in_memory: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> list[PartyCommand]:
        """Return how each party is started.

        Args:
            options: Where and how.
            of_all: Arguments of all parties, which serve a kept model or run a program; else none.
            without: Parties that are not started.
            in_memory: Fields of :class:`PartyJob` that parties have from no file, by party name.

        Raises:
            ConfigError: If a process could not import the family, or what it has from memory.
        """
        names, most = list(self.identities), options.record_mib
        record = [] if most is None else ["--record-views", f"{most:g}"]
        log_name = "predictions.log" if "--serve" in of_all else "output.log"
        # Handed over and written nowhere: not even a launcher that is killed leaves a key behind,
        # and what lies in the run folder belongs to a run that has begun.
        federation = toml_text(self.config.source).encode()
        threads = threads_each(len(names))
        return [
            PartyCommand(
                name=name,
                program=_PROGRAM,
                # A GPU's driver does not survive a fork.
                fork_server=_FORK_SERVER if options.device.type == "cpu" else None,
                arguments=[
                    *("party", _FEDERATION, "--name", name, "--identity", _IDENTITY),
                    *("--out", str(options.run_folder), "--data-root", str(options.data_root)),
                    *("--device", str(options.device), "--handed", _HANDED),
                    *record,
                    *of_all,
                ],
                log_path=options.run_folder / "parties" / name / log_name,
                environment={
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                },
                handed={
                    _FEDERATION: federation,
                    _IDENTITY: self.identities[name].bundle(),
                    _HANDED: handing_over.dump(in_memory.get(name, {}), self.config.family),
                },
            )
            for name in names
            if name not in without
        ]


def threads_each(processes: int) -> str:
    """Return how many threads each of several processes should have.

    They share the cores; more threads than cores fight for them. A number that the user has set
    stands: with it, a simulation adds float32 numbers in the same order.
    """
    shared = str(max(1, (os.cpu_count() or 1) // processes))
    return os.environ.get("OMP_NUM_THREADS", shared)


@contextmanager
def parties_here(config: FederationConfig) -> Iterator[_PartiesHere]:
    """Give every party an identity, and the primary a port that is kept for it.

    Raises:
        ConfigError: If the primary's address is none of this machine.
        SecureVflError: What the rules for parties of their own say.
    """
    require_covered_channels(config)
    require_helpers(config)
    identities = fleeting([party.name for party in config.parties])
    host, port = parse_address(config.address)
    with ExitStack() as kept:
        if not port:
            try:
                port = kept.enter_context(reserved_port(host))
            except OSError as error:
                raise errors.ConfigError(
                    f"party.address: {host} is no address of this machine "
                    f'({error.strerror or error}); use "127.0.0.1:0" for a run on one machine'
                ) from None
        texts = {name: own.public_text for name, own in identities.items()}
        here = pin_identities(config, texts, address=f"{host}:{port}")
        yield _PartiesHere(config=here, identities=identities)


def _run_parties(
    config: FederationConfig,
    options: RunOptions,
    *,
    of_all: Sequence[str] = (),
    without: Sequence[str] = (),
    in_memory: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[Mapping[str, Any], dict[str, PartyExit]]:
    """Run all parties; return the primary's outcome, and how each process ended."""
    run_folder = options.run_folder
    primary = config.primary.name
    outcome: dict[str, Any] = {}
    again = StartAgain(config, run_folder, options.observe)
    require_own_files(config, options.data_root)

    def on_event(name: str, report: Mapping[str, Any]) -> None:
        if name == primary and report.get("event") == OUTCOME_EVENT:
            outcome.update(_figures_of(report))
        event = event_of(report)
        again.note_event(name, event)
        if event is not None and (name == primary or isinstance(event, _OF_ALL)):
            options.observe(event)

    with parties_here(config) as here:
        commands = here.commands(options, of_all=of_all, without=without, in_memory=in_memory)
        files.require_writable_folder(run_folder)
        if options.resume:
            commands = [going_on(command, run_folder) for command in commands]
        try:
            exits = run_party_processes(
                commands,
                deadline_s=_LAUNCH_DEADLINE_S,
                on_event=on_event,
                again=again if config.runtime.on_loss != "stop" else None,
            )
        finally:
            if not of_all:  # others may be serving this model, and write
                files.remove_unfinished(run_folder)
    return outcome, exits


def _figures_of(report: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "event"}


def event_of(report: Mapping[str, Any]) -> progress.ProgressEvent | None:
    """Return what a party reports as progress; None of other reports."""
    return progress.event_of(str(report.get("event")), _figures_of(report))


def pin_identities(
    config: FederationConfig, texts: Mapping[str, str], *, address: str
) -> FederationConfig:
    """Return a federation with its parties' public identities, and the primary's address."""
    source = dict(config.source)
    source["party"] = [
        {**party, "identity": texts[party["name"]]} for party in config.source["party"]
    ]
    for party in source["party"]:
        if party["role"] == "primary":
            party["address"] = address
    trains = not config.mpc.program
    return parse_federation(source, file="federation.toml of this run", only_linkage=not trains)


Outcome = RunFigures | Predictions | None


def run_party(job: PartyJob, *, identity: Identity | None = None) -> Outcome:
    """Run one party to the end; the primary returns the run's figures.

    Where it serves a kept model, the primary returns the predictions that it was asked for. Where
    the federation file says so, a session that is lost is followed by the next one.

    Args:
        job: The party's job.
        identity: Its long-term identity; None reads it from the job's folder.

    Raises:
        SecureVflError: Whatever went wrong, here or at another party, named.

    Reveals:
        What the messages of :mod:`securevfl.transport.message` say, and nothing else.
    """
    losses = 0
    while True:
        try:
            with party_session(job, identity=identity) as party:
                identity = party.identity
                return _run_session(party)
        except (errors.PartyLostError, errors.PartyTimeoutError) as error:
            losses += 1
            job = _after(error, job, losses)
            job.observe(progress.SessionLost(why=str(error), wait_s=job.join_timeout_s))


def _run_session(party: PartySession) -> Outcome:
    """Run one session to its end."""
    job = party.job
    party.files.log(
        "start",
        role=job.config.party(job.name).role,
        digest=job.config.digest,
        resume=party.files.resume,
    )
    if job.after_loss:
        give_back_memory()
    with loading():
        begin = _role_of(job)
    ended = begin(party)
    party.files.log("done")
    return ended


def _after(error: errors.ProtocolError, job: PartyJob, losses: int) -> PartyJob:
    """Return what this party does after a session that was lost, or raise why it was.

    Whoever is lost, all parties leave the session, and join the next one: so that all agree from
    where they go on, by what each of them has on its disk.
    """
    runtime = job.config.runtime
    if job.serves or runtime.on_loss == "stop" or isinstance(error, errors.PartyAbsentError):
        raise error
    if losses >= runtime.most_losses:
        ended = errors.PartyFailedError(
            f"{error}; the run was lost {losses} times, which is runtime.most_losses; go on with "
            f"--resume"
        )
        ended.party = error.party
        raise ended from None
    # One that was never in a session is another one's second, or has been killed and started again
    # before the primary has noticed: that is soon known.
    second = isinstance(error, errors.PartyTwiceError) and not job.returning
    begun = has_begun(job.folder)
    return replace(job, after_loss=True, resume=job.resume or begun, may_be_second=second)


def _role_of(job: PartyJob) -> Callable[[PartySession], Outcome]:
    """Return what a party does from joining to the end.

    Each is imported where it is chosen: no process loads what another role alone needs, and a
    party that only helps needs neither CrypTen nor tables.
    """
    role, serves = job.config.party(job.name).role, job.serves
    if job.program is not None:
        session: Callable[[PartySession], None] = load_session()
        return session
    if role == "primary" and serves:
        from securevfl.runtime.primary_party import predict_once

        return predict_once
    if role == "primary":
        from securevfl.runtime.primary_party import run_primary

        return run_primary
    if role == "secondary" and serves:
        from securevfl.runtime.secondary_party import serve_as_secondary

        return serve_as_secondary
    if role == "secondary":
        from securevfl.runtime.secondary_party import run_secondary

        return run_secondary
    from securevfl.runtime.party import run_helper, serve_as_helper

    return serve_as_helper if serves else run_helper
