"""Thread that requests predictions; requests that wait at the same time are combined.

A session answers one request at a time. What comes in while it works, and for a moment longer, goes
into the next one as a whole: that is quicker, and cheaper where every request is charged: all rows
of a request are released once.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from securevfl.core.errors import BudgetExceededError, DataError, PartyFailedError, SecureVflError
from securevfl.core.progress import unheard
from securevfl.federation.run_plan import PredictionBudget
from securevfl.runtime.prediction_session import NamedRows, PredictionSession
from securevfl.runtime.predictions import Predictions

LOG: Final = logging.getLogger("securevfl.serving")
"""Log of requests, for the operator."""

MOST_WAITING: Final = 256
"""Most requests that may wait."""

_NAP_S: Final = 0.2
_AGAIN_S: Final = 0.5
_END_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Model whose parties answer in sessions."""

    open: Callable[[], AbstractContextManager[PredictionSession]]
    """Opens a session, which waits for all parties."""
    rows: Callable[[pd.DataFrame], NamedRows]
    """Reads rows as the model's schema says."""
    interrupt: Callable[[], None]
    """Ends a wait for parties, from another thread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _WaitingRequest:
    frame: pd.DataFrame
    answer: "Future[Predictions]" = field(default_factory=Future)


class Asker:
    """Sends requests of waiting clients to the parties; a broken session is restarted."""

    def __init__(
        self,
        model: Model,
        *,
        most_rows: int,
        gather_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Create an asker; :meth:`start` starts its thread.

        Args:
            model: The model.
            most_rows: Most rows of one request.
            gather_s: Most seconds that a request waits for others to join it.
            clock: Clock in seconds.
        """
        self._model = model
        self._most_rows = most_rows
        self._gather_s = gather_s
        self._clock = clock
        self._waiting: deque[_WaitingRequest] = deque()
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, name="securevfl-asker", daemon=True)
        self._budgets: list[PredictionBudget] = []
        self.ready = False
        """Whether all parties are connected."""

    @property
    def budgets(self) -> list[PredictionBudget]:
        """Known budgets of the parties after the last request."""
        return self._budgets

    def start(self) -> None:
        """Begin to wait for the parties."""
        self._thread.start()

    def ask(self, frame: pd.DataFrame) -> "Future[Predictions]":
        """Return a future of rows' predictions; a cancelled future is not requested.

        Args:
            frame: At most ``most_rows`` rows.

        Raises:
            PartyFailedError: If a party is missing. queue.Full: If too many wait already.
        """
        asked = _WaitingRequest(frame=frame)
        with self._changed:
            if not self.ready:
                raise PartyFailedError("not all parties are connected")
            if len(self._waiting) >= MOST_WAITING:
                raise queue.Full
            self._waiting.append(asked)
            self._changed.notify()
        return asked.answer

    def close(self) -> None:
        """Answer all waiting requests, end the session, and stop the thread."""
        self._ending.set()
        with self._changed:
            self._changed.notify()
        if not self.ready:
            self._model.interrupt()
        self._thread.join(_END_S)

    def _live(self) -> None:
        while not self._ending.is_set():
            try:
                with self._model.open() as session:
                    self._budgets = session.budgets()
                    self.ready = True
                    LOG.warning("all parties are connected")
                    self._answer_all(session)
            except SecureVflError as error:
                if not self._ending.is_set():
                    LOG.warning("session lost: %s", error.for_others())
            except Exception as error:  # noqa: BLE001 - the thread must outlive whatever it was
                LOG.warning("session lost by an unexpected %s", type(error).__name__)
            self._turn_away()
            self._ending.wait(_AGAIN_S)

    def _answer_all(self, session: PredictionSession) -> None:
        while True:
            asked = self._next()
            if asked:
                self._answer(session, asked)
            elif self._ending.is_set():
                return
            else:
                session.check()

    def _next(self) -> list[_WaitingRequest]:
        """Return the waiting requests to combine, in order."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_NAP_S)
            if self._waiting and self._gather_s > 0:
                self._changed.wait_for(self._is_full, self._gather_s)
            taken: list[_WaitingRequest] = []
            rows = 0
            while self._waiting and (
                not taken or rows + len(self._waiting[0].frame) <= self._most_rows
            ):
                question = self._waiting.popleft()
                if question.answer.set_running_or_notify_cancel():
                    taken.append(question)
                    rows += len(question.frame)
            return taken

    def _is_full(self) -> bool:
        rows = sum(len(question.frame) for question in self._waiting)
        return rows >= self._most_rows or self._ending.is_set()

    def _answer(self, session: PredictionSession, asked: Sequence[_WaitingRequest]) -> None:
        began = self._clock()
        try:
            frame = pd.concat([question.frame for question in asked], ignore_index=True)
            rows = self._model.rows(frame)
            predictions = session.ask(rows, observe=unheard)
            # Before the answer: a client that has it may ask what is left.
            self._budgets = session.budgets()
        except (DataError, BudgetExceededError) as error:
            if len(asked) > 1 and not session.broken:
                # One alone may fit where all together do not, and the fault may be of one.
                self._answer_one_by_one(session, asked)
                return
            self.ready = not session.broken
            _fail(asked, error)
            if session.broken:
                raise
            return
        except Exception as error:
            # Before whoever asked hears of it, and asks whether all are there again.
            self.ready = False
            _fail(asked, error)
            raise
        took_ms = 1000 * (self._clock() - began)
        LOG.info("asked for %d rows of %d requests in %.1f ms", len(frame), len(asked), took_ms)
        first = 0
        for question in asked:
            question.answer.set_result(predictions.part(first, first + len(question.frame)))
            first += len(question.frame)

    def _answer_one_by_one(
        self, session: PredictionSession, asked: Sequence[_WaitingRequest]
    ) -> None:
        for number, question in enumerate(asked, 1):
            try:
                self._answer(session, [question])
            except Exception as error:
                _fail(asked[number:], error)
                raise

    def _turn_away(self) -> None:
        with self._changed:
            self.ready = False
            waiting = list(self._waiting)
            self._waiting.clear()
        _fail(
            [question for question in waiting if question.answer.set_running_or_notify_cancel()],
            PartyFailedError("a party was lost before it answered"),
        )


def _fail(asked: Sequence[_WaitingRequest], error: Exception) -> None:
    for question in asked:
        question.answer.set_exception(error)
