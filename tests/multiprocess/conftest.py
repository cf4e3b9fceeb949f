"""What holds for tests that start a process for each party."""

from collections.abc import Iterator

import pytest
from helpers.shared_fork_server import ForkServers


@pytest.fixture(scope="session")
def _fork_servers() -> Iterator[ForkServers]:
    """Return what forks the parties of all launches."""
    fork_servers = ForkServers()
    yield fork_servers
    fork_servers.end()


@pytest.fixture(scope="module", autouse=True)
def _launches_share_a_fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork parties from one process, except in tests of the launcher itself."""
    if "launch" in request.path.parts:
        yield
        return
    with request.getfixturevalue("_fork_servers").shared():
        yield
