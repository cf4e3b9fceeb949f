"""A party's process towards its launcher: reports, and ending with it.

Without a launcher (a party started by hand) every function here does nothing.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any, Final

from securevfl.core import interrupts
from securevfl.core.logs import plain
from securevfl.core.memory import peak_memory_bytes

EVENTS_VARIABLE: Final = "SECUREVFL_EVENTS_FD"
LIFELINE_VARIABLE: Final = "SECUREVFL_LIFELINE"
FAILURE_EVENT: Final = "failure"
MEMORY_EVENT: Final = "memory"

# Seconds that a party has to say farewell when the launcher has ended, before it is killed.
_FAREWELL_S: Final = 5.0


def report(event: str, **fields: Any) -> None:
    """Report an event to the launcher as one JSON line of figures and words.

    Raises:
        SecureVflError: If a field may not be logged, for example a tensor.

    Reveals:
        To the process that started this one: the fields.
    """
    line = json.dumps({"event": event, **plain(fields)}) + "\n"
    number = os.environ.get(EVENTS_VARIABLE)
    if number is None:
        return
    rest = line.encode()
    # If the launcher has ended, the lifeline ends this process, and a process that only inherited
    # the variable has no launcher: neither is a reason for a party to fail.
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(int(number), rest) :]


def report_failure(*, party: str, reason: str, exit_code: int) -> None:
    """Report to the launcher where a failure began, before this process ends.

    Args:
        party: The party where it began, as far as this process knows.
        reason: One sentence, shown to the user of this machine.
        exit_code: Exit code of this process.

    Reveals:
        To the process that started this one: the arguments.
    """
    report(FAILURE_EVENT, party=party, reason=reason, exit_code=exit_code)


def report_memory() -> None:
    """Report this process's peak resident memory to the launcher; call it last.

    Reveals:
        To the process that started this one: that figure.
    """
    peak = peak_memory_bytes()
    if peak is not None:
        report(MEMORY_EVENT, peak_memory_bytes=peak)


def is_launched() -> bool:
    """Return whether a launcher on this machine started this process."""
    return LIFELINE_VARIABLE in os.environ


def end_with_launcher() -> None:
    """Make this process end when its launcher ends for any reason; call it first.

    The launcher holds the only writing end of this process's standard input. When it closes, even
    by SIGKILL, the main thread is interrupted as by Ctrl-C, so that it can notify the other
    parties, and a few seconds later the process ends in any case. SIGTERM interrupts it in the same
    way.
    """
    if not is_launched():
        return
    interrupts.note_signals()
    threading.Thread(target=_follow, name="securevfl-lifeline", daemon=True).start()


def _follow() -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            continue
    hard_end = threading.Timer(_FAREWELL_S, os._exit, args=(1,))
    hard_end.daemon = True
    hard_end.start()
    # The launcher may have sent a signal before: a second one would cut off the farewell.
    if not interrupts.is_noted():
        os.kill(os.getpid(), signal.SIGTERM)
