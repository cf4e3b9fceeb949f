"""One party's process: the command line, watched, and what goes wrong within it.

Where a fault falls, the process tells the stage and waits for its word: what happens there happens
before the next message is queued, or before the next file is written. It is the party's own thread
that waits, as one that computes does; the thread of its sockets goes on.
"""

import ctypes
import json
import os
import resource
import socket
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from helpers.chaos.witness import watch_files, watch_queue

from securevfl.cli.main import main
from securevfl.desk.report import page
from securevfl.transport import framing
from securevfl.transport.framing import EncodedMessage
from securevfl.transport.message import StarKind

Point = tuple[str, int]
"""What a party is about to do, and the how-manieth time."""

_CLOCK: Final = "clock_ahead_s"
LOADED: Final = "loaded"
"""The last note of a process that was not killed: which modules it had loaded."""
_HEADER: Final = 52
"""Bytes of a frame's header; the last eight say how long the body is."""
_CAPABILITIES: Final = 0x20080522
"""Version 3 of Linux's capabilities (capset(2))."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What a party's process does."""

    arguments: Sequence[str]
    """Of ``securevfl``."""
    name: str
    notes: str
    """File that gets a line for each message and each written file."""
    run: str
    """Its run folder."""
    home: str
    """The folder of its table."""
    port: int
    """Where the federation file has the primary."""
    line: int
    """Where this party finds it: another port."""
    control: int
    """Descriptor by which it tells the stage, and hears."""
    at: Point | None = None
    """Where it stops and tells."""
    within: str = ""
    """What then happens within it, of :data:`WITHIN`."""
    before: str = ""
    """What happens within it before it does anything."""

    def live(self) -> int:
        """Run the command; return its exit code."""
        stage = socket.socket(fileno=self.control)
        # Where ledgers of tables lie whose own folder cannot be written.
        os.environ["XDG_STATE_HOME"] = f"{self.home}/state"
        _lose_root()
        _dial_elsewhere(self.port, self.line)
        counts: Counter[str] = Counter()
        handle = os.open(self.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        def note(what: str, **more: Any) -> None:
            counts[what] += 1
            point = (what, counts[what])
            if point == self.at:
                stage.sendall(b"!")
                stage.recv(1)
                if self.within:
                    WITHIN[self.within]()
            os.write(handle, f"{json.dumps({'what': what, 'count': point[1], **more})}\n".encode())

        _draw_nothing()
        watch_queue(note)
        _lie_in_frames()
        watch_files(note, Path(self.run), Path(self.home))
        if self.before:
            WITHIN[self.before]()
        sys.argv = ["securevfl", *self.arguments]
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # what reaches a user is a finding
            traceback.print_exc()
            code = 1
        os.write(handle, f"{json.dumps({'what': LOADED, 'names': sorted(sys.modules)})}\n".encode())
        return code


def _dial_elsewhere(port: int, line: int) -> None:
    """Let calls to one port of this machine go to another one, as a router would."""
    whole = socket.create_connection

    def create_connection(address: tuple[str, int], *more: Any, **others: Any) -> socket.socket:
        there = (address[0], line) if address[1] == port else address
        return whole(there, *more, **others)

    setattr(socket, "create_connection", create_connection)  # noqa: B010


def _draw_nothing() -> None:
    """Leave out pictures, which are half of what a small run takes, and written by nobody else."""
    setattr(page, "write_report", lambda folder, _config: folder)  # noqa: B010


def _lose_root() -> None:
    """Let a folder that nobody may write to be one for the superuser too."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("<Ii", _CAPABILITIES, 0)
    data = ctypes.create_string_buffer(struct.calcsize("<6I"))
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    sets = list(struct.unpack("<6I", data.raw[:24]))
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are what lets it
    if libc.capset(header, struct.pack("<6I", *sets)):
        raise OSError(ctypes.get_errno(), "capset")


_FRAME = EncodedMessage.frame
_Lie = Callable[..., bytes]
_lies: list[_Lie] = []


def _lie_in_frames() -> None:
    """Let the next frame but a heartbeat's be another one, once a lie is told."""
    watched = EncodedMessage.frame

    def frame(self: EncodedMessage, **more: Any) -> list[memoryview]:
        buffers = watched(self, **more)
        if not _lies or self.kind is StarKind.PING:
            return buffers
        return [memoryview(_lies.pop()(self, b"".join(buffers), **more))]

    setattr(EncodedMessage, "frame", frame)  # noqa: B010


def _again(self: EncodedMessage, **more: Any) -> bytes:
    return b"".join(_FRAME(self, **more))


def _too_short(_self: EncodedMessage, raw: bytes, **_more: Any) -> bytes:
    return raw[:-8]


def _twice(_self: EncodedMessage, raw: bytes, **_more: Any) -> bytes:
    return raw + raw


def _too_early(self: EncodedMessage, _raw: bytes, *, sequence: int, **more: Any) -> bytes:
    return _again(self, sequence=sequence + 1, **more)


def _other_head(_self: EncodedMessage, raw: bytes, **_more: Any) -> bytes:
    return raw[:_HEADER] + bytes([raw[_HEADER] ^ 1]) + raw[_HEADER + 1 :]


def _too_long(_self: EncodedMessage, raw: bytes, **_more: Any) -> bytes:
    return raw[: _HEADER - 8] + struct.pack("<Q", 1 << 40) + raw[_HEADER:]


def _of_another_session(self: EncodedMessage, _raw: bytes, *, session: bytes, **more: Any) -> bytes:
    return _again(self, session=bytes(len(session)), **more)


def _no_more_memory() -> None:
    """Let the system give this process hardly more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _other_version() -> None:
    setattr(framing, "FRAME_VERSION", framing.FRAME_VERSION + 1)  # noqa: B010


def clock_can_be_set() -> bool:
    """Whether ``clock.c`` was preloaded."""
    return hasattr(ctypes.CDLL(None), _CLOCK)


def _set_clock(days: int) -> Callable[[], None]:
    def setting() -> None:
        ctypes.c_longlong.in_dll(ctypes.CDLL(None), _CLOCK).value = days * 24 * 3600

    return setting


WITHIN: Final[Mapping[str, Callable[[], None]]] = {
    "truncated": lambda: _lies.append(_too_short),
    "duplicated": lambda: _lies.append(_twice),
    "reordered": lambda: _lies.append(_too_early),
    "flipped": lambda: _lies.append(_other_head),
    "oversized": lambda: _lies.append(_too_long),
    "another session": lambda: _lies.append(_of_another_session),
    "no memory": _no_more_memory,
    "another version": _other_version,
    "clock ahead": _set_clock(400),
    "clock back": _set_clock(-400),
}
"""What happens within a process."""
