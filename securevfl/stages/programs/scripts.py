"""A program that parties run, each in a process of its own: started here, by torchrun or CrypTen.

Processes of one machine and one user find each other by ``RANK``, ``WORLD_SIZE`` and
``RENDEZVOUS``, as under CrypTen's launcher, or by what torchrun sets. They tell each other their
certificates in a folder that no other user can read; keys stay where they were made.
"""

import functools
import hashlib
import inspect
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

from securevfl.config.reading import parse_federation
from securevfl.core import checks, errors, files, interrupts
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, unheard
from securevfl.data.tables import PartyTable
from securevfl.launch import child, process, spawn
from securevfl.runtime import entry, launching, run_folder, run_options, run_settings
from securevfl.runtime.simulation import RunResult
from securevfl.transport import identity as identities


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """One of several processes that were started together, one for each party."""

    rank: int
    """Position among them from 0 on; 0 is the primary."""

    size: int
    """Number of processes, 2 or more."""

    name: str
    """Name of this start of them all: no other has the same."""

    place: Path
    """Folder for exchanging identities; it may not exist yet."""

    def meeting(self, folder: Path) -> Path:
        """Return the file by which the processes find one another, in a folder that they share."""
        return folder / f"meeting-{self.name}"


def detect_torchrun() -> Started | None:
    """Return this process's place among those started together; None if it is the only one.

    It is read from CrypTen's variables ``RANK``, ``WORLD_SIZE`` and ``RENDEZVOUS``, or from
    torchrun's.

    Raises:
        ConfigError: If the processes are on several machines.
    """
    environment = os.environ
    by_file = {"RANK", "WORLD_SIZE", "RENDEZVOUS"} <= environment.keys()
    if not by_file and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if size == 1:
        return None
    if by_file:
        _, _, path = environment["RENDEZVOUS"].partition("file://")
        if not path.startswith("/"):
            raise ConfigError(
                f"RENDEZVOUS: must be file:///PATH, of a file that is not there yet, got "
                f"{environment['RENDEZVOUS']!r}; on several machines run securevfl party"
            )
        name = hashlib.sha256(path.encode()).hexdigest()[:16]
        return Started(rank=rank, size=size, name=name, place=Path(f"{path}.parties"))
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise ConfigError(
            "torchrun: all parties of a program must be on one machine; use --nproc-per-node, "
            "not --nnodes, or run securevfl party on each machine"
        )
    # The starting agent's process, its port, and the number of restarts.
    name = (
        f"{os.getppid()}-{environment['MASTER_PORT']}-{environment['TORCHELASTIC_RESTART_COUNT']}"
    )
    place = Path(tempfile.gettempdir()) / f"securevfl-{os.getuid()}-{name}"
    return Started(rank=rank, size=size, name=name, place=place)


T = TypeVar("T")

_MEETING_S: Final = 120.0
"""Seconds that processes wait for one another before a training."""
_POLL_S: Final = 0.02


