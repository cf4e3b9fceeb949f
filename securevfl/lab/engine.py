"""Engines that train a study's runs: what all have in common, and those of this machine.

On this machine runs are trained in this process, or side by side in processes of one thread each.
"""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch

from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.data.tables import PartyTable
from securevfl.lab.one_run import Run, RunFailure, Task, attempt
from securevfl.runtime.run_options import device_named

# A run tells of thousands of rounds; people read a few a second.
_TELL_EVERY_S: Final = 0.2

ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
"""The environment of a process that computes with one thread: sums then depend on no machine's
number of cores."""

Tell = Callable[[Run, ProgressEvent], None]
"""Callback for the progress of one run."""

Done = Callable[[Run, dict[str, Any]], None]
"""Callback for the result of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What all runs of a study share."""

    folder: Path
    """The study's folder."""

    device: str
    """Where models are computed."""

    tables: Mapping[str, Mapping[str, PartyTable]]
    """Every party's table, by the digest that tasks name; more may come while runs are trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunObservers:
    """Callbacks of a study's runs."""

    tell: Tell
    """Called with a run and each of its progress events."""

    done: Done
    """Called with a run and its result, as soon as it is there."""

    failed: Callable[[Run, RunFailure], None]
    """Called with each run without a result, and its failure."""


@runtime_checkable
class Engine(Protocol):
    """Trains runs; every engine gives the same numbers."""

    @property
    def width(self) -> int:
        """How many runs are trained at a time."""
        ...

    def train(self, tasks: Sequence[Task], hearing: RunObservers) -> None:
        """Train runs; those of a name that has failed are not begun.

        A run whose process dies is begun once more.
        """
        ...

    def close(self) -> None:
        """End all processes that were started."""
        ...


@dataclass(kw_only=True)
class Waiting:
    """Runs that are not begun yet."""

    tasks: deque[Task]
    _begun_again: set[Run] = field(default_factory=set)

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> "Waiting":
        """Return a queue of runs, in order."""
        return cls(tasks=deque(tasks))

    def give_up(self, name: str) -> None:
        """Drop the remaining runs of a name."""
        self.tasks = deque(task for task in self.tasks if task.run.name != name)

    def again(self, task: Task) -> bool:
        """Put a run whose process died first in line, and return whether it may begin again."""
        if task.run in self._begun_again:
            return False
        self._begun_again.add(task.run)
        self.tasks.appendleft(task)
        return True


def throttle(observe: Observer) -> Observer:
    """Return an observer that passes a few rounds a second on, and all other events."""
    last = 0.0

    def hear(event: ProgressEvent) -> None:
        nonlocal last
        if isinstance(event, RoundDone | RowsReleased):
            now = time.monotonic()
            if now - last < _TELL_EVERY_S:
                return
            last = now
        observe(event)

    return hear


# The engines of this machine.


class Here:
    """Trains one run after another in this process.

    Args:
        place: What all runs share.
    """

    width = 1

    def __init__(self, place: Place) -> None:
        self._place = place

    def train(self, tasks: Sequence[Task], hearing: RunObservers) -> None:
        """Train runs; see :class:`Engine`."""
        waiting = Waiting.of(tasks)
        with _one_thread():
            while waiting.tasks:
                task = waiting.tasks.popleft()
                outcome = attempt(
                    task,
                    self._place.tables[task.tables],
                    study=self._place.folder,
                    device=device_named(self._place.device),
                    observe=throttle(partial(hearing.tell, task.run)),
                )
                if isinstance(outcome, RunFailure):
                    waiting.give_up(task.run.name)
                    hearing.failed(task.run, outcome)
                else:
                    hearing.done(task.run, outcome)

    def close(self) -> None:
        """Do nothing: no process was started."""


class Workers:
    """Processes that train runs side by side, with one thread each.

    Args:
        place: What all runs share.
        width: Processes at a time.
    """

    def __init__(self, place: Place, *, width: int) -> None:
        self.width = width
        self._place = place
        # Fresh interpreters: a fork of a process with threads may hang, and torch has threads.
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, SpawnProcess] = {}
        self._idle: list[Connection] = []
        self._known: dict[Connection, str] = {}

    def train(self, tasks: Sequence[Task], hearing: RunObservers) -> None:
        """Train runs; see :class:`Engine`.

        Reveals:
            Everything is on one machine: a study protects nobody's table.
        """
        waiting = Waiting.of(tasks)
        busy: dict[Connection, Task] = {}
        # All at once: each takes seconds to load what it needs.
        while len(self._idle) < min(self.width, len(tasks)):
            self._idle.append(self._start())
        while waiting.tasks or busy:
            while waiting.tasks and len(busy) < self.width:
                task = waiting.tasks.popleft()
                busy[self._begin(task)] = task
            ready = wait(list(busy))
            for pipe in [busy_pipe for busy_pipe in busy if busy_pipe in ready]:
                task = busy[pipe]
                kind, content = self._hear(pipe)
                if kind == "event":
                    hearing.tell(task.run, content)
                    continue
                del busy[pipe]
                if kind == "died":
                    if waiting.again(task):
                        continue
                else:
                    self._idle.append(pipe)
                if isinstance(content, RunFailure):
                    waiting.give_up(task.run.name)
                    hearing.failed(task.run, content)
                else:
                    hearing.done(task.run, content)

    def close(self) -> None:
        """End all processes."""
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            process.join()
        self._processes.clear()

    def _begin(self, task: Task) -> Connection:
        """Hand a run to a process that is idle, or to a new one, and return the way to it."""
        pipe = self._idle.pop() if self._idle else self._start()
        # A process keeps the tables of its last run: most studies train on the same throughout.
        known = self._known.get(pipe) == task.tables
        self._known[pipe] = task.tables
        # Where it has died, the next that is heard of it says so.
        with suppress(OSError):
            pipe.send((task, None if known else self._place.tables[task.tables]))
        return pipe

    def _start(self) -> Connection:
        ours, theirs = self._context.Pipe()
        # Tables change; what a process is told for its life is where, and on what.
        place = Place(folder=self._place.folder, device=self._place.device, tables={})
        with _environment(ONE_THREAD):
            process = self._context.Process(target=_work, args=(theirs, place), daemon=True)
            process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def _hear(self, pipe: Connection) -> tuple[str, Any]:
        """Return what a process says next, or that it is gone."""
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            process = self._processes.pop(pipe)
            del self._known[pipe]
            pipe.close()
            process.join()
            return "died", RunFailure(reason=f"its process ended with exit code {process.exitcode}")
        return kind, content


def _work(pipe: Connection, place: Place) -> None:
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
            study=place.folder,
            device=device_named(place.device),
            observe=throttle(lambda event: pipe.send(("event", event))),
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
    """Compute with one thread, as the workers do: sums then do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
