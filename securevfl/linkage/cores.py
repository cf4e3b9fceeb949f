"""A map over tasks in this process, or in one process a core."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from securevfl.core import checks
from securevfl.core.errors import OutOfMemoryError

Apply = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Applies a function to every task and yields the results in the tasks' order, as ``map`` does."""

_AWAKE_S: Final = 1.0
"""Seconds of one wait for a worker's result, or a worker's for its parent's end; then it looks."""


@contextmanager
def on_cores(
    workers: int, *, after: int = 0, check: Callable[[], None] = lambda: None
) -> Iterator[Apply]:
    """Give a map over tasks, in this process or in several, which end with the context.

    Args:
        workers: Processes; 1 works in this one, -1 takes every core.
        after: Tasks that are done in this process before any other is started: a few take less
            time than processes take to start.
        check: Called before each task and each second of a wait; what it raises ends the map.

    Raises:
        ConfigError: If there are no workers.
        OutOfMemoryError: By the map, if a worker was killed.
    """
    if workers != -1:
        checks.at_least(1, workers=workers)
    number = (os.cpu_count() or 1) if workers == -1 else workers
    seen, pool = 0, None

    def apply(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        nonlocal seen, pool
        given = list(tasks)
        seen += len(given)
        if number == 1 or seen <= after:
            for task in given:
                check()
                yield function(task)
            return
        if pool is None:
            # Freshly started processes share no locks or random state with this one.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(number, context, initializer=_end_with_parent)
        try:
            for future in [pool.submit(function, task) for task in given]:
                while not wait([future], timeout=_AWAKE_S).done:
                    check()
                yield future.result(timeout=0)
        except BrokenProcessPool:
            raise OutOfMemoryError(
                "a worker process was killed: not enough memory? Make room, and go on with --resume"
            ) from None

    try:
        yield apply
    finally:
        if pool is not None:
            # At once, a stopped one too: nobody waits for what they are at.
            processes = list(pool._processes.values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()


def _end_with_parent() -> None:
    """Let this worker end when the process that started it does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker"

    def follow() -> None:
        while parent.is_alive():
            parent.join(timeout=_AWAKE_S)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


Cut = TypeVar("Cut", list[Any], bytes)


def parts_of(values: Cut, size: int) -> list[Cut]:
    """Return consecutive parts of a list or of bytes, of one size but for the last."""
    return [values[start : start + size] for start in range(0, len(values), size)]
