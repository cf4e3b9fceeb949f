"""Work of whole numbers on all cores: Python's own arithmetic holds a lock that threads share."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from securevfl.core import checks

Progress = Callable[[int, int, float], None]
"""Gets how much is done, of how much, and the seconds left as estimated from the pace so far."""

Apply = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Applies a function to every task and yields the results in the tasks' order."""


@contextmanager
def on_cores(workers: int) -> Iterator[Apply]:
    """Give a map over tasks, in this process or in several.

    Args:
        workers: Processes; 1 works in this one, -1 takes every core.

    Raises:
        ConfigError: If there are no workers.
    """
    if workers != -1:
        checks.at_least(1, workers=workers)
    number = (os.cpu_count() or 1) if workers == -1 else workers
    if number == 1:
        yield map
        return
    # Freshly started processes share no locks or random state with this one, and end with it.
    with multiprocessing.get_context("spawn").Pool(number) as pool:
        yield pool.imap
