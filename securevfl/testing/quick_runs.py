"""Quick runs of a small federation: in this process, or with one process a party."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.core.files import require_writable_folder
from securevfl.core.progress import Observer, RoundDone
from securevfl.data.tables import PartyTable
from securevfl.launch.spawn import run_party_processes
from securevfl.runtime import launching, run_tables
from securevfl.runtime.entry import result_of
from securevfl.runtime.run_folder import RunFigures, TemporaryFolder, write_figures
from securevfl.runtime.run_options import (
    FederationSource,
    RunOptions,
    device_named,
    resolve_federation,
)
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.testing.lying_party import Lie, start_lying

_LIMIT_S: Final = 300.0


class QuickRunOptions(TypedDict, total=False):
    """Options of :func:`run_in_process` and :func:`run_between_processes`."""

    tables: Mapping[str, PartyTable] | None
    """Every party's table by name; default: those that the federation file names."""
    data_root: Path | None
    """Folder where relative data paths start; default: that of the federation file."""
    with_alone: bool
    """Also find the local baseline, the primary's best model alone; default false."""
    device: str
    """``"cpu"`` (the default) or ``"cuda"``."""
    observe: Observer
    """Called with progress; an exception that it raises ends the run."""
    record_mib: float | None
    """MiB of what each party receives and holds, which it records; default: none."""


def read_tables(
    federation: FederationSource, data_root: Path | None = None
) -> dict[str, PartyTable]:
    """Return every party's table by name, as a run reads it.

    Args:
        federation: Path of the federation file, or what :func:`securevfl.read_federation` returned.
        data_root: Folder where relative data paths start; default: that of the file.

    Raises:
        DataError: If a table cannot be read.
    """
    config, root = resolve_federation(federation, data_root)
    return dict(run_tables.read_tables(config, root))


def run_in_process(
    federation: FederationSource,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    with_placebo: bool = False,
    **options: Unpack[QuickRunOptions],
) -> RunResult:
    """Run a federation in this process: :func:`securevfl.simulate` without local baseline.

    Nothing is shown.

    Args:
        federation: Path of the federation file, or what :func:`securevfl.read_federation` returned.
        out: Run folder; default: a temporary folder, removed when the result is no longer referred
            to.
        resume: Continue from the last epoch that was saved in ``out``.
        with_placebo: Whether to train once more with partners' rows permuted.
        **options: Those of :class:`QuickRunOptions`.

    Raises:
        SecureVflError: As :func:`securevfl.simulate`.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    config, place, run_options = _prepare(federation, out, options)
    with _removed_on_failure(place):
        tables = options.get("tables")
        if tables is None:
            tables = run_tables.read_tables(config, run_options.data_root)
        result = simulate_federation(
            config,
            tables,
            replace(run_options, resume=resume),
            with_alone=options.get("with_alone", False),
            with_placebo=with_placebo,
        )
        return _with_place(result, place)


def run_between_processes(
    federation: FederationSource,
    out: str | Path | None = None,
    *,
    limit_s: float = _LIMIT_S,
    lies: Sequence[Lie] = (),
    **options: Unpack[QuickRunOptions],
) -> RunResult:
    """Run a federation on this machine, one process per party; no process outlives the call.

    It is :func:`securevfl.train` with a time limit, without local baseline, and with parties that
    lie. A party that fails ends the run; none is started again.

    Args:
        federation: As of :func:`run_in_process`.
        out: As of :func:`run_in_process`.
        limit_s: Seconds that the run may take.
        lies: What parties alter in the messages that they send.
        **options: Those of :class:`QuickRunOptions`.

    Raises:
        ConfigError: If a lie is of no party.
        PartyFailedError: If time is over.
        SecureVflError: If a party never sends what it should alter, or the kind that fits where the
            failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    config, place, run_options = _prepare(federation, out, options)
    for lie in lies:
        if lie.party not in {party.name for party in config.parties}:
            raise ConfigError(f"lies: {lie.party!r} is no party")
    outcome: dict[str, Any] = {}
    losses: list[float] = []

    def on_event(name: str, report: Mapping[str, Any]) -> None:
        if name != config.primary.name:
            return
        if report.get("event") == launching.OUTCOME_EVENT:
            outcome.update({key: value for key, value in report.items() if key != "event"})
        event = launching.event_of(report)
        if isinstance(event, RoundDone):
            losses.append(event.loss)
        if event is not None:
            run_options.observe(event)

    with _removed_on_failure(place), launching.parties_here(config) as here:
        commands = here.commands(run_options, of_all=[], in_memory=_in_memory(config, options))
        require_writable_folder(run_options.run_folder)
        run_party_processes(
            [start_lying(command, lies) for command in commands],
            deadline_s=limit_s,
            on_event=on_event,
        )
        figures = RunFigures.from_json(outcome)
        write_figures(run_options.run_folder, figures)
        return _with_place(result_of(config, run_options, figures.as_json(), losses), place)


def _prepare(
    federation: FederationSource, out: str | Path | None, options: QuickRunOptions
) -> tuple[FederationConfig, Path | TemporaryFolder, RunOptions]:
    """Return the federation, the run folder, and the options of the run in it."""
    config, root = resolve_federation(federation, options.get("data_root"))
    device = device_named(options.get("device", "cpu"))
    place = TemporaryFolder() if out is None else Path(out)
    run_options = RunOptions(
        run_folder=place.path if isinstance(place, TemporaryFolder) else place,
        data_root=root.resolve(),
        device=device,
        record_mib=options.get("record_mib"),
    )
    if "observe" in options:
        run_options = replace(run_options, observe=options["observe"])
    return config, place, run_options


def _in_memory(config: FederationConfig, options: QuickRunOptions) -> dict[str, dict[str, Any]]:
    """Return what each party has from memory: its table, if any was given."""
    tables = options.get("tables") or {}
    in_memory: dict[str, dict[str, Any]] = {name: {"table": tables[name]} for name in tables}
    in_memory.setdefault(config.primary.name, {})["with_alone"] = options.get("with_alone", False)
    return in_memory


@contextmanager
def _removed_on_failure(place: Path | TemporaryFolder) -> Iterator[None]:
    """Remove a temporary run folder if the block fails."""
    try:
        yield
    except BaseException:
        if isinstance(place, TemporaryFolder):
            place.remove()
        raise


def _with_place(result: RunResult, place: Path | TemporaryFolder) -> RunResult:
    """Return a result that keeps its run folder for as long as it is referred to."""
    if result.trained is None:
        return result
    return replace(result, trained=replace(result.trained, place=place))
