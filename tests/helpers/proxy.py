"""A machine in the middle: passes bytes between a secondary and the primary, and may alter them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from helpers.patience import PATIENCE_S


class Middle:
    """What went through, and what is done to it."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.cut = False
        self.pause_s = 0.0
        """Before what goes down to the secondary is passed on, 64 KiB at a time."""
        self.alter: Callable[[bytes], bytes] = lambda raw: raw

    def pump(self, source: socket.socket, sink: socket.socket, *, upwards: bool) -> None:
        with suppress(OSError):
            while raw := source.recv(1 << 16):
                self.seen += raw
                time.sleep(0 if upwards else self.pause_s)
                sink.sendall(self.alter(raw) if upwards else raw)
                if self.cut:
                    break
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def in_the_middle(address: tuple[str, int]) -> Iterator[tuple[Middle, tuple[str, int]]]:
    """Yield a Middle and its own address; one caller is served."""
    middle = Middle()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            caller, _ = listener.accept()
            with caller, socket.create_connection(address) as primary:
                ways = [
                    threading.Thread(target=middle.pump, args=ends, kwargs={"upwards": upwards})
                    for ends, upwards in (((caller, primary), True), ((primary, caller), False))
                ]
                for way in ways:
                    way.start()
                for way in ways:
                    way.join(PATIENCE_S)

        server = threading.Thread(target=serve)
        server.start()
        yield middle, listener.getsockname()
        server.join(PATIENCE_S)
        assert not server.is_alive()
