"""Processes that train a comparison's runs side by side, with one thread each."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.config.reading import parse_federation
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.runtime.device import device_named
from securevfl.studies.compare.run import MethodRun, reason_of, tables_for, train_run

# A run tells of thousands of rounds; people read a few a second.
_TELL_EVERY_S: Final = 0.2
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker needs to know; the same for all runs of a comparison."""

    source: Mapping[str, Any]
    """The parsed federation file."""

    methods: tuple[str, ...]
    """Those that are trained, which say which tables are read."""

    data_root: Path
    """Where relative data paths start."""

    comparison: Path
    """The comparison's folder."""

    device: str
    """Where models are computed."""


Tell = Callable[[MethodRun, ProgressEvent], None]
"""Hears of one run's progress."""


def train_in_workers(
    job: Job,
    runs: Sequence[tuple[MethodRun, str]],
    *,
    workers: int,
    tell: Tell,
    done: Callable[[dict[str, Any]], None],
    failed: Callable[[MethodRun, str], None],
) -> None:
    """Train runs in processes of their own.

    Args:
        job: What all runs share.
        runs: What to train, in order, each with its digest.
        workers: Processes at a time.
        tell: Hears of progress.
        done: Gets each run's result as soon as it is there.
        failed: Gets a run that failed, and why; other runs of its method are not begun.

    Reveals:
        Everything is on one machine: a comparison protects nobody's table.
    """
    waiting = list(runs)
    with _Workers(job) as processes:
        busy: dict[Connection, MethodRun] = {}
        for _ in range(min(workers, len(runs))):
            task = waiting.pop(0)
            busy[processes.start(task)] = task[0]
        while busy:
            ready = wait(list(busy))
            for pipe in [one for one in busy if one in ready]:
                run = busy[pipe]
                kind, content = processes.hear(pipe)
                if kind == "event":
                    tell(run, content)
                    continue
                del busy[pipe]
                if kind == "done":
                    done(content)
                else:
                    waiting = [one for one in waiting if one[0].method != run.method]
                    failed(run, content)
                if not waiting:
                    continue
                task = waiting.pop(0)
                if kind == "died":
                    busy[processes.start(task)] = task[0]
                else:
                    pipe.send(task)
                    busy[pipe] = task[0]


class _Workers:
    """Processes that train one run after another; all are ended with the block."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # Fresh interpreters: a fork of a process with threads may hang, and torch has threads.
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, SpawnProcess] = {}

    def __enter__(self) -> "_Workers":
        return self

    def start(self, task: tuple[MethodRun, str]) -> Connection:
        """Start a process on its first run, and return the way to it."""
        ours, theirs = self._context.Pipe()
        with _environment(dict.fromkeys(_THREADS, "1")):
            process = self._context.Process(target=_work, args=(theirs, self._job), daemon=True)
            process.start()
        theirs.close()
        self._processes[ours] = process
        ours.send(task)
        return ours

    def hear(self, pipe: Connection) -> tuple[str, Any]:
        """Return what a process says next, or that it is gone."""
        try:
            kind, content = pipe.recv()
        except (EOFError, OSError):
            process = self._processes.pop(pipe)
            pipe.close()
            process.join()
            return "died", f"its process ended with exit code {process.exitcode}"
        return kind, content

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            process.join()


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


def _work(pipe: Connection, job: Job) -> None:
    """Train each run that comes through the pipe, until the pipe closes."""
    # Ctrl-C is the parent's to handle: it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    config = parse_federation(job.source, file="comparison")
    tables = None
    while True:
        try:
            run, digest = pipe.recv()
        except EOFError:
            return
        try:
            if tables is None:
                tables = tables_for(config, job.methods, job.data_root)
            result = train_run(
                config,
                tables,
                run,
                comparison=job.comparison,
                digest=digest,
                device=device_named(job.device),
                observe=throttled(lambda event: pipe.send(("event", event))),
            )
        except Exception as error:  # noqa: BLE001, other methods go on
            pipe.send(("failed", reason_of(error, run, comparison=job.comparison)))
            continue
        pipe.send(("done", result))


def throttled(
    observe: Observer,
) -> Observer:
    """Return an observer that hears of a few rounds a second, and of everything else."""
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
