"""A whole federation on this machine: one process per party, restarted where it was killed."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import tomli_w

from securevfl.config.federation import FederationConfig
from securevfl.config.losses import goes_on
from securevfl.config.parties import parse_address
from securevfl.config.reading import parse_federation
from securevfl.config.rules import require_covered_channels, require_helpers
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.progress import (
    CiphertextsMade,
    LinksCounted,
    Observer,
    ProgressEvent,
    SpendingPlanned,
    Stage,
    Warned,
    event_of,
)
from securevfl.federation.checkpoint import has_begun
from securevfl.federation.session.membership import idle_helpers
from securevfl.launch.process import PartyCommand, PartyExit, PartyFailure
from securevfl.launch.spawn import KeptProcesses, keeping, reserved_port, run_party_processes
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.party_job import NewRows
from securevfl.runtime.run_folder import write_figures
from securevfl.transport.identity import Identity, fleeting

# How a launcher starts parties again: those that were killed, and those that these need.


def going_on(command: PartyCommand, run_folder: Path) -> PartyCommand:
    """Return how a party goes on, or begins if it was lost before it knew of the run."""
    begun = has_begun(run_folder / "parties" / command.name)
    resume = ["--resume"] if begun and "--resume" not in command.arguments else []
    return replace(command, arguments=[*command.arguments, *resume])


class StartAgain:
    """Says how parties that were killed are started again, as often as a run may be lost."""

    def __init__(self, config: FederationConfig, run_folder: Path, observe: Observer) -> None:
        self._config, self._run_folder, self._observe = config, run_folder, observe
        self._killed = 0
        self._away: set[str] = set()
        # Once for each that was killed, at most: no mistake of ours may go round for ever.
        self._called_back: Counter[str] = Counter()

    def heard(self, name: str, event: ProgressEvent | None) -> None:
        """Note what a party tells as soon as it is in a session: its spending, or its helping."""
        helps = self._config.party(name).is_helper
        if isinstance(event, Stage if helps else SpendingPlanned):
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
            self._observe(Warned(text=f"{failure.party}: {failure.reason}; it is started again"))
            self._away.add(command.name)
        return going_on(command, self._run_folder)

    def _is_needed(self) -> bool:
        """Whether somebody is away without whom no run ends."""
        if goes_on(self._config):
            return self._config.primary.name in self._away
        return bool(self._away)


# A whole federation on this machine: one process per party, with identities for this run only.

# Longer than any run on one machine: real deadlines are those of [runtime].
_LAUNCH_DEADLINE_S = 7 * 24 * 3600.0

# Events of any party that the user sees; of others, the primary's alone.
_OF_ALL = (Warned, SpendingPlanned, LinksCounted, CiphertextsMade)

# What stands among a party's arguments for what it is handed.
_FEDERATION: Final = "FED.toml"
_IDENTITY: Final = "IDENTITY"

_PROGRAM: Final = (sys.executable, "-m", "securevfl.cli.main")
_NURSERY: Final = "securevfl.cli.nursery_program"

OUTCOME_EVENT: Final = "outcome"
"""What a launched primary tells last: the run's figures, or those of pretraining."""


