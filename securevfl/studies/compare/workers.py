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
from securevfl.core import errors
from securevfl.core.errors import SecureVflError
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.runtime.device import device_named
from securevfl.runtime.tables import read_tables
from securevfl.studies.compare.run import MethodRun, train_run

# A run tells of thousands of rounds; people read a few a second.
_TELL_EVERY_S: Final = 0.2
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker needs to know; the same for all runs of a comparison."""

    source: Mapping[str, Any]
    """The parsed federation file."""

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
) -> None:
    """Train runs in processes of their own.

    Args:
        job: What all runs share.
        runs: What to train, in order, each with its digest.
        workers: Processes at a time.
        tell: Hears of progress.
        done: Gets each run's result as soon as it is there.

    Raises:
        SecureVflError: The first run's that failed, with its name; the others are ended.

    Reveals:
        Everything is on one machine: a comparison protects nobody's table.
    """
    waiting = list(reversed(runs))
    with _processes(job, min(workers, len(runs))) as processes:
        busy: dict[Connection, MethodRun] = {}
        for pipe in processes:
            busy[pipe] = _hand_out(pipe, waiting.pop())
        while busy:
            ready = wait(list(busy))
            for pipe in [one for one in busy if one in ready]:
                kind, content = _hear(pipe, processes[pipe], busy[pipe])
                if kind == "event":
                    tell(busy[pipe], content)
                    continue
                del busy[pipe]
                done(content)
                if waiting:
                    busy[pipe] = _hand_out(pipe, waiting.pop())


def _hand_out(pipe: Connection, task: tuple[MethodRun, str]) -> MethodRun:
    pipe.send(task)
    return task[0]


def _hear(pipe: Connection, process: SpawnProcess, run: MethodRun) -> tuple[str, Any]:
    try:
        kind, content = pipe.recv()
    except EOFError:
        process.join()
        raise SecureVflError(
            f"{run.method}, seed {run.seed}: its process ended with exit code {process.exitcode}"
        ) from None
    if kind == "failed":
        name, text = content
        raise getattr(errors, name)(text)
    return kind, content


@contextmanager
def _processes(job: Job, count: int) -> Iterator[dict[Connection, SpawnProcess]]:
    # Fresh interpreters: a fork of a process with threads may hang, and torch has threads.
    context = multiprocessing.get_context("spawn")
    started: dict[Connection, SpawnProcess] = {}
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            started[ours] = process
        yield started
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for pipe, process in started.items():
            pipe.close()
            process.terminate()
        for process in started.values():
            process.join()


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
                tables = read_tables(config, job.data_root)
            result = train_run(
                config,
                tables,
                run,
                comparison=job.comparison,
                digest=digest,
                device=device_named(job.device),
                observe=throttled(lambda event: pipe.send(("event", event))),
            )
        except SecureVflError as error:
            pipe.send(("failed", (type(error).__name__, failure_of(run, error))))
            return
        pipe.send(("done", result))


def failure_of(run: MethodRun, error: SecureVflError) -> str:
    """Return what a failed run says, with its name in front."""
    return f"{run.method}, seed {run.seed}: {error}"


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
