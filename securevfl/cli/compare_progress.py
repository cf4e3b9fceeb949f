"""The live progress of a comparison: a bar for all runs and one for each that is training."""

import sys
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from securevfl.cli.progress import bars
from securevfl.core.progress import EpochDone, ProgressEvent, Warned
from securevfl.studies.compare.run import LeftOut, MethodRun


class CompareProgress:
    """Show runs as they train; call the object with each run's events. All on stderr."""

    def __init__(self, *, methods: int, seeds: int) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = bars(self._console, name_width=28)
        self._seeds = seeds
        self._of = methods * seeds
        self._all = self._progress.add_task("runs", total=self._of, figures="")
        self._done: Counter[str] = Counter()
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
        run = MethodRun(method=result["method"], seed=result["seed"])
        self._done[run.method] += 1
        self._forget(run)
        self._progress.update(self._all, completed=self._done.total())
        text = f"{run.method}, seed {run.seed}: {result['metric']} {result['test']:.4f}"
        self._say(text, f"done {self._done.total()}/{self._of}: {text}")

    def left_out(self, one: LeftOut) -> None:
        """Take a method that is skipped or has failed; what it has not run is not waited for."""
        for run in [run for run in self._tasks if run.method == one.method]:
            self._forget(run)
        self._of -= self._seeds - self._done[one.method]
        self._progress.update(self._all, total=self._of)
        text = f"{one.method} {one.status}: {one.reason}"
        self._say(text, text)

    def _forget(self, run: MethodRun) -> None:
        task = self._tasks.pop(run, None)
        if task is not None:
            self._progress.remove_task(task)

    def _say(self, live: str, plain: str) -> None:
        if self._live:
            self._progress.console.print(live, highlight=False, markup=False)
        else:
            print(plain, file=sys.stderr, flush=True)