def train_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    resume: bool,
    device: str,
    observe: Observer,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> RunFigures:
    """Run every party of a federation in its own process on this machine.

    Args:
        config: The federation file; addresses and identities are replaced by this run's own.
        run_folder: Gets the files that docs/run-folder.md lists, but no report.
        data_root: Where relative data paths start.
        resume: Go on from the last epoch that was saved.
        device: Where each party computes.
        observe: Hears the primary's progress, every party's warnings and spending, and the
            ciphertexts that secondaries prepare.
        beside: Returns figures of :class:`RunFigures` that are computed once the run is done.

    Returns:
        The run's figures, as ``metrics.json`` has them.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    told, exits = _run_parties(
        config, run_folder, data_root, resume=resume, device=device, observe=observe, more=[]
    )
    try:
        figures = RunFigures.from_json(told)
    except (TypeError, KeyError):
        raise SecureVflError("the primary ended without the figures of a run") from None
    memory = {name: end.peak_memory_bytes for name, end in exits.items()}
    figures = replace(figures, peak_memory_bytes=memory, **beside())
    write_figures(run_folder, figures)
    return figures


def pretrain_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    resume: bool,
    device: str,
    observe: Observer,
) -> dict[str, Any]:
    """Pretrain every party's encoders in its own process; see :func:`train_in_processes`.

    Returns:
        What ``pretraining.json`` holds, without its history.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real pretraining reveals. This machine holds all of it.
    """
    told, _ = _run_parties(
        config,
        run_folder,
        data_root,
        resume=resume,
        device=device,
        observe=observe,
        more=["--pretrain"],
    )
    return dict(told)


def predict_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    new: NewRows,
    device: str,
    observe: Observer,
) -> dict[str, Any]:
    """Predict new rows, every party in its own process; see :func:`train_in_processes`.

    Returns:
        What :meth:`Predictions.told` says; the primary has written the file.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real request reveals. This machine holds all of it.
    """
    asked = ["--rows", str(new.path), "--predictions", str(new.out)]
    if new.without:
        asked += ["--without", ",".join(new.without)]
    told, _ = _run_parties(
        config,
        run_folder,
        data_root,
        resume=False,
        device=device,
        observe=observe,
        more=[*asked, *([] if new.id_column is None else ["--id", new.id_column])],
        of_all=["--serve", "--once"],
        log_name="predictions.log",
        without=[*new.without, *idle_helpers(config)],
    )
    return dict(told)


@contextmanager
def others_in_processes(
    config: FederationConfig,
    run_folder: Path,
    *,
    data_root: Path,
    device: str,
    observe: Observer,
) -> Iterator[tuple[FederationConfig, Identity, KeptProcesses]]:
    """Keep every party but the primary running in its own process, answering for its kept model.

    Args:
        config: The federation file; addresses and identities are replaced by this run's own.
        run_folder: Of the run that trained.
        data_root: Where relative data paths start.
        device: Where each party computes.
        observe: Hears every party's warnings, and of those that have ended and start again.

    Yields:
        The federation file as these parties have it, the primary's identity, and the processes.

    Raises:
        ConfigError: If one cannot be started.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    require_covered_channels(config)
    require_helpers(config)

    def on_event(_name: str, report: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in report.items() if key != "event"}
        event = event_of(str(report.get("event")), figures)
        if isinstance(event, Warned):
            observe(event)

    def on_end(name: str, why: str) -> None:
        observe(Warned(text=f"{name}: {why}; it is started again"))

    primary = config.primary.name
    with _parties_here(config) as here:
        commands = here.commands(
            run_folder,
            data_root,
            device=device,
            of_all=["--serve"],
            of_primary=[],
            log_name="predictions.log",
        )
        left_out = {primary, *idle_helpers(config)}
        others = [command for command in commands if command.name not in left_out]
        with keeping(others, on_event=on_event, on_end=on_end) as kept:
            yield here.config, here.identities[primary], kept


