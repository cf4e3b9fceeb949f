"""What a party's process does for the launcher that started it: report, and end with it.

Without a launcher (a party started by hand on its own machine) every function here does nothing.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any, Final

from securevfl.core import interrupts
from securevfl.core.files import plain
from securevfl.core.memory import peak_memory_bytes

EVENTS_VARIABLE: Final = "SECUREVFL_EVENTS_FD"
LIFELINE_VARIABLE: Final = "SECUREVFL_LIFELINE"
FAILURE_EVENT: Final = "failure"
MEMORY_EVENT: Final = "memory"

# How long a party may take to say farewell when the launcher has gone, before it is ended hard.
_FAREWELL_S: Final = 5.0


def report(event: str, **fields: Any) -> None:
    """Report to the launcher what happens, as one JSON line; figures and words only.

    Raises:
        SecureVflError: If a field is a tensor or another object that may not be logged.

    Reveals:
        To the process that started this one: the fields.
    """
    line = json.dumps({"event": event, **plain(fields)}) + "\n"
    number = os.environ.get(EVENTS_VARIABLE)
    if number is None:
        return
    rest = line.encode()
    # A launcher that is gone ends this process by the lifeline, and a process that only inherited
    # the variable has no launcher: neither is a reason for a party to fail.
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(int(number), rest) :]


def report_failure(*, party: str, reason: str, exit_code: int) -> None:
    """Report to the launcher where the failure began, before this process ends.

    Args:
        party: Where it began, as far as this process knows: itself or another party.
        reason: One sentence, shown to the user of this machine.
        exit_code: What this process is about to exit with.

    Reveals:
        To the process that started this one: the arguments.
    """
    report(FAILURE_EVENT, party=party, reason=reason, exit_code=exit_code)


def report_memory() -> None:
    """Report to the launcher this process's largest resident memory; call it last of all.

    Reveals:
        To the process that started this one: that figure.
    """
    peak = peak_memory_bytes()
    if peak is not None:
        report(MEMORY_EVENT, peak_memory_bytes=peak)


def is_launched() -> bool:
    """Return whether a launcher on this machine waits for this process, and finishes its work."""
    return LIFELINE_VARIABLE in os.environ


def end_with_launcher() -> None:
    """Make this process end when its launcher does, however that ends; call it first of all.

    The launcher holds the only writing end of this process's standard input. When it closes,
    even by SIGKILL, the system says so here: the main thread is interrupted as by Ctrl-C, so
    that it can tell the other parties, and a few seconds later the process ends in any case.
    SIGTERM interrupts it in the same way.
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
    # The launcher's own signal may have come first: a second would cut off the farewell.
    if not interrupts.is_noted():
        os.kill(os.getpid(), signal.SIGTERM)
