"""One thread asks the parties, and everybody who waits meanwhile is asked for together.

A session answers one request at a time. What comes in while it works, and for a moment longer, goes
into the next one as a whole: that is quicker, and cheaper where every request is charged: all rows
of a request are released once.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import pandas as pd

from securevfl.core.errors import BudgetExceededError, DataError, PartyFailedError, SecureVflError
from securevfl.core.progress import unheard
from securevfl.federation.run_plan import PredictionBudget
from securevfl.runtime.new_rows import NamedRows
from securevfl.runtime.prediction_session import PredictionSession
from securevfl.runtime.predictions import Predictions

MOST_WAITING: Final = 256
"""Requests that may wait for the one before them."""

_NAP_S: Final = 0.2
_AGAIN_S: Final = 0.5
_END_S: Final = 60.0


@runtime_checkable
class Listener(Protocol):
    """Hears what an :class:`Asker` does."""

    def note_request(self, requests: int, rows: int, seconds: float) -> None:
        """A request of the parties has been answered."""
        ...

    def said(self, text: str) -> None:
        """Something happened that the operator should know."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """What is asked: a session when it is entered, again and again."""

    open: Callable[[], AbstractContextManager[PredictionSession]]
    """Waits until all parties are there."""
    rows: Callable[[pd.DataFrame], NamedRows]
    """Reads rows as the model's schema says."""
    interrupt: Callable[[], None]
    """Ends a wait for parties, from another thread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
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
        listener: Listener,
        clock: Callable[[], float],
    ) -> None:
        """Make it; :meth:`start` begins.

        Args:
            model: What is asked.
            most_rows: Of one request.
            gather_s: How long a request waits for others to go with it, at most.
            listener: Hears what happens.
            clock: Seconds.
        """
        self._model = model
        self._most_rows = most_rows
        self._gather_s = gather_s
        self._listener = listener
        self._clock = clock
        self._waiting: deque[_Asked] = deque()
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._live, name="securevfl-asker", daemon=True)
        self._budgets: list[PredictionBudget] = []
        self.ready = False
        """Whether all parties are there."""

    @property
    def budgets(self) -> list[PredictionBudget]:
        """What is known of the parties' budgets, as it was after the last request."""
        return self._budgets

    def start(self) -> None:
        """Begin to wait for the parties."""
        self._thread.start()

    def ask(self, frame: pd.DataFrame) -> "Future[Predictions]":
        """Return what will be the predictions of rows; a cancelled one is not asked for.

        Args:
            frame: At most ``most_rows`` rows.

        Raises:
            PartyFailedError: If not all parties are there.
            queue.Full: If too many wait already.
        """
        asked = _Asked(frame=frame)
        with self._changed:
            if not self.ready:
                raise PartyFailedError("not all parties are connected")
            if len(self._waiting) >= MOST_WAITING:
                raise queue.Full
            self._waiting.append(asked)
            self._changed.notify()
        return asked.answer

    def close(self) -> None:
        """Answer who waits, end the session in order, and stop."""
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
                    self._listener.said("all parties are connected")
                    self._answer_all(session)
            except SecureVflError as error:
                if not self._ending.is_set():
                    self._listener.said(f"session lost: {error.for_others()}")
            except Exception as error:  # noqa: BLE001 - the thread must outlive whatever it was
                self._listener.said(f"session lost by an unexpected {type(error).__name__}")
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

    def _next(self) -> list[_Asked]:
        """Return the requests that go together, in order; empty if none wait."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_NAP_S)
            if self._waiting and self._gather_s > 0:
                self._changed.wait_for(self._is_full, self._gather_s)
            taken: list[_Asked] = []
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

    def _answer(self, session: PredictionSession, asked: Sequence[_Asked]) -> None:
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
        self._listener.note_request(len(asked), len(frame), self._clock() - began)
        first = 0
        for question in asked:
            question.answer.set_result(predictions.part(first, first + len(question.frame)))
            first += len(question.frame)

    def _answer_one_by_one(self, session: PredictionSession, asked: Sequence[_Asked]) -> None:
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


def _fail(asked: Sequence[_Asked], error: Exception) -> None:
    for question in asked:
        question.answer.set_exception(error)
