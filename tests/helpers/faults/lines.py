"""Lines between parties on which anything may happen: one thread, no waiting, any number of calls.

A line stands where one party dials, and passes on what goes between that party and the primary.
What it does to it may change at any time: what is on its way then is hit.
"""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

SLOW_BYTES_S: Final = 10_000
_READ: Final = 1 << 16
_SLOW_TURN_S: Final = 0.05
# What the system keeps for a line is little, so that senders feel what it takes in.
_KEPT: Final = 1 << 12
# As a TLS record header says that 65,535 bytes follow: four times what TLS allows.
_TOO_LONG: Final = b"\x17\x03\x03\xff\xff" + bytes(1 << 16)

Way = Literal["up", "down"]
"""Towards the primary, or away from it."""


def truncated(raw: bytes) -> tuple[bytes, bytes]:
    """Lose the end."""
    return raw[:-8], b""


def duplicated(raw: bytes) -> tuple[bytes, bytes]:
    """Pass on twice."""
    return raw + raw, b""


def reordered(raw: bytes) -> tuple[bytes, bytes]:
    """Hold back until something else has gone by."""
    return b"", raw


def flipped(raw: bytes) -> tuple[bytes, bytes]:
    """Flip one bit."""
    place = len(raw) // 2
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], b""


def oversized(raw: bytes) -> tuple[bytes, bytes]:
    """Put a record before it that is longer than any may be."""
    return _TOO_LONG + raw, b""


Alteration = Callable[[bytes], tuple[bytes, bytes]]
"""Returns what goes on instead of some bytes, and what goes on after the next ones."""


@dataclass(eq=False)
class _Flow:
    """Bytes of one call in one way."""

    source: socket.socket
    sink: socket.socket
    way: Way
    pending: bytearray = field(default_factory=bytearray)
    held: bytes = b""
    ended: bool = False
    shut: bool = False
    again_at: float = 0.0


class Line:
    """A party's line to the primary.

    Args:
        selector: Of the one loop; every key's data is called when its socket is ready.
        port: Where the primary listens.
    """

    def __init__(self, selector: selectors.BaseSelector, port: int) -> None:
        self._selector = selector
        self._primary = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KEPT)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KEPT)
        self._listener.setblocking(False)
        self._calls: list[tuple[_Flow, _Flow]] = []
        self._alter: dict[Way, Alteration] = {}
        self.swallows = False
        """Whether nothing comes through any more, and nobody is told."""
        self.slow = False
        """Whether :data:`SLOW_BYTES_S` come through, each way."""
        self.heard = bytearray()
        """What the last call sent to the primary."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        """Where the party dials."""
        return int(self._listener.getsockname()[1])

    def alter(self, way: Way, how: Alteration) -> None:
        """Alter what comes next, once."""
        self._alter[way] = how

    def mend(self) -> None:
        """Be a good line for the calls to come; those that were swallowed are over."""
        if self.swallows:
            self.cut()
        self.swallows = self.slow = False
        self._alter.clear()

    def cut(self) -> None:
        """Close all calls."""
        for call in list(self._calls):
            self._close(call)

    def replay(self) -> socket.socket:
        """Call the primary and send what the last call sent; return the connection."""
        again = socket.create_connection(self._primary)
        with suppress(OSError):
            again.sendall(self.heard)
        return again

    def tick(self, now: float) -> float | None:
        """Read on where a slow line may; return in how many seconds the next one may."""
        for flow in self._flows():
            if flow.again_at and now >= flow.again_at:
                flow.again_at = 0.0
                self._listen(flow)
        later = [flow.again_at - now for flow in self._flows() if flow.again_at]
        return min(later, default=None)

    def close(self) -> None:
        """End it all."""
        self.cut()
        self._selector.unregister(self._listener)
        self._listener.close()

    def _flows(self) -> Sequence[_Flow]:
        return [flow for call in self._calls for flow in call]

    def _accept(self, _mask: int) -> None:
        try:
            caller, _ = self._listener.accept()
        except BlockingIOError:
            return
        if self.swallows:
            # Kept, for whoever closes it tells something.
            self._calls.append((_Flow(caller, caller, "up"), _Flow(caller, caller, "down")))
            return
        try:
            primary = socket.create_connection(self._primary)
        except OSError:
            caller.close()  # it is not there yet; who called calls again
            return
        for end in (caller, primary):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard.clear()
        call = (_Flow(caller, primary, "up"), _Flow(primary, caller, "down"))
        self._calls.append(call)
        for flow in call:
            self._listen(flow)

    def _listen(self, flow: _Flow) -> None:
        """Watch what the flow's ends are to be watched for."""
        for end in (flow.source, flow.sink):
            self._watch(end)

    def _watch(self, end: socket.socket) -> None:
        mask = 0
        mine: list[_Flow] = []
        for flow in self._flows():
            if flow.source is end and not flow.ended and not flow.again_at:
                mask |= selectors.EVENT_READ if len(flow.pending) < _READ else 0
                mine.append(flow)
            if flow.sink is end and flow.pending:
                mask |= selectors.EVENT_WRITE
                mine.append(flow)
        known = end in self._selector.get_map()

        def ready(events: int) -> None:
            for flow in mine:
                if events & selectors.EVENT_READ and flow.source is end:
                    self._read(flow)
                if events & selectors.EVENT_WRITE and flow.sink is end:
                    self._write(flow)

        if mask and known:
            self._selector.modify(end, mask, ready)
        elif mask:
            self._selector.register(end, mask, ready)
        elif known:
            self._selector.unregister(end)

    def _read(self, flow: _Flow) -> None:
        if flow.source.fileno() < 0:
            return
        try:
            raw = flow.source.recv(int(SLOW_BYTES_S * _SLOW_TURN_S) if self.slow else _READ)
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        if self.swallows:
            if not raw:
                flow.ended = True
                self._listen(flow)
            return
        if not raw:
            flow.ended = True
        elif flow.way == "up":
            self.heard += raw
        if self.slow:
            flow.again_at = time.monotonic() + _SLOW_TURN_S
        how = self._alter.pop(flow.way, None) if raw else None
        if how is not None:
            now, flow.held = how(raw)
            flow.pending += now
        else:
            flow.pending += raw + flow.held
            flow.held = b""
        self._write(flow)

    def _write(self, flow: _Flow) -> None:
        if flow.sink.fileno() < 0:
            return
        try:
            while flow.pending:
                del flow.pending[: flow.sink.send(flow.pending)]
        except BlockingIOError:
            pass
        except OSError:
            flow.ended = True
            flow.pending.clear()
        if flow.ended and not flow.pending and not flow.shut:
            flow.shut = True
            with suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)
        call = next((one for one in self._calls if flow in one), None)
        if call is not None and all(one.shut for one in call):
            self._close(call)
        elif call is not None:
            self._listen(flow)

    def _close(self, call: tuple[_Flow, _Flow]) -> None:
        self._calls.remove(call)
        for end in {call[0].source, call[0].sink}:
            if end in self._selector.get_map():
                self._selector.unregister(end)
            end.close()
