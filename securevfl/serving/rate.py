"""Rate of predictions: a bucket that fills with time, and that every predicted row takes from."""

import math
from collections.abc import Callable


class Rate:
    """At most so many predictions a second, over all clients.

    As many rows as a second allows, and always one, may come at once. A larger request is refused
    for good: it would keep all other clients waiting for as long as its rows last.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        """Make a full bucket.

        Args:
            per_s: Rows a second; None for no limit.
            clock: Seconds.
        """
        self._per_s = math.inf if per_s is None else per_s
        self._clock = clock
        self._most = max(1.0, self._per_s)
        self._allowed = self._most
        self._filled = clock()

    def most_rows(self, limit: int) -> int:
        """Return how many rows one request may have.

        Args:
            limit: How many it may have at any rate.
        """
        return limit if self._most >= limit else int(self._most)

    def wait_s(self, rows: int) -> float:
        """Return how long rows must wait for their turn, and count them if they need not.

        Args:
            rows: Of one request, at most :meth:`most_rows`.
        """
        if math.isinf(self._per_s):
            return 0.0
        now = self._clock()
        earned = (now - self._filled) * self._per_s
        self._allowed, self._filled = min(self._most, self._allowed + earned), now
        if self._allowed < rows:
            return (rows - self._allowed) / self._per_s
        self._allowed -= rows
        return 0.0
