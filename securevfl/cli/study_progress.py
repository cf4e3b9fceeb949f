"""The live progress of many runs: a bar for all of them and one for each that is training."""

import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from securevfl.core.formatting import written
from securevfl.core.progress import EpochDone, ProgressEvent, Warned
from securevfl.lab.one_run import LeftOut, Run
from securevfl.runtime.shown_progress import bars


class StudyProgress:
    """Show runs as they train; call the object with each run's events. All on stderr.

    Args:
        names: How many methods, or settings, are trained.
        seeds: With how many seeds each.
        folder: Where finished runs are kept, which Ctrl-C tells.
    """

    def __init__(self, *, names: int, seeds: int, folder: Path) -> None:
        self._console = Console(stderr=True)
        self._stdout = redirect_stdout(sys.stderr)
        self._live = self._console.is_terminal
        self._progress = bars(self._console, name_width=28)
        self._seeds = seeds
        self._folder = folder
        self._of = names * seeds
        self._all = self._progress.add_task("runs", total=self._of, figures="")
        self._done: Counter[str] = Counter()
        self._tasks: dict[Run, TaskID] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> "StudyProgress":
        # What libraries print meanwhile, as Ray does of a worker that died, is no answer of ours.
        self._stdout.__enter__()
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._stdout.__exit__(kind, error, trace)
        if kind is KeyboardInterrupt:
            print(
                f"{self._done.total()} of {self._of} runs are kept in {self._folder}; the same "
                f"command goes on from there",
                file=sys.stderr,
            )

    def __call__(self, run: Run, event: ProgressEvent) -> None:
        """Take one event of a run; only warnings and epochs are shown."""
        if run not in self._tasks:
            name = f"{run.name}, seed {run.seed}"
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
                figures=f"validation {written(event.validation)}",
            )

    def done(self, run: Run, result: Mapping[str, Any]) -> None:
        """Take a finished run's result."""
        self._done[run.name] += 1
        self._forget(run)
        self._progress.update(self._all, completed=self._done.total())
        text = f"{run.name}, seed {run.seed}: {result['metric']} {written(result['test'])}"
        self._say(text, f"done {self._done.total()}/{self._of}: {text}")

    def left_out(self, one: LeftOut) -> None:
        """Take what is skipped or has failed; what it has not run is not waited for."""
        for run in [run for run in self._tasks if run.name == one.name]:
            self._forget(run)
        self._of -= self._seeds - self._done[one.name]
        self._progress.update(self._all, total=self._of)
        text = f"{one.name} {one.status}: {one.reason}"
        self._say(text, text)

    def _forget(self, run: Run) -> None:
        task = self._tasks.pop(run, None)
        if task is not None:
            self._progress.remove_task(task)

    def _say(self, live: str, plain: str) -> None:
        if self._live:
            self._progress.console.print(live, highlight=False, markup=False)
        else:
            print(plain, file=sys.stderr, flush=True)
