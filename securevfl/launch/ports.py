"""A port for a run on one machine, kept free until the run is over."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a TCP port of ``host`` that only whoever is told of it takes.

    On Linux a socket that is bound, and does not listen, keeps the system from giving the port to
    anybody else who asks for some port; a server that asks for this one gets it, since both allow
    addresses to be reused. Elsewhere the port is only free now, and the primary says so if another
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
