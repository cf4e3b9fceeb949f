"""Runs of a study in one folder: finished ones are read, missing ones are trained."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.lab.engine import (
    Engine,
    InProcessEngine,
    ResultObserver,
    RunObserver,
    RunObservers,
    StudyContext,
    WorkerProcesses,
)
from securevfl.lab.one_run import LeftOut, Run, RunFailure, Task, finished_run


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
