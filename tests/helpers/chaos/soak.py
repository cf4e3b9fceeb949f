"""One launched run that goes on while its parties are hit, and what is measured of it meanwhile."""

import ctypes
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from helpers.chaos.kinds import NAMES
from helpers.chaos.launches import Ended, end_all, ended, start
from helpers.chaos.witness import Watch
from helpers.launched import processes_of

from securevfl.core.progress import EpochDone, ProgressEvent, RoundDone, SessionLost, Warned

WAYS: Final = ("killed", "stopped", "paused", "cut")
"""Killed and started again; stopped until it is noticed; for too short a time to be noticed; its
connection shut down."""
PRIMARY: Final = NAMES[0]
_EVENTS: Final = (EpochDone, RoundDone, SessionLost, Warned)
_PAUSED_S: Final = (0.2, 2.0)
# Of one that is stopped and never noticed, and of a run that does not go on.
_PATIENCE_S: Final = 300.0
_PIDFD_GETFD: Final = 438
_MIB: Final = 1024.0


@dataclass(kw_only=True)
class Fault:
    """What was done to a party, and what came of it; times in seconds since the run began."""

    party: str
    way: str
    at: float
    noticed_s: float | None = None
    """Until the primary said that the session was lost."""
    going_on_s: float | None = None
    """Until a round was done again."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One process at one time."""

    at: float
    party: str
    pid: int
    pss: float
    """MiB of its share of all memory."""
    own: float
    """MiB that it has asked for: of what it shares with the process that it was forked from, all,
    so that pages which it writes to for the first time are no growth."""
    descriptors: int


@dataclass(kw_only=True)
class Soaked:
    """All that was measured of a run."""

    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    """When each epoch ended."""
    losses: list[tuple[float, str]] = field(default_factory=list)
    """When the primary lost a session, and why."""
    warnings: list[str] = field(default_factory=list)
    ended: Ended | None = None
    """None: it had to be ended."""


