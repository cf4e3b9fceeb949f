"""Parties' processes on this machine: run to their end, or kept running, on a reserved port."""

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.launch import fork_server
from securevfl.launch.fork_server import ForkServer
from securevfl.launch.process import PartyCommand, PartyExit, PartyFailure, PartyProcess


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a TCP port of ``host`` that no other program gets in the block.

    On Linux, a bound socket that does not listen keeps the system from giving the port to a program
    that asks for any port; a server that asks for this port gets it, since both sockets allow reuse
    of addresses. Elsewhere the port is only free at first, and the primary reports it if another
    process was faster.

    Raises:
        OSError: If ``host`` is no address of this machine.
    """
    with socket.socket() as holder:
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


OnEvent = Callable[[str, Mapping[str, Any]], None]
Again = Callable[[PartyCommand, PartyFailure | None], PartyCommand | None]
"""Returns how a party that was killed is started again, or, without a failure, one that ended well
and may be needed once more; None: it is not."""

# Seconds for the other parties to notice a failure and end.
GRACE_S: Final = 5.0
# Seconds for them to end after SIGTERM.
_TERMINATE_S: Final = 2.0
# Process ends are noticed within this time, reports at once.
_POLL_S: Final = 0.05
_LOST: Final = 3


def run_party_processes(
    commands: Sequence[PartyCommand],
    *,
    deadline_s: float,
    on_event: OnEvent | None = None,
    again: Again | None = None,
    grace_s: float = GRACE_S,
) -> dict[str, PartyExit]:
    """Run all parties together until they end.

    No process outlives this call. After a failure, processes have ``grace_s`` seconds to end; then
    they get SIGTERM, then SIGKILL. If the launcher itself is killed, they notice by their lifeline
    (:func:`securevfl.launch.child.end_with_launcher`).

    Args:
        commands: One command for each party.
        deadline_s: Seconds for the whole run.
        on_event: Called with each report of a party, as ``on_event(name, event)``, in this thread.
        again: Called for each party that a signal has ended, then for each that has ended well,
            until all have ended well.
        grace_s: Seconds between a failure and the end of the others.

    Returns:
        How each party ended, by name; with exit code 0.

    Raises:
        SecureVflError: Of the class for the exit code of the party where the failure began (2
            ConfigError, 3 PartyFailedError, 4 PrivacyError), naming the party and the reason.

    Reveals:
        To the user of this machine: every party's reports.
    """
    checks.positive(deadline_s=deadline_s, grace_s=grace_s)
    names = [command.name for command in commands]
    if len(set(names)) != len(names):
        raise ConfigError(f"commands: two parties of one name in {names}")
    launch = Launch(on_event)
    try:
        for command in commands:
            launch.start(command)
        failure = launch.watch(
            deadline=time.monotonic() + deadline_s,
            deadline_s=deadline_s,
            again=again,
        )
        if failure is not None:
            failure = launch.wind_up(failure, grace_s=grace_s)
    finally:
        launch.end_all()
    if failure is not None:
        raise failure.error()
    return {party.name: party.exit for party in launch.parties if party.exit is not None}


class Launch:
    """Processes of one run, with their fork servers."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self.parties: list[PartyProcess] = []
        self._on_event = on_event
        self._selector = selectors.DefaultSelector()
        self._fork_servers: dict[tuple[object, ...], ForkServer] = {}

    def start(self, command: PartyCommand) -> PartyProcess:
        """Start a party, and read its reports from now on."""
        party = PartyProcess(command, self._fork_server_for(command))
        self.parties.append(party)
        self._selector.register(party.events_fd, selectors.EVENT_READ, party)
        return party

    def forget(self, party: PartyProcess) -> None:
        """Remove a process that has ended."""
        self.parties.remove(party)
        party.close()

    def watch(
        self,
        *,
        deadline: float,
        deadline_s: float,
        again: Again | None,
    ) -> PartyFailure | None:
        """Wait until the required parties have ended well, one has failed, or time is over."""
        while late := [party.name for party in self.parties if party.exit is None]:
            self.turn()
            if again is not None:
                self._start_again(again)
            failure = self._first_failure()
            if failure is not None:
                return failure
            if time.monotonic() > deadline:
                reason = f"did not end within {deadline_s:g} s"
                return PartyFailure(party=", ".join(late), reason=reason, exit_code=_LOST)
        return self._first_failure()

    def wind_up(self, failure: PartyFailure, *, grace_s: float) -> PartyFailure:
        """Give the others time to end, and return the failure where it really began.

        The party that ends first is often not the first that failed, but was notified of the
        failure. It began at a party that names itself, or that a signal ended.
        """
        deadline = time.monotonic() + grace_s
        while any(party.exit is None for party in self.parties) and time.monotonic() < deadline:
            self.turn()
        failures = [(party, party.own_failure()) for party in self.parties]
        for party, own in failures:
            if own is not None and own.party == party.name and own.party == failure.party:
                return own
        for party, own in failures:
            if own is not None and own.party == party.name:
                return own
        return failure

    def end_all(self) -> None:
        """End all running processes, by SIGTERM and then SIGKILL; reap and close everything."""
        running = [party for party in self.parties if party.poll() is None]
        for party in running:
            party.interrupt()
        deadline = time.monotonic() + _TERMINATE_S
        while any(party.poll() is None for party in running) and time.monotonic() < deadline:
            self.turn(silent=True)  # a full pipe must not keep a party from ending
        for party in self.parties:
            party.kill()
            party.close()
        for server in self._fork_servers.values():
            server.close()
        self._selector.close()

    def turn(self, *, silent: bool = False) -> None:
        """Wait a moment for reports and ended processes, and handle them."""
        for key, _ in self._selector.select(_POLL_S):
            self._hand_on(key.data, silent=silent)
        for party in self.parties:
            if party.exit is None and party.poll() is not None and not party.reports_ended:
                self._hand_on(party, silent=silent)  # reports from just before its end
        listened = {key.fd: key.data for key in self._selector.get_map().values()}
        for number, party in listened.items():
            if party.reports_ended or party.exit is not None:
                self._selector.unregister(number)

    def _fork_server_for(self, command: PartyCommand) -> ForkServer | None:
        if command.fork_server is None or not fork_server.is_offered():
            return None
        # Libraries read the environment when they are loaded.
        kind = (command.fork_server, *sorted(command.environment.items()))
        if kind in self._fork_servers and self._fork_servers[kind].is_lost:
            self._fork_servers.pop(kind).close()
        if kind not in self._fork_servers:
            try:
                self._fork_servers[kind] = ForkServer(command.fork_server, command.environment)
            except OSError:
                return None  # starting the program will fail too, and say why
        return self._fork_servers[kind]

    def _hand_on(self, party: PartyProcess, *, silent: bool) -> None:
        for event in party.read_events():
            if self._on_event is not None and not silent:
                self._on_event(party.name, event)

    def _start_again(self, again: Again) -> None:
        well = [party for party in self.parties if party.ended_well]
        for party in [*(party for party in self.parties if party.was_lost), *well]:
            command = again(party.command, party.own_failure())
            if command is not None:
                self.forget(party)
                self.start(command)

    def _first_failure(self) -> PartyFailure | None:
        failures = (party.own_failure() for party in self.parties)
        return next((failure for failure in failures if failure is not None), None)


