"""One process that forks parties for all launches of a test session, instead of one a launch."""

import multiprocessing.process
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from helpers.forked_programs import or_program
from helpers.warm import empty_stdin, warm_context

from securevfl.cli import fork_server_program
from securevfl.launch import fork_server, spawn
from securevfl.launch.fork_server import ForkServer, fork_children

_PROGRAM = "securevfl.cli.fork_server_program"
"""The fork server's program, in the place of which one is forked that has loaded more."""

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

    Loading all that parties use costs five CPU-seconds: they are forked from one that has.
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
            started = SimpleNamespace(Popen=_Warm, DEVNULL=None)
            is_usual = module == _PROGRAM
            with patch.object(fork_server, "subprocess", started) if is_usual else nullcontext():
                self._kept[key] = _Kept(module, environment)
        return self._kept[key]


class _Warm:
    """A fork server that is forked itself, in the place of one that is started and loads all."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        (handle,) = pass_fds
        with socket.socket(fileno=os.dup(handle)) as wire:
            arguments = (wire, dict(env), Path.cwd())
            self._process = warm_context().Process(target=_fork, args=arguments)
            self._process.start()
        # It belongs to the session: a test's own children are others.
        vars(multiprocessing.process)["_children"].discard(self._process)

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _fork(wire: socket.socket, environment: dict[str, str], place: Path) -> None:
    """Be the fork server."""
    os.setpgid(0, 0)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment says
    empty_stdin()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    sys.argv = ["fork server", str(wire.detach())]
    with patch.object(
        fork_server_program, "fork_children", lambda run: fork_children(or_program(run))
    ):
        fork_server_program.main()
    os._exit(0)
