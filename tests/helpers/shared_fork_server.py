"""One process that forks parties for all launches of a test session, instead of one a launch."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from securevfl.launch import spawn
from securevfl.launch.fork_server import ForkServer

_LOADED = {"securevfl.cli.fork_server_program": "helpers.fork_server_program"}
"""What takes the place of a fork server's program, and loads more before it forks."""

_TESTS = Path(__file__).parents[1]

# Pytest's own variables change with every test, and no party reads them; a library of OpenMP's sets
# its own once it is loaded here, and will do so there.
_NOT_TOLD_APART = ("PYTEST_", "KMP_")


class _Kept(ForkServer):
    """Outlives the launch that started it, unless it is lost."""

    def close(self) -> None:
        if self.is_lost:
            super().close()

    def end(self) -> None:
        super().close()


class ForkServers:
    """Those of a test session, one for each environment that a launch was made in.

    Loading torch and tables costs two CPU-seconds, which each launch would pay again, and what
    the local baseline and figures use another one in each primary.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Kept] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let launches in the block fork their parties from them."""
        with patch.object(spawn, "ForkServer", self._start):
            yield

    def end(self) -> None:
        """End their processes."""
        for one in self._kept.values():
            one.end()

    def _start(self, module: str, environment: Mapping[str, str]) -> _Kept:
        # Parties inherit variables and working directory.
        inherited = {
            name: it for name, it in os.environ.items() if not name.startswith(_NOT_TOLD_APART)
        }
        key = (module, Path.cwd(), *sorted({**inherited, **environment}.items()))
        if key not in self._kept or self._kept[key].is_lost:
            found = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_TESTS)]))
            started = {**environment, "PYTHONPATH": found}
            self._kept[key] = _Kept(_LOADED.get(module, module), started)
        return self._kept[key]
