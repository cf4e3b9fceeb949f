"""How far a long step of linking is, and how long the rest takes."""

import time
from typing import Any

from securevfl.federation.primary import Observer


class Pace:
    """Tells an observer how much is done, and the seconds left at the pace so far.

    Args:
        observe: Hears of progress.
        of: How much there is to do.
        event: What else each event says.
    """

    def __init__(self, observe: Observer, *, of: int, **event: Any) -> None:
        self._observe = observe
        self._of = of
        self._event = event
        self._begin = time.monotonic()

    def __call__(self, done: int) -> None:
        """Tell that so much is done, at least 0."""
        event = {**self._event, "done": done, "of": self._of}
        if done:
            took = time.monotonic() - self._begin
            event["seconds_left"] = took * (self._of - done) / done
        self._observe(event)
