import socket

from securevfl.launch.ports import free_port


def test_a_free_port_can_be_listened_on():
    """The port that was found free can be taken at once."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
