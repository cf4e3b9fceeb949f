"""Telling an observer how far a run is, and how long the rest of a step will take."""

import time
from collections.abc import Callable, Mapping
from typing import Any

Observer = Callable[[Mapping[str, object]], None]
"""Hears of progress: plain figures and words, one mapping an event."""


class Pace:
    """Reports how much of a long step is done, and an estimate of the seconds left.

    Args:
        observe: Hears of progress.
        event: Fields that every reported event has besides the progress.
    """

    def __init__(self, observe: Observer, **event: Any) -> None:
        self._observe = observe
        self._event = event
        self._begin = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """Report progress to the observer.

        Args:
            done: Units of work that are done, >= 0.
            of: Units of work in all, as far as is known by now.
        """
        event = {**self._event, "done": done, "of": of}
        if done:
            took = time.monotonic() - self._begin
            event["seconds_left"] = took * (of - done) / done
        self._observe(event)
