"""Live progress of a run on stderr: a bar on a terminal, elsewhere a line for each epoch."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import assert_never

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from securevfl.core import interrupts, logs, progress
from securevfl.core.formatting import epsilon_in_words, format_figure

_QUIET_SECONDS = 5.0

_SpokenEvent = (
    progress.Warned
    | progress.SessionLost
    | progress.SpendingPlanned
    | progress.KeysAnnounced
    | progress.LinksCounted
    | progress.LinkedRowsCounted
    | progress.RowsAligned
)
"""Events that are shown as a sentence, on a terminal too."""


class _Count(ProgressColumn):
    """Steps done of all; nothing where there is one."""

    def render(self, task: Task) -> Text:
        """Return the count of a bar."""
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


def bars(console: Console, *, name_width: int) -> Progress:
    """Return progress bars with name, count, figures and time; shown on terminals only.

    Name and figures wrap to a second line on a narrow terminal.
    """
    return Progress(
        TextColumn("[bold]{task.description}", table_column=Column(min_width=name_width)),
        BarColumn(bar_width=24),
        _Count(),
        TextColumn("{task.fields[figures]}", table_column=Column()),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class RunProgress:
    """Shows and logs a run's events; called with each event."""

    def __init__(self, *, metric: str) -> None:
        self._metric = metric
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = bars(self._console, name_width=22)
        self._task: TaskID | None = None
        self._stage = ""
        self._figures: dict[str, str] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, event: progress.ProgressEvent) -> None:
        """Show an event of a run; raise KeyboardInterrupt if an interrupt is noted."""
        interrupts.check()
        logs.log_event(event)
        self._note(event)
        if isinstance(event, _SpokenEvent):
            self._say(_sentence(event))
            return
        match event:
            case progress.Stage():
                self._begin(event.text, total=event.of)
            case progress.LinksMade():
                self._long_step(f"linking {event.name}", event)
            case progress.CiphertextsMade():
                self._long_step(f"{event.name} prepares ciphertexts", event)
            case progress.CoalitionsValued():
                self._long_step(event.name, event)
            case progress.RowsReleased():
                self._advance("releasing rows", event.done, event.of)
            case progress.PretrainingRound():
                self._advance(f"iteration {event.iteration}", event.done, event.of)
            case progress.PretrainingIteration():
                self._pretraining(event)
            case progress.RoundDone():
                self._figures["loss"] = f"loss {format_figure(event.loss)}"
                self._advance(f"epoch {event.epoch}", event.done, event.of)
            case progress.EpochDone():
                self._figures["loss"] = f"loss {format_figure(event.loss)}"
                self._figures["metric"] = (
                    f"validation {self._metric} {format_figure(event.validation)}"
                )
                self._line(f"epoch {event.epoch}/{event.epochs}: {self._text()}")
            case progress.Listening() | progress.PartyDone():
                pass
            case _:
                assert_never(event)

    def _say(self, text: str) -> None:
        line = f"securevfl: {text}"
        self._console.print(
            line, markup=False, highlight=False, soft_wrap=not self._console.is_terminal
        )

    def _note(self, event: progress.ProgressEvent) -> None:
        """Store the event's figures for later lines; the time left is for this event only."""
        figures = progress.event_fields(event)
        if "epsilon" in figures and not isinstance(event, progress.SpendingPlanned):
            self._figures["epsilon"] = f"epsilon {figures['epsilon']:.3g}"
        if "bytes" in figures:
            self._figures["bytes"] = f"{figures['bytes'] / 1e6:.1f} MB"
        self._figures.pop("left", None)
        if "seconds_left" in figures:
            self._figures["left"] = f"{timedelta(seconds=round(figures['seconds_left']))} left"

    def _long_step(
        self,
        stage: str,
        event: progress.LinksMade | progress.CiphertextsMade | progress.CoalitionsValued,
    ) -> None:
        self._advance(stage, event.done, event.of)
        if "left" in self._figures:
            self._line(f"{stage} {event.done}/{event.of}: {self._text()}")

    def _pretraining(self, event: progress.PretrainingIteration) -> None:
        steps = {
            "cross": (event.cross_loss, event.cross_spread),
            "local": (event.local_loss, event.local_spread),
        }
        parts = [
            f"{name} loss {format_figure(loss)} (spread {spread:.2f})"
            for name, (loss, spread) in steps.items()
            if loss is not None and spread is not None
        ]
        self._figures["loss"] = "  ".join(parts)
        self._advance("pretraining", event.iteration, event.iterations)
        self._line(f"pretraining {event.iteration}/{event.iterations}: {self._text()}")

    def _text(self) -> str:
        order = ("left", "loss", "metric", "epsilon", "bytes")
        return "  ".join(self._figures[name] for name in order if name in self._figures)

    def _begin(self, stage: str, *, total: int) -> TaskID:
        self._stage = stage
        if self._task is not None:
            self._progress.remove_task(self._task)
        # A bar of one step would stand still; without an end it moves.
        shown = total if total > 1 else None
        self._task = task = self._progress.add_task(stage, total=shown, figures=self._text())
        if not self._live:
            _line(stage)
        return task

    def _advance(self, stage: str, done: int, of: int) -> None:
        if self._live:
            task = self._task
            if task is None or stage != self._stage:
                task = self._begin(stage, total=of)
            self._progress.update(task, completed=done, total=of, figures=self._text())

    def _line(self, text: str) -> None:
        if self._live:
            return
        # A log file should get some lines, not hundreds.
        if time.monotonic() - self._last_line >= _QUIET_SECONDS:
            self._last_line = time.monotonic()
            _line(text)


def _sentence(event: _SpokenEvent) -> str:
    match event:
        case progress.Warned():
            return f"warning: {event.text}"
        case progress.SessionLost():
            return (
                f"warning: {event.why}; waiting up to {event.wait_s:g} s for all parties to be "
                f"there again, to go on from what all have saved"
            )
        case progress.SpendingPlanned():
            return spending_in_words(event)
        case progress.KeysAnnounced():
            return f"keys of {event.name}: {event.keys:,} announced, for {event.rows:,} rows"
        case progress.LinksCounted():
            text = progress.links_in_words(event).partition("; ")[0]
            return f"{text}; warning: {event.doubt}" if event.doubt else text
        case progress.LinkedRowsCounted():
            return progress.linked_rows_in_words(event)
        case progress.RowsAligned():
            return progress.alignment_in_words(progress.event_fields(event))


def spending_in_words(event: progress.SpendingPlanned) -> str:
    """Return a run's planned and earlier spending, as one line of text."""
    before = "first run"
    if event.runs_before:
        before = f"total of {event.runs_before + 1} runs {epsilon_in_words(event.total)}"
    limit = "no limit"
    if event.limit is not None:
        limit = f"limit {event.limit:g} at delta {event.limit_delta:g}"
    own = f"epsilon {epsilon_in_words(event.epsilon)}"
    if event.epsilon is not None:
        own += f", delta {event.delta:g} ({event.unit})"
    return f"cost to {event.party}: {own}; {before}; {limit}"


def _line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
