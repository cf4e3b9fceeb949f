"""Runs of a study: trained in this process or in others, each with a file that marks it as done."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import linkable_config, parse_federation
from securevfl.config.rules import require_trainable
from securevfl.core import files, interrupts
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.formatting import format_figure
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base
from securevfl.federation.run_plan import run_facts
from securevfl.lab.methods import (
    IN_ONE_PLACE,
    Settings,
    baseline_settings,
    method_family,
    method_source_of,
)
from securevfl.lab.pooled_methods import train_in_one_place
from securevfl.models.task_metrics import TaskMetric
from securevfl.runtime.run_options import RunOptions, device_named
from securevfl.runtime.simulation import simulate_federation
from securevfl.version import __version__

_KEPT: Final = (
    *("metric", "higher_is_better", "train", "validation", "test"),
    *("validation_metrics", "test_metrics", "epochs", "best_epoch", "placebos"),
)
"""Names of a simulated run's figures that its result keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a study."""

    name: str
    """Name of a method or of settings, and of the run's folder."""

    seed: int
    """Run seed: of the split into training, validation and test rows, of initialisation, of
    shuffling and of dropout."""

    def folder(self, study: Path) -> Path:
        """Return this run's own folder."""
        return study / "runs" / self.name / f"seed-{self.seed}"


def method_config(config: FederationConfig, name: str) -> FederationConfig:
    """Return the federation of one method of a comparison.

    Raises:
        ConfigError: If there is no such method, its ``[methods.NAME]`` table is wrong, or it does
            not go with the rest of the file.
        PrivacyError: If the privacy settings do not go with it.
    """
    source, _ = method_source_of(config, name)
    try:
        trained = linkable_config(source)
        require_trainable(trained)
    except ConfigError as error:
        raise ConfigError(f"method {name!r}: {error}") from None
    return trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Federation or method of all runs of one name; a run adds its seed."""

    source: Mapping[str, Any]
    """The parsed federation file."""

    method: str | None
    """Name of a method; None trains the file itself."""

    def config(self) -> FederationConfig:
        """Return the federation that is trained.

        Raises:
            ConfigError: If there is no such method, or its settings do not go with the file.
        """
        config = parse_federation(self.source, file="study")
        return config if self.method is None else method_config(config, self.method)

    def pooled(self) -> tuple[str, Settings] | None:
        """Return family and settings of a method on pooled tables; None trains a federation."""
        if self.method is None:
            return None
        family = method_family(self.source, self.method)
        if family not in IN_ONE_PLACE:
            return None
        return family, baseline_settings(self.source, self.method)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Run to train, without its tables."""

    run: Run
    """Run to train."""

    recipe: Recipe
    """Recipe of the run."""

    digest: str
    """Digest of the settings and tables that the result depends on."""

    tables: str
    """Digest of its tables."""

    data_root: Path = Path()
    """Folder at which the path of an earlier pretraining starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Method, or settings, without figures."""

    name: str
    """Name of its runs."""

    status: str
    """``"skipped"``: it does not fit the file or the tables, so nothing was trained; ``"failed"``:
    a run of it ended in an error."""

    reason: str
    """Reason, for people to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Reason for a run without a result."""

    reason: str
    """Reason, for people to read."""

    trace: str | None = None
    """Traceback of an unexpected exception; None for an error of securevfl."""


def run_config(recipe: Recipe, run: Run) -> FederationConfig:
    """Return the federation of a run, with its seed.

    Raises:
        ConfigError: If there is no such method.
    """
    own = recipe.config()
    source = dict(own.source)
    source["federation"] = {**source["federation"], "seed": run.seed}
    federation = dataclasses.replace(own.federation, seed=run.seed)
    return dataclasses.replace(own, federation=federation, source=source)


