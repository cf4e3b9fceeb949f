"""One party's process: started with its log, its pipe of reports and its lifeline."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError
from securevfl.launch.child import EVENTS_VARIABLE, FAILURE_EVENT, LIFELINE_VARIABLE
from securevfl.launch.outcome import PartyExit, PartyFailure

# One report is a line of figures; a longer one is no report. A run's figures grow with its parties.
_MAX_LINE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
# Enough of a log's end to hold the last line of a traceback.
_TAIL_BYTES: Final = 4096
# ru_maxrss counts KiB on Linux.
_RSS_UNIT: Final = 1024
_LOST: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyCommand:
    """How to start one party."""

    name: str
    """The party."""

    arguments: Sequence[str]
    """The program and its arguments; never a shell line."""

    log_path: Path
    """File that gets whatever the process prints."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the launcher's own."""


class PartyProcess:
    """A started party. Its reports are read from :attr:`events_fd` as they come."""

    def __init__(self, command: PartyCommand) -> None:
        self.name = command.name
        self.exit: PartyExit | None = None
        self.told_failure: PartyFailure | None = None
        """What the process itself reported before it ended."""
        self.reports_ended = False
        """Whether the process can report nothing more."""
        self._log_path = command.log_path
        self._started = time.monotonic()
        self._pending = b""
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.events_fd, events_write = os.pipe()
        os.set_blocking(self.events_fd, False)
        environment = {
            **os.environ,
            **command.environment,
            EVENTS_VARIABLE: str(events_write),
            LIFELINE_VARIABLE: "stdin",
        }
        try:
            with command.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    list(command.arguments),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(events_write,),
                    # Ctrl-C is the launcher's to handle: it ends the parties in order.
                    process_group=0,
                )
        except OSError as error:
            os.close(self.events_fd)
            raise ConfigError(
                f"{command.name}: cannot be started ({error.strerror}): {command.arguments[0]}"
            ) from None
        finally:
            os.close(events_write)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def read_events(self) -> list[dict[str, Any]]:
        """Return the reports that have come in; failures are kept in :attr:`told_failure`."""
        lines = self._read_lines()
        events = [event for line in lines if isinstance(event := _parse(line), dict)]
        for event in events:
            if event.get("event") == FAILURE_EVENT:
                party = str(event.get("party", self.name))
                reason = str(event.get("reason", "gave no reason"))
                self.told_failure = PartyFailure(
                    party=party,
                    reason=reason.removeprefix(f"{party}: "),
                    exit_code=int(event.get("exit_code", _LOST)),
                )
        return events

    def poll(self) -> PartyExit | None:
        """Return how the process ended, or None while it runs."""
        if self.exit is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self._note_exit(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
        return self.exit

    def interrupt(self) -> None:
        """Ask the process to end; it may say farewell first.

        The lifeline stays: cutting it now would interrupt the process a second time.
        """
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process hears nothing before it goes on

    def kill(self) -> None:
        """End the process now, stopped or not, and reap it."""
        self._signal(signal.SIGKILL)
        if self.exit is None:
            _, status, usage = os.wait4(self.pid, 0)
            self._note_exit(os.waitstatus_to_exitcode(status), usage.ru_maxrss)

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self.events_fd)

    def own_failure(self) -> PartyFailure | None:
        """Return the failure that this process's end stands for, or None if it ended well."""
        if self.exit is None or self.exit.exit_code == 0:
            return None
        if self.told_failure is not None:
            return self.told_failure
        code = self.exit.exit_code
        if code < 0:
            reason = f"was ended by {_signal_name(-code)}; its log is {self._log_path}"
            return PartyFailure(party=self.name, reason=reason, exit_code=_LOST)
        reason = f"exited with {code}: {self._last_words()}; its log is {self._log_path}"
        return PartyFailure(party=self.name, reason=reason, exit_code=code)

    def _note_exit(self, code: int, peak_kib: int) -> None:
        self._process.returncode = code  # so that Popen does not wait for it again
        self.exit = PartyExit(
            name=self.name,
            exit_code=code,
            seconds=time.monotonic() - self._started,
            peak_memory_bytes=peak_kib * _RSS_UNIT,
        )

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _read_lines(self) -> list[bytes]:
        lines: list[bytes] = []
        while True:
            try:
                fresh = os.read(self.events_fd, _READ_BYTES)
            except BlockingIOError:
                return lines
            if not fresh:
                self.reports_ended = True
                return lines
            *whole, self._pending = (self._pending + fresh).split(b"\n")
            self._pending = self._pending[:_MAX_LINE_BYTES]
            lines.extend(whole)

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        spoken = [line.strip() for line in lines if line.strip()]
        return spoken[-1] if spoken else "it printed nothing"


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None  # a line cut short by the end of its process


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
