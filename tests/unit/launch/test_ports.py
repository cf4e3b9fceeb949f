import socket
import sys

import pytest

from securevfl.launch.spawn import reserved_port


def test_a_reserved_port_can_be_listened_on_and_called():
    """By the server that is told of it; callers before it are refused."""
    with reserved_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port
            socket.create_connection(("127.0.0.1", port)).close()
        # Once more: a primary that is started again listens where it did.
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a port be kept")
def test_nobody_else_is_given_it():
    """Who asks for any port, as every test and every program does, never gets this one."""
    with (
        reserved_port() as port,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", port))
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