class _Notes:
    """Writes events of the launcher's process where another one reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, event: ProgressEvent) -> None:
        if isinstance(event, _EVENTS):
            line = {"at": time.monotonic(), "event": event.EVENT, **asdict(event)}
            with self._path.open("a", encoding="utf-8") as events:
                events.write(f"{json.dumps(line)}\n")


class Soak:
    """A run under way."""

    def __init__(
        self, path: Path, watch: Watch, *, every_s: float, sample_s: float, seed: int
    ) -> None:
        """Make it.

        Args:
            path: The federation file.
            watch: Where the run folder and notes lie.
            every_s: Seconds between two faults, on average and while the run goes on; 0: none.
            sample_s: Seconds between two samples.
            seed: Of the faults.
        """
        self._path, self._watch = path, watch
        self._every_s, self._sample_s = every_s, sample_s
        self._random = Random(seed)
        self.soaked = Soaked()
        self._began = 0.0
        self._goes_on = False
        self._open: Fault | None = None
        self._stopped: int | None = None
        """The process that stands still."""
        self._pause_s = 0.0

    def run(self, *, faults_s: float, most_s: float) -> Soaked:
        """Run it to its end.

        Args:
            faults_s: Seconds after which nobody is hit any more.
            most_s: Seconds after which it is ended.
        """
        notes = self._watch.notes
        notes.mkdir(parents=True)
        self._events = (notes / "events.txt").open("x+", encoding="utf-8")
        with self._events:
            observe = _Notes(notes / "events.txt")
            self._began = time.monotonic()
            pid = start(self._path, self._watch, resume=False, observe=observe)
            due, hit = self._sample_s, self._next()
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                now = self._now
                self._hear()
                if done:
                    self.soaked.ended = ended(pid, status, self._watch, seconds=now)
                    return self.soaked
                if now > most_s:
                    end_all(pid)
                    os.waitpid(pid, 0)
                    return self.soaked
                if now >= due:
                    self.soaked.samples += self._sampled()
                    due = self._now + self._sample_s
                if self._open is None and self._goes_on and hit <= now < faults_s:
                    self._hit()
                elif self._open is not None:
                    self._let_go_on(self._open)
                    if self._open.going_on_s is not None or now - self._open.at > _PATIENCE_S:
                        self._open, hit = None, self._now + self._next()
                time.sleep(0.01)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _next(self) -> float:
        return self._random.expovariate(1 / self._every_s) if self._every_s else float("inf")

    def _hear(self) -> None:
        """Read what the launcher has heard since the last time."""
        while line := self._events.readline():
            if not line.endswith("\n"):
                self._events.seek(self._events.tell() - len(line))
                return
            told = json.loads(line)
            at, fault = told["at"] - self._began, self._open
            match told["event"]:
                case EpochDone.EVENT:
                    self.soaked.epochs.append(at)
                case SessionLost.EVENT:
                    self._goes_on = False
                    self.soaked.losses.append((at, told["why"]))
                    if fault is not None and fault.noticed_s is None and at >= fault.at:
                        fault.noticed_s = at - fault.at
                case RoundDone.EVENT:
                    self._goes_on = True
                    if fault is not None and self._may_go_on(fault, at):
                        fault.going_on_s = at - fault.at
                case Warned.EVENT:
                    self.soaked.warnings.append(told["text"])
                case _:
                    pass

    def _may_go_on(self, fault: Fault, at: float) -> bool:
        """Return whether a round that was done then is one after the fault."""
        if fault.way == "paused":
            return self._stopped is None
        if fault.party == PRIMARY and fault.way == "killed":
            # It cannot notice itself; its next rounds come after it was started and all had joined.
            return at > fault.at + 1
        return fault.noticed_s is not None

    def _hit(self) -> None:
        found = processes_of(self._watch.out)
        if not found:
            return
        party, way = self._random.choice(sorted(found)), self._random.choice(WAYS)
        if (party, way) == (PRIMARY, "stopped"):
            way = "paused"
        fault = Fault(party=party, way=way, at=self._now)
        self._pause_s = self._random.uniform(*_PAUSED_S)
        try:
            if way == "cut":
                _cut(found[party])
            else:
                os.kill(found[party], signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        except OSError:  # it had ended
            return
        self._stopped = found[party] if way in ("stopped", "paused") else None
        self._open = fault
        self.soaked.faults.append(fault)

    def _let_go_on(self, fault: Fault) -> None:
        """Let a party that stands still go on when it is time."""
        if self._stopped is None:
            return
        noticed, since = fault.noticed_s is not None, self._now - fault.at
        if noticed or since > (self._pause_s if fault.way == "paused" else _PATIENCE_S):
            with suppress(OSError):
                os.kill(self._stopped, signal.SIGCONT)
            self._stopped = None

    def _sampled(self) -> Iterator[Sample]:
        at = self._now
        for party, pid in processes_of(self._watch.out).items():
            place = Path(f"/proc/{pid}")
            try:
                held = _fields(place / "smaps_rollup")
                descriptors = sum(1 for _ in (place / "fd").iterdir())
            except OSError:  # it has ended meanwhile
                continue
            yield Sample(
                at=at,
                party=party,
                pid=pid,
                pss=held["Pss"] / _MIB,
                own=held["Anonymous"] / _MIB,
                descriptors=descriptors,
            )


def _fields(path: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = int(value.split()[0])
    return found


def _cut(pid: int) -> None:
    """Shut down every connection of a process, as if the network had broken.

    Raises:
        OSError: If it has ended, or may not be looked into.
    """
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - of numbers
            handle = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, int(name), 0)
            if handle < 0:
                continue
            try:
                connection = socket.socket(fileno=handle)
            except OSError:  # no socket
                os.close(handle)
                continue
            with connection, suppress(OSError):
                if connection.family is socket.AF_INET:
                    connection.getpeername()  # a listening one has none
                    connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)
