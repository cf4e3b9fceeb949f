"""What a nursery's own process does: fork the children that its launcher asks for.

One thread and no lock: whatever a fork copies is at rest.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core.memory import RSS_UNIT
from securevfl.launch.child import EVENTS_VARIABLE, LIFELINE_VARIABLE
from securevfl.launch.nursery import MESSAGE_BYTES

# Standard input, log, reports, and what is handed over: a federation file and an identity.
_MOST_HANDLES: Final = 16


def fork_children(run: Callable[[], None]) -> None:
    """Fork what the launcher asks for, until it is gone.

    Args:
        run: What each child does; it reads ``sys.argv``, and may end by :class:`SystemExit`.
    """
    with socket.socket(fileno=int(sys.argv[1])) as wire:
        asked = _children_wanted(wire)
    if asked is not None:
        _become(asked)
        code = _code_of(run)
        sys.stdout.flush()
        sys.stderr.flush()
        # Taking Python down would write to all the memory that is shared, in every child at once.
        os._exit(code)


def _children_wanted(wire: socket.socket) -> dict[str, Any] | None:
    """Fork what the launcher asks for until it is gone: None; in a child, what it is to be."""
    children: dict[int, int] = {}
    with selectors.PollSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            for handle in set(ready) & set(children):
                selector.unregister(handle)
                os.close(handle)
                _tell_end(wire, children.pop(handle))
            if wire.fileno() not in ready:
                continue
            content, handles, _, _ = socket.recv_fds(wire, MESSAGE_BYTES, _MOST_HANDLES)
            if not content:
                return None
            try:
                pid = os.fork()
            except OSError as error:
                _tell(wire, {"refused": error.errno or errno.EAGAIN})
                pid = -1
            if not pid:
                for other in children:
                    os.close(other)
                return {**json.loads(content), "handles": handles}
            for handle in handles:
                os.close(handle)
            if pid > 0:
                handle = os.pidfd_open(pid)
                children[handle] = pid
                selector.register(handle, selectors.EVENT_READ)
                _tell(wire, {"started": pid}, handle)


def _tell(wire: socket.socket, told: Mapping[str, int], *handles: int) -> None:
    # A launcher that is gone is noticed by the next reading.
    with contextlib.suppress(ConnectionError):
        socket.send_fds(wire, [json.dumps(told).encode()], handles)


def _tell_end(wire: socket.socket, pid: int) -> None:
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    peak = usage.ru_maxrss * RSS_UNIT
    _tell(wire, {"ended": pid, "code": code, "peak_memory_bytes": peak})


def _code_of(run: Callable[[], None]) -> int:
    """Run it as the interpreter runs a program; return the exit code."""
    try:
        run()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _become(asked: Mapping[str, Any]) -> None:
    """Make this process the one that was asked for: its files, arguments, name and group."""
    # Ctrl-C is the launcher's to handle.
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(asked["name"], encoding="utf-8")
    lifeline, log, events, *others = asked["handles"]
    for number, handle in enumerate((lifeline, log, log)):
        os.dup2(handle, number)
    os.close(lifeline)
    os.close(log)
    paths = {name: f"/dev/fd/{other}" for name, other in zip(asked["handed"], others, strict=True)}
    sys.argv = ["securevfl", *(paths.get(one, one) for one in asked["arguments"])]
    os.environ |= {EVENTS_VARIABLE: str(events), LIFELINE_VARIABLE: "stdin"}
