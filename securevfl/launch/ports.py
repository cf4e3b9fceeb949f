"""A free port for a run on one machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of ``host`` that nobody listens on now.

    Another process could take it before the primary does; the primary then says so.
    """
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
