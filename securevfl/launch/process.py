"""One party's process: started with its log, its pipe of reports and its lifeline."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from securevfl.core import errors
from securevfl.core.files import open_to_append
from securevfl.launch.child import EVENTS_VARIABLE, FAILURE_EVENT, LIFELINE_VARIABLE, MEMORY_EVENT
from securevfl.launch.fork_server import ChildFiles, Forked, ForkServer

_ERRORS: Final[dict[int, type[errors.SecureVflError]]] = {
    error.exit_code: error
    for error in (errors.ConfigError, errors.PartyFailedError, errors.PrivacyError)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyExit:
    """The end of a party's process."""

    name: str
    """Name of the party."""

    exit_code: int
    """0 to 255 as the process chose; minus the signal's number when a signal ended it."""

    seconds: float
    """Seconds from its start to its end."""

    peak_memory_bytes: int
    """Peak resident memory as the process reported it; 0 if it reported none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyFailure:
    """The failure that ended a launch."""

    party: str
    """The party where it began."""

    reason: str
    """One sentence."""

    exit_code: int
    """Exit code for a command that reports the failure."""

    def error(self) -> errors.SecureVflError:
        """Return an exception of the class for :attr:`exit_code`."""
        return _ERRORS.get(self.exit_code, errors.SecureVflError)(f"{self.party}: {self.reason}")


# Longest report: a line of figures, whose length grows with the number of parties.
_MAX_LINE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
# Enough of a log's end to hold the last line of a traceback.
_TAIL_BYTES: Final = 4096
_LOST: Final = 3
# Exit code of a party's command after SIGTERM or SIGINT.
_INTERRUPTED: Final = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyCommand:
    """The command that starts a party."""

    name: str
    """Name of the party."""

    arguments: Sequence[str]
    """Arguments after the program, or starting with it; never a shell line."""

    program: Sequence[str] = ()
    """Program to start, where no fork server forks it."""

    fork_server: str | None = None
    """Module of a fork server that forks the party with these arguments, where the system supports
    it (:mod:`securevfl.launch.fork_server`)."""

    log_path: Path
    """File for the process's output."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the launcher's."""

    handed: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of nameless files that only the process may read, by the argument that their path
    replaces. They have no name in the file system, so that secrets vanish with the processes."""


