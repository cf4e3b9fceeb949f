"""What a fuzzed decoder must keep, whatever bytes it is given.

A decoder returns or raises a :class:`SecureVflError` of one line. Anything else is a finding: an
error of another type, a text that no terminal should show, more time or memory than was allowed.
"""

import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

from securevfl import SecureVflError

MOST_CHARACTERS: Final = 2000
"""Of one error's text."""

_KIB: Final = 1024
_RESET_PEAK: Final = "5"


class Broken(AssertionError):
    """A decoder took an input otherwise than it must."""


class _TooSlow(BaseException):
    """Raised in the middle of a decoder; no ``except Exception`` of its own stops it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One decoder."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    """Makes inputs that it takes, from which all others are made."""
    read: Callable[[bytes], None]
    """Decodes an input; where it is one, also checks that what is written again means the same."""
    words: tuple[bytes, ...] = ()
    """What its format knows, to be put into inputs."""
    mutate: Callable[[bytes, Random], bytes] | None = None
    """Alters an input as its format's structure suggests; None alters bytes alone."""
    seconds: float = 3.0
    """Of computing, for one input."""
    room: int = 64 << 20
    """Bytes that one input may take, beside 256 for each byte of its own."""

    def check(self, data: bytes) -> bool:
        """Decode one input; return whether it was taken.

        Raises:
            Broken: If it took too much time or memory, or was refused in an unfit text.
            Exception: What the decoder lets through.
        """
        before, taken = _peak(), True
        try:
            with _within(self.seconds):
                self.read(data)
        except SecureVflError as error:
            require_one_line(str(error))
            taken = False
        except _TooSlow:
            raise Broken(f"{self.name}: took more than {self.seconds} s of computing") from None
        grown = _peak() - before
        if grown > self.room + 256 * len(data):
            raise Broken(f"{self.name}: took {grown >> 20} MiB for {len(data)} bytes")
        return taken


def require_one_line(text: str) -> None:
    """Refuse a text that a log or a terminal could not show as one line.

    Raises:
        Broken: Saying what is wrong with it.
    """
    if not text or len(text) > MOST_CHARACTERS:
        raise Broken(f"an error of {len(text)} characters: {text[:200]!r}")
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text):
        raise Broken(f"an error with control characters: {text!r}")
    with suppress(UnicodeEncodeError):
        text.encode()
        return
    raise Broken(f"an error that is no text: {text!r}")


def forget_peak() -> None:
    """Measure memory from what is in use now; without it an earlier peak hides a lower one."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _peak() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * _KIB


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlow


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Stop after so many seconds of computing, which a busy machine does not shorten."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
