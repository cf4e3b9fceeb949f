"""Where a study's runs are trained: what every engine is told, and what it tells."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from securevfl.core.progress import Observer, ProgressEvent, RoundDone, RowsReleased
from securevfl.data.tables import PartyTable
from securevfl.lab.one_run import Run, RunFailure, Task

# A run tells of thousands of rounds; people read a few a second.
_TELL_EVERY_S: Final = 0.2

ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)
"""The environment of a process that computes with one thread: sums then depend on no machine's
number of cores."""

Tell = Callable[[Run, ProgressEvent], None]
"""Hears of one run's progress."""

Done = Callable[[Run, dict[str, Any]], None]
"""Gets a run's result."""


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
    """Who hears of a study's runs."""

    tell: Tell
    """Of progress."""

    done: Done
    """Of each result, as soon as it is there."""

    failed: Callable[[Run, RunFailure], None]
    """Of each run without one."""


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
        """Leave out what is left of a name."""
        self.tasks = deque(task for task in self.tasks if task.run.name != name)

    def again(self, task: Task) -> bool:
        """Put a run whose process died first in line, and return whether it may begin again."""
        if task.run in self._begun_again:
            return False
        self._begun_again.add(task.run)
        self.tasks.appendleft(task)
        return True


def throttled(observe: Observer) -> Observer:
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