@dataclass(kw_only=True, eq=False)
class ThisParty:
    """The party that this process is, as its program sees it."""

    rank: int
    """0 is the primary; helpers, where the settings need such, come last."""
    world_size: int
    """How many processes there are."""
    meeting: Path = field(repr=False)
    """Folder in which they tell each other who they are."""
    _trainings: int = field(default=0, init=False, repr=False)

    def train(
        self,
        table: PartyTable | None,
        model: Any = None,
        *,
        out: str | Path | None = None,
        observe: Observer = unheard,
        **settings: Unpack[run_settings.RunSettings],
    ) -> RunResult | None:
        """Train with the other processes, each of which calls this with its own table.

        Args:
            table: This party's, from :func:`securevfl.data.from_frame`; None of a helper.
            model: As of :func:`securevfl.train`, the same in all processes, as all settings are.
            out: Run folder; default: a temporary one of this process.
            observe: Called with this party's progress.
            **settings: As of :func:`securevfl.train` with tables.

        Returns:
            The result at the primary; it has no table of others to predict with. None elsewhere.

        Raises:
            SecureVflError: As :func:`securevfl.train`, and where settings differ.

        Reveals:
            To the others: its name, its key columns' names and the number of its classes; then
            what a real federation reveals.
        """
        named = run_settings.RunSettings.__annotations__
        for setting in settings:
            if setting not in named:
                raise ConfigError(
                    f"{setting}: no such setting{checks.did_you_mean(setting, named)}"
                )
        model, settings = run_settings.with_model(model, settings)
        own = identities.Identity.create(
            self._name(table, settings), valid_days=identities.SHORT_LIVED_DAYS
        )
        place: Path | run_folder.TemporaryFolder = (
            run_folder.TemporaryFolder() if out is None else Path(out)
        )
        folder = place.path if isinstance(place, run_folder.TemporaryFolder) else place
        losses: list[float] = []

        def hear(event: ProgressEvent) -> None:
            if isinstance(event, RoundDone):
                losses.append(event.loss)
            observe(event)

        with ExitStack() as held:
            port = 0 if self.rank else held.enter_context(spawn.reserved_port())
            facts = None if table is None else run_settings.TableFacts.of(table)
            cards, certificates = self._meet(own, facts, port)
            known = [card["table"] for card in cards if card["table"] is not None]
            tables = [run_settings.TableFacts(**table_facts) for table_facts in known]
            config = launching.pin_identities(
                parse_federation(run_settings.source_of(tables, model, settings), file="train()"),
                {
                    name: identities.public_text(certificate)
                    for name, certificate in certificates.items()
                },
                address=f"127.0.0.1:{cards[0]['port']}",
            )
            if table is not None:
                table = run_settings.with_keys_called(tuple(tables[0].keys), table)
            job = run_options.PartyJob(
                config=config,
                name=own.name,
                run_folder=folder,
                identity_folder=folder,
                data_root=Path.cwd(),
                device=run_options.device_named(settings.get("device", "cpu")),
                observe=hear,
                record_mib=settings.get("record_mib"),
                table=table,
                with_alone=settings.get("with_alone", True),
                **run_settings.estimators_of(settings),
            )
            figures = launching.run_party(job, identity=own.trusting(certificates))
        if not isinstance(figures, run_folder.RunFigures):
            return None
        run_folder.write_figures(folder, figures)
        result = entry.result_of(config, job, figures.as_json(), losses)
        assert result.trained is not None, "it has a folder"
        return replace(result, trained=replace(result.trained, place=place))

    def _name(self, table: PartyTable | None, settings: run_settings.RunSettings) -> str:
        helpers = run_settings.helpers_of(settings)
        place = self.rank - (self.world_size - len(helpers))
        if (table is None) != (place >= 0):
            has = f"the last {len(helpers)} are helpers without a table" if helpers else "all"
            raise errors.ConfigError(
                f"rank {self.rank} of {self.world_size}: {'has' if table is not None else 'lacks'} "
                f"a table; with these settings {has if helpers else 'all have one'}"
            )
        return helpers[place] if table is None else table.name

    def _meet(
        self, own: identities.Identity, facts: run_settings.TableFacts | None, port: int
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Tell the others who this is; return what each says, by rank, and certificates by name."""
        folder = self.meeting / str(self._trainings)
        self._trainings += 1
        card = {"name": own.name, "table": None if facts is None else asdict(facts), "port": port}
        files.write_bytes(folder / f"{self.rank}.pem", identities.certificate_pem(own.certificate))
        files.write_json(folder / f"{self.rank}.json", card)
        deadline = time.monotonic() + _MEETING_S
        cards, certificates = [], {}
        for rank in range(self.world_size):
            path = folder / f"{rank}.json"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise errors.PartyFailedError(
                        f"rank {rank}: has not come within {_MEETING_S:g} s"
                    )
                time.sleep(_POLL_S)
            cards.append(files.read_json(path))
            name = str(cards[-1]["name"])
            certificates[name] = identities.read_certificate(path.with_suffix(".pem"), name=name)
        if len(certificates) < self.world_size:
            raise errors.ConfigError(
                f"two parties of one name in {[other_card['name'] for other_card in cards]}"
            )
        return cards, certificates


_RETURNED: Final = "returned"
_LONGEST_S: Final = 7 * 24 * 3600.0
_launched_scripts: list[str] = []


def launch(program: Callable[[ThisParty], T], *, parties: int | None = None) -> list[T | None]:
    """Run a program in a process for each party, on this machine.

    Where ``RANK``, ``WORLD_SIZE`` and ``RENDEZVOUS`` (``file:///PATH``) are set, or torchrun has
    started this process, it is one of them, and runs the program itself. Otherwise it starts them:
    each imports the program from its module, or runs the script from its beginning up to here, as
    torchrun does. What they print is printed when they have ended.

    Args:
        program: Called with a :class:`ThisParty` in each process. It returns figures and words.
        parties: How many processes there are, helpers included.

    Returns:
        What the programs returned, by rank; in one of several processes only its own, else None.

    Raises:
        ConfigError: If a process could not find the program, or the numbers of processes differ.
        SecureVflError: The kind that fits where a failure began, naming the rank.

    Reveals:
        Between the processes: what the program does. This machine and its user hold all of it.
    """
    program, here = inspect.unwrap(program), detect_torchrun()
    if here is None:
        return _in_processes(program, parties)
    if parties not in (None, here.size):
        raise errors.ConfigError(f"parties: {parties}, and {here.size} processes were started")
    child.end_with_launcher()
    try:
        value = program(
            ThisParty(rank=here.rank, world_size=here.size, meeting=_private(here.place))
        )
        child.report(_RETURNED, value=value)
    except errors.SecureVflError as error:
        interrupts.check()
        origin = getattr(error, "party", None) or f"rank-{here.rank}"
        child.report_failure(party=origin, reason=str(error), exit_code=error.exit_code)
        if child.is_launched():
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        if here.rank == 0 and not child.is_launched():
            shutil.rmtree(here.place, ignore_errors=True)
    if child.is_launched():
        raise SystemExit(0)  # what follows in a script is for the process that started this one
    return [value if rank == here.rank else None for rank in range(here.size)]


def party_program(
    *, parties: int
) -> Callable[[Callable[[ThisParty], T]], Callable[[], list[T | None]]]:
    """Make a function a program whose call is :func:`launch`, as CrypTen's ``run_multiprocess``.

    Args:
        parties: How many processes there are, helpers included.
    """

    def decorate(program: Callable[[ThisParty], T]) -> Callable[[], list[T | None]]:
        def start() -> list[T | None]:
            return launch(program, parties=parties)

        return functools.update_wrapper(start, program)

    return decorate


def run_named() -> None:
    """Run the program that is named on the command line, in one of the processes."""
    launch(pkgutil.resolve_name(sys.argv[1]))


def _private(folder: Path) -> Path:
    """Return a folder of this user alone, made if it is not there."""
    files.make_folder(folder)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise errors.ConfigError(f"{folder}: must belong to this user alone (mode 0700)")
    return folder


def _in_processes(program: Callable[[ThisParty], T], parties: int | None) -> list[T | None]:
    if parties is None or parties < 2:
        raise errors.ConfigError(f"parties: must be 2 or more processes, got {parties}")
    command, returned = _command_of(program), dict[str, Any]()
    names = [f"rank-{rank}" for rank in range(parties)]

    def on_event(name: str, event: Mapping[str, Any]) -> None:
        if event.get("event") == _RETURNED:
            returned[name] = event["value"]

    with tempfile.TemporaryDirectory(prefix="securevfl-") as temporary:
        folder = Path(temporary)
        environment = {
            "WORLD_SIZE": str(parties),
            "RENDEZVOUS": f"file://{folder / 'rendezvous'}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": launching.threads_each(parties),
        }
        commands = [
            process.PartyCommand(
                name=name,
                program=command,
                arguments=(),
                log_path=folder / f"{name}.log",
                environment={**environment, "RANK": str(rank)},
            )
            for rank, name in enumerate(names)
        ]
        try:
            spawn.run_party_processes(commands, deadline_s=_LONGEST_S, on_event=on_event)
        finally:
            for party_command in commands:
                if party_command.log_path.exists():
                    for line in party_command.log_path.read_text(errors="replace").splitlines():
                        sys.stdout.write(f"{party_command.name}: {line}\n")
    return [returned.get(name) for name in names]


def _command_of(program: Callable[..., Any]) -> list[str]:
    """Return how a process comes to run a program of this one.

    Raises:
        ConfigError: If it has no file that another process could run.
    """
    main = sys.modules["__main__"]
    if program.__module__ != "__main__":
        run = f"import {__name__} as programs; programs.{run_named.__name__}()"
        return [sys.executable, "-c", run, f"{program.__module__}:{program.__qualname__}"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None or hasattr(sys, "ps1") or not Path(file).is_file():
        raise errors.ConfigError(
            f"launch: {program.__qualname__!r} is defined in a notebook, which processes cannot "
            f"run; write it into a file such as own_program.py and import it from there"
        )
    if _launched_scripts:
        raise errors.ConfigError(
            f"launch: processes run {Path(file).name} from its beginning, and would meet its first "
            f"launch again; write the programs into a file of their own and import them from there"
        )
    _launched_scripts.append(file)
    again = [file] if spec is None else ["-m", spec.name]
    return [sys.executable, *again, *sys.argv[1:]]
