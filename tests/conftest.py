"""What holds for every test: one thread in each process, and the same examples in every run."""

import gc
import multiprocessing.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import fitted_once, type_checks, undrawn, unsynced
from helpers.fixed_entropy import fixed_entropy
from hypothesis import settings

_UNIT = Path(__file__).parent / "unit"

# Before anything imports the package.
type_checks.check_shapes_where_there_are_any()

# Hypothesis's examples follow from the test: a commit that passed passes again. New ones come with
# --hypothesis-profile=default.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

# Set before anything imports torch. Tests run side by side and start parties as processes of their
# own, which inherit this: with several threads in each they would fight for the same cores.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

unsynced.skip_fsync()


def pytest_configure(config: pytest.Config) -> None:
    """Begin to share what all runs fit, in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        fitted_once.begin_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End it."""
    if not hasattr(config, "workerinput"):
        fitted_once.end_session()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put unit tests last, whose files are short, so that all workers end together."""
    items.sort(key=lambda item: _UNIT in item.path.parents)


def pytest_collection_finish() -> None:
    """Keep the collector from walking all that was loaded, again and again; it stays anyway."""
    # Its first use fixes where sockets of fork servers lie, and a test may have a long TMPDIR then.
    multiprocessing.util.get_temp_dir()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin each test alike, whatever ran before it in the process.

    The generators that belong to the whole process start anew: what a test draws from them depends
    on no other test. In each file the types of each function's first calls are checked.
    """
    type_checks.begin_test(item.path)
    random.seed(0)  # noqa: TID251 - that of libraries, too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
    # Once a test has loaded torch; most need none.
    fitted_once.fit_runs_once(in_full=item.get_closest_marker("full_fits") is not None)
    undrawn.draw(drawn=item.get_closest_marker("pictures") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Draw the same noise and secret samples in every run of a test, and of its fixtures.

    Tests that are marked ``statistical`` have those of the system.
    """
    if item.get_closest_marker("statistical"):
        return (yield)
    with fixed_entropy():
        return (yield)


@pytest.fixture
def fixed_noise() -> Iterator[None]:
    """Fix them in a test that is marked ``statistical``."""
    with fixed_entropy():
        yield


@pytest.fixture(scope="session")
def _fork_servers() -> Iterator[Any]:
    """Return what forks the parties of all launches."""
    from helpers.shared_fork_server import ForkServers

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


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port of this machine that is kept for the test until its end."""
    from securevfl.launch.spawn import reserved_port

    with reserved_port() as number:
        yield number
