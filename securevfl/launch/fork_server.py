"""Fork server: one process that loads the parties' modules and forks each party.

Loading torch and its dependents takes two CPU-seconds and 250 MiB. A party that is forked from a
process which has loaded them starts in milliseconds and shares that memory. The fork server holds
nothing private: it reads no file of a federation, and receives an identity only to pass it to one
child.

Children are the fork server's, so it reports each child's end to the launcher. A stopped fork
server is woken when a report is late; a silent one is killed with its parties. Signals are sent by
a handle of the process (``pidfd``), which cannot hit another process with a reused number. Linux
only.

It has one thread and no lock, so that forking is safe.
"""

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from securevfl.launch.child import EVENTS_VARIABLE, LIFELINE_VARIABLE

MESSAGE_BYTES: Final = 1 << 16
"""No message between launcher and fork server is longer."""

SILENT_S: Final = 30.0
"""Seconds within which a fork server reports that a child has ended."""

LOADING_S: Final = 300.0
"""Seconds for the fork server to load the modules and fork a child."""

_WOKEN_AFTER: Final = 0.1
"""Part of such a time after which a silent fork server is woken, in case it was stopped."""


def is_offered() -> bool:
    """Return whether this system supports a fork server."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildFiles:
    """File descriptors for a child."""

    lifeline: int
    """The child's standard input, which ends with the launcher."""

    log: int
    """The child's standard output and error."""

    events: int
    """Pipe for the child's reports."""

    handed: Mapping[str, int]
    """Others, by the argument in whose place their path stands."""

    @property
    def handles(self) -> list[int]:
        """All descriptors, in the order of the fields."""
        return [self.lifeline, self.log, self.events, *self.handed.values()]


