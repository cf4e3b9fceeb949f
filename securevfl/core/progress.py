"""How far a long step of linking is, and how long the rest takes."""

import time
from collections.abc import Callable, Mapping
from typing import Any

Observer = Callable[[Mapping[str, object]], None]
"""Hears of progress: plain figures and words, one mapping an event."""


class Pace:
    """Tells an observer how much is done, and the seconds left at the pace so far.

    Args:
        observe: Hears of progress.
        event: What else each event says.
    """

    def __init__(self, observe: Observer, **event: Any) -> None:
        self._observe = observe
        self._event = event
        self._begin = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """Tell that so much is done, at least 0, of as much as is known to be due."""
        event = {**self._event, "done": done, "of": of}
        if done:
            took = time.monotonic() - self._begin
            event["seconds_left"] = took * (of - done) / done
        self._observe(event)
