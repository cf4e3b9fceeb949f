"""The live progress of a run: a bar on a terminal, a line an epoch elsewhere. All on stderr."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_QUIET_SECONDS = 5.0


def bars(console: Console, *, name_width: int) -> Progress:
    """Return progress bars with name, bar, count, figures and time; shown on terminals only."""
    return Progress(
        TextColumn(f"[bold]{{task.description:<{name_width}}}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class RunProgress:
    """Show a run's events; call the object with each event."""

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

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a run; events of an unknown kind are ignored."""
        kind = event["event"]
        if kind == "warning":
            text = f"securevfl: warning: {event['text']}"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._note(event)
        if kind == "stage":
            self._begin(str(event["text"]), total=int(event.get("of", 1)))
        elif kind == "links":
            self._long_step(f"linking {event['name']}", event)
        elif kind == "ciphertexts":
            self._long_step(f"{event['name']} prepares ciphertexts", event)
        elif kind == "release":
            self._advance("releasing rows", int(event["done"]), int(event["of"]))
        elif kind == "pretraining-round":
            self._advance(f"iteration {event['iteration']}", int(event["done"]), int(event["of"]))
        elif kind == "pretraining":
            self._pretraining(event)
        elif kind == "round":
            self._figures["loss"] = f"loss {event['loss']:.4f}"
            self._advance(f"epoch {event['epoch']}", int(event["done"]), int(event["of"]))
        elif kind == "epoch":
            self._figures["loss"] = f"loss {event['loss']:.4f}"
            self._figures["metric"] = f"validation {self._metric} {event['validation']:.4f}"
            self._line(f"epoch {event['epoch']}/{event['epochs']}: {self._text()}")

    def _note(self, event: Mapping[str, Any]) -> None:
        """Keep the event's figures for the lines to come, but the time left for this event only."""
        if "epsilon" in event:
            self._figures["epsilon"] = f"epsilon {event['epsilon']:.3g}"
        if "bytes" in event:
            self._figures["bytes"] = f"{event['bytes'] / 1e6:.1f} MB"
        self._figures.pop("left", None)
        if "seconds_left" in event:
            self._figures["left"] = f"{timedelta(seconds=round(event['seconds_left']))} left"

    def _long_step(self, stage: str, event: Mapping[str, Any]) -> None:
        done, of = int(event["done"]), int(event["of"])
        self._advance(stage, done, of)
        if "left" in self._figures:
            self._line(f"{stage} {done}/{of}: {self._text()}")

    def _pretraining(self, event: Mapping[str, Any]) -> None:
        parts = [
            f"{name} loss {event[f'{name}_loss']:.4f} (spread {event[f'{name}_spread']:.2f})"
            for name in ("cross", "local")
            if f"{name}_loss" in event
        ]
        self._figures["loss"] = "  ".join(parts)
        self._advance("pretraining", int(event["iteration"]), int(event["iterations"]))
        self._line(f"pretraining {event['iteration']}/{event['iterations']}: {self._text()}")

    def _text(self) -> str:
        order = ("left", "loss", "metric", "epsilon", "bytes")
        return "  ".join(self._figures[name] for name in order if name in self._figures)

    def _begin(self, stage: str, *, total: int) -> None:
        self._stage = stage
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(stage, total=total, figures=self._text())
        if not self._live:
            print(stage, file=sys.stderr, flush=True)

    def _advance(self, stage: str, done: int, of: int) -> None:
        if self._live:
            if self._task is None or stage != self._stage:
                self._begin(stage, total=of)
            assert self._task is not None
            self._progress.update(self._task, completed=done, total=of, figures=self._text())

    def _line(self, text: str) -> None:
        if self._live:
            return
        # A log file wants some lines, not hundreds.
        if time.monotonic() - self._last_line >= _QUIET_SECONDS:
            self._last_line = time.monotonic()
            print(text, file=sys.stderr, flush=True)