def run_digest(recipe: Recipe, run: Run, *, tables_digest: str) -> str:
    """Return a digest of a run's settings and tables, and of this version of securevfl."""
    own = run_config(recipe, run)
    # With defaults filled in: where a newer version has others, the same file means another run.
    written_settings = {
        field.name: getattr(own, field.name)
        for field in dataclasses.fields(own)
        if field.name not in ("family", "source", "chosen", "parties")
    }
    parties = [
        {name: value for name, value in party.items() if name not in ("address", "identity")}
        for party in map(dataclasses.asdict, own.parties)
    ]
    settings = f"{__version__} {own.settings_digest} {written_settings} {parties}"
    if pooled := recipe.pooled():
        settings += f" {pooled[1]}"
    return f"{hashlib.sha256(settings.encode()).hexdigest()} {tables_digest}"


def finished_run(study: Path, run: Run, *, digest: str) -> dict[str, Any] | None:
    """Return a finished run's result, or None if there is none.

    Raises:
        ConfigError: If it was trained under other settings or defaults, on other tables or by
            another version.
    """
    path = run.folder(study) / "result.json"
    if not path.exists():
        return None
    try:
        result = files.read_json(path)
        made_from = result["made_from"]
    except (ConfigError, KeyError):
        raise ConfigError(f"{path}: is not a run's result; remove it") from None
    if made_from != digest:
        raise ConfigError(
            f"{path}: was trained under other settings, on other tables or by another version; "
            f"remove {path.parent}, or choose another --out"
        )
    return result


def attempt(
    task: Task,
    tables: Mapping[str, PartyTable],
    *,
    study: Path,
    device: torch.device,
    observe: Observer,
) -> dict[str, Any] | RunFailure:
    """Train a run as :func:`train_run` does, and return errors instead of raising them.

    Reveals:
        Everything is in one process: a study protects no party's table.
    """
    try:
        with interrupts.unwrap_interrupts():
            return train_run(task, tables, study=study, device=device, observe=observe)
    except SecureVflError as error:
        return RunFailure(reason=f"seed {task.run.seed}: {error}")
    except Exception as error:  # noqa: BLE001, other runs go on
        text = " ".join(str(error).split())
        return RunFailure(
            reason=f"seed {task.run.seed}: {type(error).__name__}: {text}",
            trace="".join(traceback.format_exception(error)),
        )


def train_run(
    task: Task,
    tables: Mapping[str, PartyTable],
    *,
    study: Path,
    device: torch.device,
    observe: Observer,
) -> dict[str, Any]:
    """Train a run, and write ``result.json`` at its end.

    Args:
        task: The run.
        tables: Every party's table.
        study: The study's folder.
        device: Device of the models.
        observe: Receives progress events.

    Raises:
        SecureVflError: As the run itself.

    Reveals:
        Everything is in one process: a study protects no party's table.
    """
    run, recipe = task.run, task.recipe
    own = run_config(recipe, run)
    folder = run.folder(study)
    wall, cpu, saved = time.monotonic(), time.process_time(), 0.0
    if pooled := recipe.pooled():
        figures, head = train_in_one_place(own, tables, *pooled, device)
        result = {
            "metric": head.metric_name,
            "higher_is_better": head.higher_is_better,
            **dataclasses.asdict(figures),
            "placebos": {},
            "used": None,
            "epsilon": None,
        }
    else:
        key = _base_key(own, task.tables)
        base = _bases.get(key)
        # What an interrupted run has left: its releases would count against the budget again.
        shutil.rmtree(folder, ignore_errors=True)
        simulated = simulate_federation(
            own,
            tables,
            RunOptions(
                run_folder=folder,
                data_root=task.data_root,
                device=device,
                observe=observe,
                fitted_base=base,
            ),
            with_alone=False,
            with_placebo=True,
        )
        metrics = simulated.metrics
        result = {
            **{name: metrics[name] for name in _KEPT},
            "used": (metrics.get("base") or {}).get("used", "joint"),
            "epsilon": metrics["privacy"]["epsilon"],
        }
        if simulated.base is not None:
            _bases.clear()
            _bases[key] = simulated.base
            # As if it had fitted its own, or a seed's first run would look slower than others.
            saved = simulated.base.cpu_seconds if base is simulated.base else 0.0
    split, _ = run_facts(own, tables[own.primary.name])
    result |= {
        "name": run.name,
        "family": pooled[0] if pooled else own.family.name,
        "seed": run.seed,
        "train_rows": len(split.train),
        "seconds": round(time.monotonic() - wall, 3),
        "cpu_seconds": round(time.process_time() - cpu + saved, 3),
        "made_from": task.digest,
        "version": __version__,
    }
    files.write_json(folder / "result.json", result)
    # Without checkpoints and ledgers a run is small enough to keep many.
    shutil.rmtree(folder / "parties", ignore_errors=True)
    return result