@dataclass(frozen=True, kw_only=True, eq=False)
class _PartiesHere:
    """A federation whose parties are processes of this machine, with identities of their own."""

    config: FederationConfig
    identities: Mapping[str, Identity]

    def commands(
        self,
        run_folder: Path,
        data_root: Path,
        *,
        device: str,
        of_all: Sequence[str],
        of_primary: Sequence[str],
        log_name: str,
    ) -> list[PartyCommand]:
        """Return how each party is started."""
        names = list(self.identities)
        # Handed over and written nowhere: not even a launcher that is killed leaves a key behind,
        # and what lies in the run folder belongs to a run that has begun.
        federation = tomli_w.dumps(dict(self.config.source)).encode()
        # Parties share the cores; more threads than cores fight for them. A number that the user
        # has set stands: with it, a simulation adds float32 numbers in the same order.
        shared = str(max(1, (os.cpu_count() or 1) // len(names)))
        threads = os.environ.get("OMP_NUM_THREADS", shared)
        return [
            PartyCommand(
                name=name,
                program=_PROGRAM,
                # A GPU's driver does not survive a fork.
                nursery=_NURSERY if device == "cpu" else None,
                arguments=[
                    *("party", _FEDERATION, "--name", name, "--identity", _IDENTITY),
                    *("--out", str(run_folder), "--data-root", str(data_root)),
                    *("--device", device),
                    *of_all,
                    *(of_primary if name == self.config.primary.name else []),
                ],
                log_path=run_folder / "parties" / name / log_name,
                environment={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                handed={_FEDERATION: federation, _IDENTITY: self.identities[name].bundle()},
            )
            for name in names
        ]


@contextmanager
def _parties_here(config: FederationConfig) -> Iterator[_PartiesHere]:
    """Give every party an identity, and the primary a port that is kept for it."""
    identities = fleeting([party.name for party in config.parties])
    assert config.primary.address is not None, "checked with the federation file"
    host, port = parse_address(config.primary.address)
    with ExitStack() as kept:
        if not port:
            try:
                port = kept.enter_context(reserved_port(host))
            except OSError as error:
                raise ConfigError(
                    f"party.address: {host} is no address of this machine "
                    f'({error.strerror or error}); use "127.0.0.1:0" for a run on one machine'
                ) from None
        pinned = {name: own.public_text for name, own in identities.items()}
        here = _pin(config, pinned, address=f"{host}:{port}")
        yield _PartiesHere(config=here, identities=identities)


def _run_parties(
    config: FederationConfig,
    run_folder: Path,
    data_root: Path,
    *,
    resume: bool,
    device: str,
    observe: Observer,
    more: Sequence[str],
    of_all: Sequence[str] = (),
    log_name: str = "output.log",
    without: Sequence[str] = (),
) -> tuple[Mapping[str, Any], dict[str, PartyExit]]:
    """Run all parties; return what the primary tells in the end, and how each process ended."""
    require_covered_channels(config)
    require_helpers(config)
    files.require_writable_folder(run_folder)
    primary = config.primary.name
    outcome: dict[str, Any] = {}
    again = StartAgain(config, run_folder, observe)

    def on_event(name: str, report: Mapping[str, Any]) -> None:
        figures = {key: value for key, value in report.items() if key != "event"}
        if name == primary and report.get("event") == OUTCOME_EVENT:
            outcome.update(figures)
        event = event_of(str(report.get("event")), figures)
        again.heard(name, event)
        if event is not None and (name == primary or isinstance(event, _OF_ALL)):
            observe(event)

    def may_be_missing(name: str) -> bool:
        if name == primary or not goes_on(config):
            return False
        # Until it has ended, the primary goes on without them or fails itself.
        absences = outcome.get("absences") or ()
        gone = {one["party"] for one in absences if one["to_epoch"] is None}
        return not outcome or name in gone

    with _parties_here(config) as here:
        commands = [
            command
            for command in here.commands(
                run_folder,
                data_root,
                device=device,
                of_all=of_all,
                of_primary=more,
                log_name=log_name,
            )
            if command.name not in without
        ]
        if resume:
            commands = [going_on(command, run_folder) for command in commands]
        try:
            exits = run_party_processes(
                commands,
                deadline_s=_LAUNCH_DEADLINE_S,
                on_event=on_event,
                again=again if config.runtime.on_loss != "stop" else None,
                may_be_missing=may_be_missing,
            )
        finally:
            if not of_all:  # others may be serving this model, and write
                files.remove_unfinished(run_folder)
    return outcome, exits


def _pin(config: FederationConfig, pinned: Mapping[str, str], *, address: str) -> FederationConfig:
    source = dict(config.source)
    source["party"] = [
        {**party, "identity": pinned[party["name"]]} for party in config.source["party"]
    ]
    for party in source["party"]:
        if party["role"] == "primary":
            party["address"] = address
    return parse_federation(source, file="federation.toml of this run")
