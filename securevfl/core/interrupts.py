"""Interrupts as a state: errors after a signal to end count as that interrupt.

Python raises KeyboardInterrupt wherever it happens to be. In a C library that becomes the library's
error, as if a table were wrong; in a destructor it is lost.
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
    """Raise KeyboardInterrupt if an interrupt is noted, in case the first one was swallowed."""
    if is_noted():
        raise KeyboardInterrupt


def behind(error: BaseException) -> BaseException:
    """Return KeyboardInterrupt if an interrupt is noted or caused the error, else the error."""
    cause: BaseException | None = error
    while not (cause is None or isinstance(cause, KeyboardInterrupt)):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None and not is_noted() else KeyboardInterrupt()


@contextlib.contextmanager
def unwrap_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt instead of an error in the block that an interrupt caused."""
    try:
        yield
    except Exception as error:
        if (interrupt := behind(error)) is not error:
            raise interrupt from None
        raise


def note_signals() -> None:
    """Handle SIGINT and SIGTERM: note them and raise KeyboardInterrupt; a second one ends at once.

    Signals that this process was started to ignore stay ignored. Outside the main thread it does
    nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _note)


@contextlib.contextmanager
def watch_signals() -> Iterator[None]:
    """Handle signals by :func:`note_signals`, and errors by :func:`unwrap_interrupts`."""
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
    # The system's handler, since one in Python would wait for a running C library.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
