"""What holds for tests that start a process for each party."""

from collections.abc import Iterator

import pytest
from helpers.shared_nursery import Nurseries


@pytest.fixture(scope="session")
def _nurseries() -> Iterator[Nurseries]:
    """Return what forks the parties of all launches."""
    nurseries = Nurseries()
    yield nurseries
    nurseries.end()


@pytest.fixture(scope="module", autouse=True)
def _launches_share_a_nursery(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork parties from one process, except in tests of the launcher itself."""
    if "launch" in request.path.parts:
        yield
        return
    with request.getfixturevalue("_nurseries").shared():
        yield
