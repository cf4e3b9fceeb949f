"""Work of whole numbers on all cores: Python's own arithmetic holds a lock that threads share."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from securevfl.core import checks

Progress = Callable[[int, int, float], None]
"""Gets how much is done, of how much, and the seconds left as estimated from the pace so far."""

Apply = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Applies a function to every task and yields the results in the tasks' order, as ``map`` does."""


@contextmanager
def on_cores(workers: int, *, after: int = 0) -> Iterator[Apply]:
    """Give a map over tasks, in this process or in several, which end with the context.

    Args:
        workers: Processes; 1 works in this one, -1 takes every core.
        after: Tasks that are done in this process before any other is started: a few take less
            time than processes take to start.

    Raises:
        ConfigError: If there are no workers.
    """
    if workers != -1:
        checks.at_least(1, workers=workers)
    number = (os.cpu_count() or 1) if workers == -1 else workers
    seen, pool = 0, None
    with ExitStack() as running:

        def apply(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterable[Any]:
            nonlocal seen, pool
            given = list(tasks)
            seen += len(given)
            if number == 1 or seen <= after:
                return map(function, given)
            if pool is None:
                # Freshly started processes share no locks or random state with this one. Each
                # reads its tasks from a pipe that only this process writes to: when this one is
                # killed, they find the pipe closed and end.
                context = multiprocessing.get_context("spawn")
                pool = running.enter_context(context.Pool(number))
            return pool.imap(function, given)

        yield apply
