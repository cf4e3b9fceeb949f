"""The live progress of a comparison: a bar for all runs and one for each that is training."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from securevfl.cli.progress import bars
from securevfl.core.progress import EpochDone, ProgressEvent, Warned
from securevfl.studies.compare.run import MethodRun


class CompareProgress:
    """Show runs as they train; call the object with each run's events. All on stderr."""

    def __init__(self, *, of: int) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = bars(self._console, name_width=28)
        self._of = of
        self._all = self._progress.add_task("runs", total=of, figures="")
        self._done = 0
        self._tasks: dict[MethodRun, TaskID] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> "CompareProgress":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the display as it is; lines may be printed below it."""
        self._progress.stop()

    def __call__(self, run: MethodRun, event: ProgressEvent) -> None:
        """Take one event of a run; only warnings and epochs are shown."""
        if run not in self._tasks:
            name = f"{run.method}, seed {run.seed}"
            self._tasks[run] = self._progress.add_task(name, total=1, figures="")
        if isinstance(event, Warned) and event.text not in self._warned:
            self._warned.add(event.text)
            text = f"securevfl: warning: {event.text}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(event, EpochDone):
            self._progress.update(
                self._tasks[run],
                completed=event.epoch,
                total=event.epochs,
                figures=f"validation {event.validation:.4f}",
            )

    def done(self, result: Mapping[str, Any]) -> None:
        """Take a finished run's result."""
        self._done += 1
        run = MethodRun(method=result["method"], seed=result["seed"])
        task = self._tasks.pop(run, None)
        if task is not None:
            self._progress.remove_task(task)
        self._progress.update(self._all, completed=self._done)
        text = f"{run.method}, seed {run.seed}: {result['metric']} {result['test']:.4f}"
        if self._live:
            self._progress.console.print(text, highlight=False)
        else:
            print(f"done {self._done}/{self._of}: {text}", file=sys.stderr, flush=True)
