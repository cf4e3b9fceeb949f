"""Engines that train a study's runs: in this process, or in processes of one thread each."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch

from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.data.tables import PartyTable
from securevfl.lab.one_run import LeftOut, Run, RunFailure, Task, attempt, finished_run
from securevfl.runtime.run_options import device_named

_LEAST_S_BETWEEN_ROUNDS: Final = 0.2
"""Least seconds between two shown rounds of a run."""

_ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
"""Environment of a process that computes with one thread, so that sums do not depend on the
machine's number of cores."""

RunObserver = Callable[[Run, ProgressEvent], None]
"""Callback for the progress of one run."""

ResultObserver = Callable[[Run, dict[str, Any]], None]
"""Callback for the result of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyContext:
    """Folder, device and tables that all runs of a study share."""

    folder: Path
    """The study's folder."""

    device: str
    """Device of the models: ``"cpu"`` or ``"cuda"``."""

    tables: Mapping[str, Mapping[str, PartyTable]]
    """Every party's table, by the digest that tasks name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunObservers:
    """Callbacks of a study's runs."""

    progress: RunObserver
    """Callback for a run's progress events."""

    done: ResultObserver
    """Callback for the result of a finished run."""

    failed: Callable[[Run, RunFailure], None]
    """Callback for the failure of a run."""


@runtime_checkable
class Engine(Protocol):
    """Trains runs; every engine gives the same numbers."""

    def train(self, tasks: Sequence[Task], observers: RunObservers) -> None:
        """Train runs; once a run has failed, no other run of its name is begun."""
        ...

    def close(self) -> None:
        """End all processes that were started."""
        ...


def _without_name(tasks: Iterable[Task], name: str) -> deque[Task]:
    """Return the tasks whose runs have another name."""
    return deque(task for task in tasks if task.run.name != name)


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


class InProcessEngine:
    """Trains one run after another in this process.

    Args:
        context: Folder, device and tables of the study.
    """

    def __init__(self, context: StudyContext) -> None:
        self._context = context

    def train(self, tasks: Sequence[Task], observers: RunObservers) -> None:
        """Train runs; see :class:`Engine`."""
        waiting = deque(tasks)
        with _one_thread():
            while waiting:
                task = waiting.popleft()
                outcome = attempt(
                    task,
                    self._context.tables[task.tables],
                    study=self._context.folder,
                    device=device_named(self._context.device),
                    observe=_throttle(partial(observers.progress, task.run)),
                )
                if isinstance(outcome, RunFailure):
                    waiting = _without_name(waiting, task.run.name)
                    observers.failed(task.run, outcome)
                else:
                    observers.done(task.run, outcome)

    def close(self) -> None:
        """Do nothing: no process was started."""


class WorkerProcesses:
    """Processes that train runs in parallel, with one thread each.

    Args:
        context: Folder, device and tables of the study.
        width: Number of processes.
    """

    def __init__(self, context: StudyContext, *, width: int) -> None:
        self._width = width
        self._context = context
        # Fresh interpreters: a fork of a process with threads may hang, and torch has threads.
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, SpawnProcess] = {}
        self._idle: list[Connection] = []
        self._tables_sent: dict[Connection, str] = {}

    def train(self, tasks: Sequence[Task], observers: RunObservers) -> None:
        """Train runs; see :class:`Engine`. A run whose process dies is begun once more.

        Reveals:
            Everything is on one machine: a study protects no party's table.
        """
        waiting = deque(tasks)
        restarted: set[Run] = set()
        busy: dict[Connection, Task] = {}
        # All at once: each takes seconds to load what it needs.
        while len(self._idle) < min(self._width, len(tasks)):
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
                    observers.progress(task.run, content)
                    continue
                del busy[pipe]
                if kind != "died":
                    self._idle.append(pipe)
                elif task.run not in restarted:
                    restarted.add(task.run)
                    waiting.appendleft(task)
                    continue
                if isinstance(content, RunFailure):
                    waiting = _without_name(waiting, task.run.name)
                    observers.failed(task.run, content)
                else:
                    observers.done(task.run, content)

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
            pipe.send((task, None if known else self._context.tables[task.tables]))
        return pipe

    def _start(self) -> Connection:
        ours, theirs = self._spawn.Pipe()
        arguments = (theirs, self._context.folder, self._context.device)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """Number of parallel runs and callbacks of a study; results do not depend on them."""

    jobs: int = 1
    """Number of runs that are trained at a time, with one thread each."""

    tell: RunObserver = lambda _run, _event: None
    """Callback for each event of a run."""

    done: ResultObserver = lambda _run, _result: None
    """Callback for each run's result; runs that were finished before come first."""

    leave_out: Callable[[LeftOut], None] = lambda _left_out: None
    """Callback for each method or point that is skipped or has failed; the others continue."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ConfigError(f"jobs: must be at least 1, got {self.jobs}")

    @property
    def in_other_processes(self) -> bool:
        """Whether runs are trained in processes other than this one."""
        return self.jobs > 1

    def engine(self, context: StudyContext) -> Engine:
        """Return the engine that trains the runs."""
        if self.in_other_processes:
            return WorkerProcesses(context, width=self.jobs)
        return InProcessEngine(context)


class Study:
    """Trains the runs that a folder lacks.

    Args:
        folder: Folder of the study, with a folder for each run.
        device: ``"cpu"`` or ``"cuda"``.
        tables: Every party's table, by the digest that tasks name.
        options: Number of parallel runs, and callbacks.

    Raises:
        ConfigError: If the folder cannot be written.
    """

    def __init__(
        self,
        *,
        folder: Path,
        device: str,
        tables: Mapping[str, Mapping[str, PartyTable]],
        options: StudyOptions,
    ) -> None:
        if (folder / "parties").exists():
            raise ConfigError(f"folder {folder}: is a run's; choose another --out")
        files.require_writable_folder(folder, what="folder")
        self._folder = folder
        self._options = options
        self._engine = options.engine(StudyContext(folder=folder, device=device, tables=tables))
        self.failed: dict[str, LeftOut] = {}
        """First failure of each name with a failed run."""

    def __enter__(self) -> "Study":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def train(self, tasks: Iterable[Task]) -> dict[Run, dict[str, Any]]:
        """Return the result of each run that is finished or can be trained.

        Args:
            tasks: The runs, in the order in which they are begun.

        Raises:
            ConfigError: If the folder holds runs of other settings or tables.

        Reveals:
            Everything is inside one organisation: a study protects no party's table.
        """
        results: dict[Run, dict[str, Any]] = {}
        missing: list[Task] = []
        for task in tasks:
            saved = finished_run(self._folder, task.run, digest=task.digest)
            if saved is None:
                missing.append(task)
            else:
                results[task.run] = saved
                self._options.done(task.run, saved)

        def keep(run: Run, result: dict[str, Any]) -> None:
            results[run] = result
            self._options.done(run, result)

        if missing:
            observers = RunObservers(progress=self._options.tell, done=keep, failed=self._fail)
            self._engine.train(missing, observers)
        return results

    def _fail(self, run: Run, failure: RunFailure) -> None:
        reason = failure.reason
        if failure.trace is not None:
            path = run.folder(self._folder) / "failure.txt"
            files.write_text(path, failure.trace)
            reason += f" (trace: {path})"
        # Runs of one name that train at the same time may fail one after the other.
        if run.name not in self.failed:
            failed_run = LeftOut(name=run.name, status="failed", reason=reason)
            self.failed[run.name] = failed_run
            self._options.leave_out(failed_run)