class PartyProcess:
    """A started party's process; its reports arrive at :attr:`events_fd`.

    Args:
        command: The command that starts it.
        fork_server: Fork server that forks it; None starts a program.
    """

    def __init__(self, command: PartyCommand, fork_server: ForkServer | None = None) -> None:
        self.name = command.name
        self.command = command
        self._exit_code: int | None = None
        self._seconds = 0.0
        self.reported_failure: PartyFailure | None = None
        """Failure that the process has reported itself."""
        self.reports_ended = False
        """Whether the process can report nothing more."""
        if not hasattr(os, "fork"):
            raise errors.ConfigError(
                "processes of parties need Linux or macOS; this system simulates: "
                "securevfl simulate, or securevfl.simulate in Python"
            )
        self._log_path = command.log_path
        self._peak_memory_bytes = 0
        self._started = time.monotonic()
        self._pending = b""
        try:
            log = open_to_append(command.log_path)
        except OSError as error:
            raise errors.StorageError.of(command.log_path, error) from None
        self.events_fd, events_write = os.pipe()
        os.set_blocking(self.events_fd, False)
        follows, self._lifeline = os.pipe()
        try:
            with contextlib.ExitStack() as given:
                for handle in (log, follows, events_write):
                    given.callback(os.close, handle)
                files = ChildFiles(
                    lifeline=follows,
                    log=log,
                    events=events_write,
                    handed={
                        name: given.enter_context(_nameless(content)).fileno()
                        for name, content in command.handed.items()
                    },
                )
                self._process = _start_program(command, files, fork_server)
        except OSError as error:
            os.close(self.events_fd)
            os.close(self._lifeline)
            program = (*command.program, *command.arguments)[0]
            raise errors.ConfigError(
                f"{command.name}: cannot be started ({error.strerror}): {program}"
            ) from None

    @property
    def exit(self) -> PartyExit | None:
        """How the process ended; None while it runs."""
        if self._exit_code is None:
            return None
        return PartyExit(
            name=self.name,
            exit_code=self._exit_code,
            seconds=self._seconds,
            peak_memory_bytes=self._peak_memory_bytes,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def read_events(self) -> list[dict[str, Any]]:
        """Return new reports; failures are also stored in :attr:`reported_failure`.

        The reported memory becomes part of :attr:`exit`.
        """
        lines = self._read_lines()
        events = [event for line in lines if isinstance(event := _parse(line), dict)]
        for event in events:
            if event.get("event") == FAILURE_EVENT:
                party = str(event.get("party", self.name))
                reason = str(event.get("reason", "gave no reason"))
                self.reported_failure = PartyFailure(
                    party=party,
                    reason=reason.removeprefix(f"{party}: "),
                    exit_code=int(event.get("exit_code", _LOST)),
                )
            elif event.get("event") == MEMORY_EVENT:
                self._peak_memory_bytes = int(event["peak_memory_bytes"])
        return [event for event in events if event.get("event") != MEMORY_EVENT]

    def poll(self) -> PartyExit | None:
        """Return how the process ended, or None while it runs."""
        if self._exit_code is None and (code := self._process.poll()) is not None:
            self._note_exit(code)
        return self.exit

    def interrupt(self) -> None:
        """Send SIGTERM to the process, which may say farewell first.

        The lifeline stays open: closing it now would interrupt the process a second time.
        """
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process gets no signal before it continues

    def kill(self) -> None:
        """End the process now, stopped or not, and reap it."""
        self._signal(signal.SIGKILL)
        if self._exit_code is None:
            self._note_exit(self._process.wait())

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        if isinstance(self._process, Forked):
            self._process.close()
        os.close(self._lifeline)
        os.close(self.events_fd)

    @property
    def was_lost(self) -> bool:
        """Whether a signal has ended the process, which reported no error."""
        return self.exit is not None and (self.exit.exit_code < 0 or self._was_interrupted)

    @property
    def _was_interrupted(self) -> bool:
        """Whether its operator interrupted it; the launcher only does so after the run."""
        asked = self.exit is not None and self.exit.exit_code == _INTERRUPTED
        return asked and self.reported_failure is None

    @property
    def ended_well(self) -> bool:
        """Whether the process has ended with exit code 0."""
        return self.exit is not None and self.exit.exit_code == 0

    def own_failure(self) -> PartyFailure | None:
        """Return the failure that ended this process; None if it runs or ended well."""
        if self.exit is None or self.exit.exit_code == 0:
            return None
        if self.reported_failure is not None:
            return self.reported_failure
        exit_code = _LOST
        if self._was_interrupted:
            how = "was interrupted by its operator"
        elif self.exit.exit_code < 0:
            lost = self._process.why_lost if isinstance(self._process, Forked) else None
            how = lost or f"was ended by {_signal_name(-self.exit.exit_code)}"
        else:
            exit_code = self.exit.exit_code
            how = f"exited with {exit_code}: {self._last_words()}"
        reason = f"{how}; its log is {self._log_path}"
        return PartyFailure(party=self.name, reason=reason, exit_code=exit_code)

    def _note_exit(self, code: int) -> None:
        self._exit_code, self._seconds = code, time.monotonic() - self._started

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            self._process.send_signal(number)

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


def _start_program(
    command: PartyCommand, files: ChildFiles, fork_server: ForkServer | None
) -> subprocess.Popen[bytes] | Forked:
    if fork_server is not None:
        # A fork server that failed to load its modules has ended: the program will say why.
        with contextlib.suppress(ConnectionError):
            return fork_server.fork(command.arguments, files, name=command.name)
    paths = {name: f"/dev/fd/{handle}" for name, handle in files.handed.items()}
    return subprocess.Popen(
        [*command.program, *(paths.get(argument, argument) for argument in command.arguments)],
        stdin=files.lifeline,
        stdout=files.log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            **command.environment,
            EVENTS_VARIABLE: str(files.events),
            LIFELINE_VARIABLE: "stdin",
        },
        pass_fds=(files.events, *files.handed.values()),
        # The launcher handles Ctrl-C, and ends the parties in order.
        process_group=0,
    )


def _parse(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None  # a line cut short by the end of its process


def _nameless(content: bytes) -> IO[bytes]:
    """Return an open file without a name: in memory if the system supports it, else unlinked."""
    file: IO[bytes]
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("securevfl"), "w+b")
        os.fchmod(file.fileno(), 0o600)
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(content)
    file.flush()
    file.seek(0)
    return file


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
