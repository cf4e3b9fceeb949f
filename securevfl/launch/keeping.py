"""Keep one process per party running on this machine: one that ends is started again."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import Launch, OnEvent

# A process that ends at once is not started again at once.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
# Whoever has run so long ended for a reason of its own time.
_STEADY_S: Final = 60.0

OnEnd = Callable[[str, str], None]


class KeptProcesses:
    """The processes, as long as they are kept."""

    def __init__(
        self, commands: Sequence[PartyCommand], *, on_event: OnEvent, on_end: OnEnd
    ) -> None:
        self._commands = {command.name: command for command in commands}
        self._on_end = on_end
        self.launch = Launch(on_event)
        """Those that run now."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="securevfl-keeper", daemon=True)

    def start(self) -> None:
        """Start all of them.

        Raises:
            ConfigError: If one cannot be started.
        """
        for command in self._commands.values():
            self.launch.start(command)
        self._thread.start()

    def end(self) -> None:
        """End all of them: first by asking, then by force."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.launch.end_all()

    def _keep(self) -> None:
        pauses: dict[str, float] = {}
        due: dict[str, float] = {}
        while not self._ending.is_set():
            self.launch.turn()
            for party in list(self.launch.parties):
                ended = party.exit
                if ended is None:
                    continue
                failure = party.own_failure()
                self._on_end(party.name, "ended" if failure is None else failure.reason)
                self.launch.forget(party)
                before = _FIRST_PAUSE_S if ended.seconds > _STEADY_S else pauses.get(party.name, 0)
                pauses[party.name] = min(max(2 * before, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                due[party.name] = time.monotonic() + pauses[party.name]
            for name in [name for name, at in due.items() if time.monotonic() >= at]:
                del due[name]
                self.launch.start(self._commands[name])


@contextmanager
def keeping(
    commands: Sequence[PartyCommand], *, on_event: OnEvent, on_end: OnEnd
) -> Iterator[KeptProcesses]:
    """Keep parties running while the block is at work; none outlives it.

    Args:
        commands: One a party.
        on_event: Gets each report of a party, as ``on_event(name, event)``, in another thread.
        on_end: Gets the name of each process that has ended, and why; it is started again after a
            pause of half a second, twice as long each time up to half a minute.

    Raises:
        ConfigError: If one cannot be started.

    Reveals:
        To the user of this machine: every party's reports.
    """
    kept = KeptProcesses(commands, on_event=on_event, on_end=on_end)
    try:
        kept.start()
        yield kept
    finally:
        kept.end()