class Forked:
    """The launcher's handle of a child of the fork server."""

    def __init__(self, fork_server: "ForkServer", pid: int, handle: int) -> None:
        self.pid = pid
        self.code: int | None = None
        """Exit code, minus a signal's number where one ended it; None until it is reported."""
        self.unreported_since: float | None = None
        """Time since which the report of its end is due."""
        self._fork_server = fork_server
        self._handle = handle

    def poll(self) -> int | None:
        """Return :attr:`code` as soon as it is reported; None while the process runs."""
        while self.code is None:
            try:
                self._fork_server.receive(timeout_s=0)
            except BlockingIOError:
                self._fork_server.require_report(self)
                break
            except ConnectionError:
                pass  # all have ended
        return self.code

    def wait(self) -> int:
        """Wait until it has ended, and return :attr:`code`."""
        while self.code is None:
            with contextlib.suppress(ConnectionError):  # all have ended
                self._fork_server.receive_within(SILENT_S)
        return self.code

    @property
    def why_lost(self) -> str | None:
        """Why it was killed with its silent fork server; else None."""
        return self._fork_server.why_lost

    @property
    def has_ended(self) -> bool:
        """Whether it has ended according to the system, reported or not."""
        asked = select.poll()
        asked.register(self._handle, select.POLLIN)
        return bool(asked.poll(0))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Close the handle."""
        os.close(self._handle)


class ForkServer:
    """The launcher's side of a fork server: starts its process and requests children.

    Args:
        module: A program that loads the children's modules and calls :func:`fork_children`.
        environment: Environment variables in addition to the launcher's.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.is_lost = False
        """Whether it has ended by itself or was killed, so that it forks no more."""
        self.why_lost: str | None = None
        """Reason for the loss of a fork server that was silent for too long; None otherwise."""
        self._running: dict[int, Forked] = {}
        self._wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # What fails while it loads fails again in the program itself, whose log has it.
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    def fork(self, arguments: Sequence[str], files: "ChildFiles", *, name: str) -> Forked:
        """Start a child.

        Args:
            arguments: Arguments of the child's program.
            files: File descriptors for the child.
            name: The child's name in the system's list of processes, cut to 15 characters.

        Raises:
            ConnectionError: If the fork server has ended, or is silent for :data:`LOADING_S`.
            OSError: If it cannot fork.
        """
        asked = {"name": name, "arguments": list(arguments), "handed": list(files.handed)}
        socket.send_fds(self._wire, [json.dumps(asked).encode()], files.handles)
        while True:
            message, given = self.receive_within(LOADING_S)
            if "refused" in message:
                raise OSError(message["refused"], os.strerror(message["refused"]))
            if "started" in message:
                child = Forked(self, message["started"], given[0])
                self._running[child.pid] = child
                return child

    def close(self) -> None:
        """Kill the fork server; running children end with their launcher instead."""
        self._wire.close()
        self._process.kill()
        self._process.wait()

    def receive_within(self, seconds: float) -> tuple[dict[str, Any], list[int]]:
        """Wait for a message, and wake a stopped fork server meanwhile.

        Raises:
            ConnectionError: If the fork server has ended, or was silent and is killed.
        """
        for part in (_WOKEN_AFTER, 1 - _WOKEN_AFTER):
            try:
                return self.receive(timeout_s=part * seconds)
            except TimeoutError:
                self._process.send_signal(signal.SIGCONT)
        self._give_up(seconds)
        raise ConnectionResetError("the process that starts parties is silent")

    def require_report(self, child: Forked) -> None:
        """Wake a fork server that is late to report a child's end; kill one that never does."""
        if not child.has_ended:
            return
        now = time.monotonic()
        if child.unreported_since is None:
            child.unreported_since = now
        late_s = now - child.unreported_since
        if late_s > SILENT_S:
            self._give_up(SILENT_S)
        elif late_s > _WOKEN_AFTER * SILENT_S:
            self._process.send_signal(signal.SIGCONT)

    def _give_up(self, seconds: float) -> None:
        self.why_lost = (
            f"was ended with the process that starts parties, which gave no sign of life for "
            f"{seconds:g} s"
        )
        self._process.kill()
        self._end_all()

    def receive(self, *, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Receive a message with its descriptors; a child's end is noted at the child.

        Raises:
            ConnectionError: If the fork server has ended.
            BlockingIOError: If nothing has arrived and ``timeout_s`` is 0.
            TimeoutError: If nothing arrives in time.
        """
        self._wire.settimeout(timeout_s)
        try:
            content, given, _, _ = socket.recv_fds(self._wire, MESSAGE_BYTES, 1)
        except ConnectionError:
            content, given = b"", []
        finally:
            self._wire.settimeout(None)
        if not content:
            self._end_all()
            raise ConnectionResetError("the process that starts parties has ended")
        message = json.loads(content)
        if "ended" in message:
            self._running.pop(message["ended"]).code = message["code"]
        return message, given

    def _end_all(self) -> None:
        # Without the fork server, the end of its children is not reported.
        self.is_lost = True
        for child in self._running.values():
            child.send_signal(signal.SIGKILL)
            child.code = -signal.SIGKILL
        self._running.clear()


# Standard input, log, reports and handed files: a federation file and an identity.
_MOST_HANDLES: Final = 16


def fork_children(run: Callable[[], None]) -> None:
    """Fork the children that the launcher requests, until the launcher ends.

    Args:
        run: A child's program; it reads ``sys.argv`` and may raise :class:`SystemExit`.
    """
    with socket.socket(fileno=int(sys.argv[1])) as wire:
        asked = _children_wanted(wire)
    if asked is not None:
        _become(asked)
        code = _code_of(run)
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's shutdown would write to all shared memory, in every child at once.
        os._exit(code)


def _children_wanted(wire: socket.socket) -> dict[str, Any] | None:
    """Fork children until the launcher ends, then return None; in a child, return its request."""
    children: dict[int, int] = {}
    with selectors.PollSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in selector.select()]
            for handle in set(ready) & set(children):
                selector.unregister(handle)
                os.close(handle)
                _report_end(wire, children.pop(handle))
            if wire.fileno() not in ready:
                continue
            content, handles, _, _ = socket.recv_fds(wire, MESSAGE_BYTES, _MOST_HANDLES)
            if not content:
                return None
            try:
                pid = os.fork()
            except OSError as error:
                _send(wire, {"refused": error.errno or errno.EAGAIN})
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
                _send(wire, {"started": pid}, handle)


def _send(wire: socket.socket, message: Mapping[str, int], *handles: int) -> None:
    # The next read notices that the launcher has ended.
    with contextlib.suppress(ConnectionError):
        socket.send_fds(wire, [json.dumps(message).encode()], handles)


def _report_end(wire: socket.socket, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    _send(wire, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _code_of(run: Callable[[], None]) -> int:
    """Run a program as the interpreter does, and return its exit code."""
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
    """Set this process's files, arguments, name and group as requested."""
    # Ctrl-C is handled by the launcher.
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(asked["name"], encoding="utf-8")
    lifeline, log, events, *others = asked["handles"]
    for number, handle in enumerate((lifeline, log, log)):
        os.dup2(handle, number)
    os.close(lifeline)
    os.close(log)
    paths = {name: f"/dev/fd/{other}" for name, other in zip(asked["handed"], others, strict=True)}
    sys.argv = ["securevfl", *(paths.get(argument, argument) for argument in asked["arguments"])]
    os.environ |= {EVENTS_VARIABLE: str(events), LIFELINE_VARIABLE: "stdin"}