# A process that ends at once is not started again at once.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
# A process that has run for so long is restarted after the shortest pause.
_STEADY_S: Final = 60.0

OnEnd = Callable[[str, str], None]


@contextmanager
def keeping(
    commands: Sequence[PartyCommand], *, on_event: OnEvent, on_end: OnEnd
) -> Iterator[Launch]:
    """Keep parties running in the block; no process outlives it.

    Args:
        commands: One command for each party.
        on_event: Called with each report of a party, as ``on_event(name, event)``, in another
            thread.
        on_end: Called with the name of each process that has ended, and the reason. It is started
            again after half a second, and after twice the last pause each further time, up to half
            a minute.

    Yields:
        The running processes.

    Raises:
        ConfigError: If a process cannot be started.

    Reveals:
        To the user of this machine: every party's reports.
    """
    launch, ending = Launch(on_event), threading.Event()
    keeper = threading.Thread(
        target=_keep, args=(launch, commands, ending, on_end), name="securevfl-keeper", daemon=True
    )
    try:
        for command in commands:
            launch.start(command)
        keeper.start()
        yield launch
    finally:
        ending.set()
        if keeper.ident is not None:
            keeper.join()
        launch.end_all()


def _keep(
    launch: Launch, commands: Sequence[PartyCommand], ending: threading.Event, on_end: OnEnd
) -> None:
    """Start processes again until ``ending`` is set."""
    by_name = {command.name: command for command in commands}
    pauses: dict[str, float] = {}
    due: dict[str, float] = {}
    while not ending.is_set():
        launch.turn()
        for party in list(launch.parties):
            ended = party.exit
            if ended is None:
                continue
            failure = party.own_failure()
            on_end(party.name, "ended" if failure is None else failure.reason)
            launch.forget(party)
            before = _FIRST_PAUSE_S if ended.seconds > _STEADY_S else pauses.get(party.name, 0)
            pauses[party.name] = min(max(2 * before, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            due[party.name] = time.monotonic() + pauses[party.name]
        for name in [name for name, at in due.items() if time.monotonic() >= at]:
            del due[name]
            launch.start(by_name[name])
