"""What a party's process did, noted beside it; and the place in it at which a strike falls.

The witness stands where frames are made for the wire and where files reach the disk. It knows
nothing of releases, charges or checkpoints, and what it has noted outlives a SIGKILL.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helpers.launched import processes_of

from securevfl.transport.channels import SealedChannel
from securevfl.transport.connection import Connection, Outgoing
from securevfl.transport.framing import EncodedMessage
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import Transport

LAUNCHER: Final = "launcher"
_MARK: Final = "struck-{}.json"
_OVER: Final = "over-{}"


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Who is hit, how, and when."""

    victims: tuple[str, ...]
    """Parties, and perhaps the launcher."""
    way: str
    """``SIGKILL``, ``SIGTERM``, or ``SIGSTOP`` with SIGKILL after :attr:`stopped_s`."""
    place: str
    """Which part of the run it is in, as the undisturbed run has it."""
    point: tuple[str, str, int] | None = None
    """A party, what it is about to do, and the how-manieth time; None: after :attr:`after_s`."""
    after_s: float = 0.0
    """Seconds since the launch."""
    stopped_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Where notes lie, and what is to happen in the processes of a run."""

    notes: Path
    out: Path
    """The run folder."""
    strikes: tuple[Strike, ...] = ()
    """Each falls once, and none before the one before it."""
    launcher: int = 0
    """The launcher's process."""
    files: bool = True
    """Whether what is written to the disk is noted too."""
    _counts: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """Watch this process, which is a party's; call it before it does anything."""
        name = sys.argv[sys.argv.index("--name") + 1]
        handle = os.open(
            self.notes / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )

        def note(what: str, **more: Any) -> None:
            self._counts[what] += 1
            point = (name, what, self._counts[what])
            self._strike_at(point)
            line = {"what": what, "count": point[2], **more}
            os.write(handle, f"{json.dumps(line)}\n".encode())

        watch_frames(note)
        if self.files:
            watch_files(note, self.out, self.out.parent)

    def _strike_at(self, point: tuple[str, str, int]) -> None:
        for number, strike in enumerate(self.strikes):
            if not self.has_fallen(number):
                if strike.point == point:
                    self.fall(number)
                return

    def has_fallen(self, number: int) -> bool:
        """Whether a strike is over, or under way."""
        return (self.notes / _MARK.format(number)).exists()

    def fall(self, number: int) -> None:
        """Let a strike fall, if it has not; the process that calls is hit last."""
        strike = self.strikes[number]
        mark = self.notes / _MARK.format(number)
        try:
            handle = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        known = {**processes_of(self.out), LAUNCHER: self.launcher}
        hit = {name: known[name] for name in strike.victims if name in known}
        os.write(handle, json.dumps(hit).encode())
        os.close(handle)
        for pid in sorted(hit.values(), key=lambda pid: pid == os.getpid()):
            _signal(pid, signal.Signals[strike.way])

    def finish(self, number: int) -> None:
        """Kill those that a strike has stopped."""
        mark, over = self.notes / _MARK.format(number), self.notes / _OVER.format(number)
        content = mark.read_text()
        if content and not over.exists():
            over.touch()
            for pid in json.loads(content).values():
                _signal(pid, signal.SIGKILL)


def notes_of(folder: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return what was noted, by party and in order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        found[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def watch_queue(note: Callable[..., None]) -> None:
    """Call ``note`` before each message is sealed or queued, in the thread that sends it.

    The thread that owns the sockets goes on meanwhile, and so do heartbeats.
    """
    queue, seal = Transport._queue, SealedChannel.seal

    def noted(self: Transport, items: Sequence[tuple[Connection, Outgoing]]) -> None:
        for _, item in items:
            message = item.encoded
            note(message.kind.name, round=message.round_number, session=self.session.hex())
        queue(self, items)

    def noted_inside(self: SealedChannel, message: Message) -> Message:
        note(message.kind.name, round=message.round_number, session=self._session.hex())
        return seal(self, message)

    setattr(Transport, "_queue", noted)  # noqa: B010 - mypy would not have it otherwise
    setattr(SealedChannel, "seal", noted_inside)  # noqa: B010


def watch_frames(note: Callable[..., None]) -> None:
    """Call ``note`` in this process before each message but heartbeats is made for the wire."""
    frame = EncodedMessage.frame

    def noted(self: EncodedMessage, *, session: bytes, sender_rank: int, sequence: int) -> Any:
        if self.kind is not StarKind.PING:
            note(self.kind.name, round=self.round_number, session=session.hex())
        return frame(self, session=session, sender_rank=sender_rank, sequence=sequence)

    setattr(EncodedMessage, "frame", noted)  # noqa: B010 - mypy would not have it otherwise


def watch_files(note: Callable[..., None], run: Path, tables: Path) -> None:
    """Call ``note`` in this process before a file of a run, or a table's ledger, is written."""
    sync, replace = os.fsync, Path.replace

    def named(path: Path) -> str | None:
        if path.is_relative_to(run):
            return str(path.relative_to(run))
        return path.name if path.parent == tables else None

    def noted_sync(handle: int) -> None:
        path = named(Path(f"/proc/self/fd/{handle}").readlink())
        # A temporary file's name is drawn; where it goes is noted when it gets there.
        if path is not None and not Path(path).name.startswith("."):
            note(f"sync {path}")
        sync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        path = named(Path(target))
        if path is not None:
            note(f"write {path}")
        return replace(self, target)

    setattr(os, "fsync", noted_sync)  # noqa: B010
    setattr(Path, "replace", noted_replace)  # noqa: B010