_bases: Final[dict[str, Base]] = {}
"""Base of this process's last run, by a digest of its input. Fitting it takes most of a short run,
and all methods of a seed share it."""


def _base_key(own: FederationConfig, tables: str) -> str:
    """Return a key of a run's base: tables, split, seed, and the party with the labels."""
    sections = {name: own.source.get(name) for name in ("federation", "training", "base", "party")}
    return f"{tables} {json.dumps(sections, sort_keys=True, default=str)}"


def by_name(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return results by name, in the order of the seeds."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        named.setdefault(result["name"], []).append(result)
    return named


def over_seeds(runs: Sequence[Mapping[str, Any]], metrics: Sequence[TaskMetric]) -> dict[str, Any]:
    """Return the figures of one name over seeds.

    Args:
        runs: A result for each seed.
        metrics: Metrics of the task; the first is the one to compare by.

    Returns:
        ``mean``, ``std`` (of a sample: n - 1; None for one seed) and ``seeds`` (the test metric of
        each), and the same of every metric in ``metrics``; ``validation``, the mean of the first
        metric on validation rows; ``epochs``; ``cpu_seconds``; ``epsilon``.
    """
    shown = metrics[0].name
    return {
        **summarise_seeds(on_test_rows(runs, shown)),
        "metrics": {
            metric.name: summarise_seeds(on_test_rows(runs, metric.name)) for metric in metrics
        },
        "validation": mean([run["validation_metrics"][shown] for run in runs]),
        "epochs": [run["epochs"] for run in runs],
        "cpu_seconds": round(sum(run["cpu_seconds"] for run in runs), 3),
        "epsilon": runs[0]["epsilon"],
    }


def on_test_rows(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float | None]:
    """Return a metric on test rows for each seed; None if it is not defined."""
    return [run["test_metrics"][metric] for run in runs]


def summarise_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and deviation over seeds; None if a value is not known."""
    known = [value for value in values if value is not None]
    several = len(known) == len(values) > 1
    return {
        "mean": mean(values),
        "std": statistics.stdev(known) if several else None,
        "seeds": list(values),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown, since other seeds have other splits."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def cell(figures: Mapping[str, Any], *, sign: str = "") -> str:
    """Return mean and deviation as text.

    Args:
        figures: Result of :func:`summarise_seeds`.
        sign: ``"+"`` shows a plus before positive numbers.
    """
    if figures["mean"] is None:
        return "undefined"
    digits = 4 if abs(figures["mean"]) < 2 else 2
    mean, deviation = figures["mean"], figures["std"]
    if deviation is None:
        return format_figure(mean, sign=sign, digits=digits)
    text = format_figure(mean, sign=sign, beside=(deviation,), digits=digits)
    return f"{text} ± {format_figure(deviation, beside=(mean,), digits=digits)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, their heading first, as a table of Markdown."""
    head, *rest = [[text.replace("|", r"\|") for text in cells] for cells in rows]
    lines = [head, ["---"] * len(head), *rest]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


_LEAST_S_BETWEEN_ROUNDS: Final = 0.2
"""Least seconds between two shown rounds of a run."""

_ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
"""Environment of a process that computes with one thread, so that sums do not depend on the
machine's number of cores."""

RunObserver = Callable[[Run, ProgressEvent], None]
"""Callback for the progress of one run."""

Outcome = dict[str, Any] | RunFailure
"""Result of a run, or why it has none."""

ResultObserver = Callable[[Run, dict[str, Any]], None]
"""Callback for the result of a run."""


def _throttle(observe: Observer) -> Observer:
    """Return an observer that passes on a few rounds a second, and every other event."""
    last = 0.0

    def pass_on(event: ProgressEvent) -> None:
        nonlocal last
        if isinstance(event, RoundDone | RowsReleased):
            now = time.monotonic()
            if now - last < _LEAST_S_BETWEEN_ROUNDS:
                return
            last = now
        observe(event)

    return pass_on


class WorkerProcesses:
    """Processes that train runs in parallel, with one thread each.

    Args:
        folder: Folder of the study.
        device: ``"cpu"`` or ``"cuda"``.
        tables: Every party's table, by the digest that tasks name.
        width: Number of processes.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        tables: Mapping[str, Mapping[str, PartyTable]],
        *,
        width: int,
    ) -> None:
        self._folder, self._device, self._tables, self._width = folder, device, tables, width
        # Fresh interpreters: a fork of a process with threads may hang, and torch has threads.
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, SpawnProcess] = {}
        self._idle: list[Connection] = []
        self._tables_sent: dict[Connection, str] = {}

    def train(self, waiting: deque[Task], observe: RunObserver) -> Iterator[tuple[Run, Outcome]]:
        """Yield the outcome of each run; a run whose process dies is begun once more.

        Args:
            waiting: The runs, which are taken away as they begin.
            observe: Receives progress events.

        Reveals:
            Everything is on one machine: a study protects no party's table.
        """
        restarted: set[Run] = set()
        busy: dict[Connection, Task] = {}
        # All at once: each takes seconds to load what it needs.
        while len(self._idle) < min(self._width, len(waiting)):
            self._idle.append(self._start())
        while waiting or busy:
            while waiting and len(busy) < self._width:
                task = waiting.popleft()
                busy[self._begin(task)] = task
            ready = wait(list(busy))
            for pipe in [busy_pipe for busy_pipe in busy if busy_pipe in ready]:
                task = busy[pipe]
                kind, content = self._receive(pipe)
                if kind == "event":
                    observe(task.run, content)
                    continue
                del busy[pipe]
                if kind != "died":
                    self._idle.append(pipe)
                elif task.run not in restarted:
                    restarted.add(task.run)
                    waiting.appendleft(task)
                    continue
                yield task.run, content

    def close(self) -> None:
        """End all processes."""
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            process.join()
        self._processes.clear()

    def _begin(self, task: Task) -> Connection:
        """Send a run to an idle or a new process, and return the pipe to it."""
        pipe = self._idle.pop() if self._idle else self._start()
        # A process keeps the tables of its last run: most studies train on the same throughout.
        known = self._tables_sent.get(pipe) == task.tables
        self._tables_sent[pipe] = task.tables
        # A dead process is noticed when the pipe is read.
        with suppress(OSError):
            pipe.send((task, None if known else self._tables[task.tables]))
        return pipe

    def _start(self) -> Connection:
        ours, theirs = self._spawn.Pipe()
        arguments = (theirs, self._folder, self._device)
        with _environment(_ONE_THREAD):
            process = self._spawn.Process(target=_work, args=arguments, daemon=True)
            process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        """Return the kind and content of a process's next message, or that the process died."""
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            process = self._processes.pop(pipe)
            del self._tables_sent[pipe]
            pipe.close()
            process.join()
            return "died", RunFailure(reason=f"its process ended with exit code {process.exitcode}")
        return kind, content


def _work(pipe: Connection, folder: Path, device: str) -> None:
    """Train each run that comes through the pipe, until the pipe closes."""
    # Ctrl-C is the parent's to handle: it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    tables: Mapping[str, PartyTable] = {}
    while True:
        try:
            task, sent = pipe.recv()
        except EOFError:
            return
        tables = tables if sent is None else sent
        outcome = attempt(
            task,
            tables,
            study=folder,
            device=device_named(device),
            observe=_throttle(lambda event: pipe.send(("event", event))),
        )
        pipe.send(("ended", outcome))


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as the workers do: sums then do not depend on `jobs`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ignore(*_: object) -> None:
    """Do nothing with an event or a result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """Number of parallel runs and callbacks of a study; results do not depend on them."""

    jobs: int = 1
    """Number of runs that are trained at a time, with one thread each."""

    tell: RunObserver = ignore
    """Callback for each event of a run."""

    done: ResultObserver = ignore
    """Callback for each run's result; runs that were finished before come first."""

    leave_out: Callable[[LeftOut], None] = ignore
    """Callback for each name that is skipped or has failed; the others continue."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"jobs: must be at least 1, got {self.jobs}")

    @property
    def in_other_processes(self) -> bool:
        """Whether runs are trained in processes other than this one."""
        return self.jobs > 1


def train_tasks(
    tasks: Iterable[Task],
    *,
    folder: Path,
    device: str,
    tables: Mapping[str, Mapping[str, PartyTable]],
    options: StudyOptions,
) -> tuple[dict[Run, dict[str, Any]], dict[str, LeftOut]]:
    """Train the runs that a folder lacks, and read the others.

    Once a run has failed, no other run of its name is begun.

    Args:
        tasks: The runs, in the order in which they are begun.
        folder: Folder of the study, with a folder for each run.
        device: ``"cpu"`` or ``"cuda"``.
        tables: Every party's table, by the digest that tasks name.
        options: Number of parallel runs, and callbacks.

    Returns:
        The result of each run that is finished or can be trained; and the first failure of each
        name with a failed run.

    Raises:
        ConfigError: If the folder cannot be written, or holds runs of other settings or tables.

    Reveals:
        Everything is inside one organisation: a study protects no party's table.
    """
    if (folder / "parties").exists():
        raise ConfigError(f"folder {folder}: is a run's; choose another --out")
    files.require_writable_folder(folder, what="folder")
    results: dict[Run, dict[str, Any]] = {}
    failed: dict[str, LeftOut] = {}
    missing: deque[Task] = deque()
    for task in tasks:
        saved = finished_run(folder, task.run, digest=task.digest)
        if saved is None:
            missing.append(task)
        else:
            results[task.run] = saved
            options.done(task.run, saved)
    with _outcomes(missing, folder, device, tables, options) as outcomes:
        for run, outcome in outcomes:
            if not isinstance(outcome, RunFailure):
                results[run] = outcome
                options.done(run, outcome)
                continue
            for task in [task for task in missing if task.run.name == run.name]:
                missing.remove(task)
            # Runs of one name that train at the same time may fail one after the other.
            if run.name not in failed:
                failed[run.name] = _left_out(run, outcome, folder)
                options.leave_out(failed[run.name])
    return results, failed


@contextmanager
def _outcomes(
    waiting: deque[Task],
    folder: Path,
    device: str,
    tables: Mapping[str, Mapping[str, PartyTable]],
    options: StudyOptions,
) -> Iterator[Iterator[tuple[Run, Outcome]]]:
    """Give the outcomes of runs, which are trained here or in processes that end afterwards."""
    if waiting and options.in_other_processes:
        with closing(WorkerProcesses(folder, device, tables, width=options.jobs)) as workers:
            yield workers.train(waiting, options.tell)
        return

    def train_here() -> Iterator[tuple[Run, Outcome]]:
        while waiting:
            task = waiting.popleft()
            observe = _throttle(partial(options.tell, task.run))
            own, where = tables[task.tables], device_named(device)
            yield task.run, attempt(task, own, study=folder, device=where, observe=observe)

    with _one_thread():
        yield train_here()


def _left_out(run: Run, failure: RunFailure, folder: Path) -> LeftOut:
    """Return a failed run's name with the reason, whose traceback is written to its folder."""
    reason = failure.reason
    if failure.trace is not None:
        path = run.folder(folder) / "failure.txt"
        files.write_text(path, failure.trace)
        reason += f" (trace: {path})"
    return LeftOut(name=run.name, status="failed", reason=reason)


@contextmanager
def kept_or_temporary(out: Path | None) -> Iterator[Path]:
    """Yield a folder, or a temporary one for None."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        yield Path(folder)
