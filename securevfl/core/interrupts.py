"""Interrupts as a state: what fails after a signal asked this process to end is that interrupt.

Python raises KeyboardInterrupt wherever it is at work. Within a C library that becomes an error of
the library's, as if a table were wrong; within a destructor it is lost.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_noted = threading.Event()


def is_noted() -> bool:
    """Return whether a signal has asked this process to end."""
    return _noted.is_set()


def check() -> None:
    """Raise KeyboardInterrupt if an interrupt is noted: something may have swallowed the first."""
    if is_noted():
        raise KeyboardInterrupt


def behind(error: BaseException) -> BaseException:
    """Return the interrupt where one is noted or the error came of one, else the error itself."""
    cause: BaseException | None = error
    while not (cause is None or isinstance(cause, KeyboardInterrupt)):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None and not is_noted() else KeyboardInterrupt()


@contextlib.contextmanager
def unwrap_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of an error in the block that an interrupt is behind."""
    try:
        yield
    except Exception as error:
        if (interrupt := behind(error)) is not error:
            raise interrupt from None
        raise


def note_signals() -> None:
    """Note SIGINT and SIGTERM from now on, and raise KeyboardInterrupt; a second one ends at once.

    A signal that this process was started to ignore stays ignored; another thread than the main one
    gets none.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _note)


@contextlib.contextmanager
def watch_signals() -> Iterator[None]:
    """Note signals while the block runs; its errors leave as from :func:`unwrap_interrupts`."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    note_signals()
    try:
        with unwrap_interrupts():
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
            _noted.clear()


def _note(_number: int, _frame: FrameType | None) -> None:
    _noted.set()
    # By the system: a handler in Python waits for whatever C library is at work.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
