"""Programs as processes of their own that start with everything loaded: forked, in milliseconds."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import weakref
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from helpers.patience import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["helpers.loaded"])

_TESTS = Path(__file__).parents[1]


def warm_context() -> multiprocessing.context.ForkServerContext:
    """Return what forks processes from one that has loaded what tests use, and start that one.

    It keeps silent about modules that it does not find, and each process would load all for itself.
    """
    places = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_TESTS)]))
    with patch.dict(os.environ, PYTHONPATH=places):
        forkserver.ensure_running()
    return _CONTEXT


class Program:
    """A Python program in a process of its own.

    Args:
        program: A file, or the name of a module that is run as one.
        arguments: Of the program.
    """

    def __init__(self, program: Path | str, *arguments: object) -> None:
        self._printed, self._said = self._file(), self._file()
        streams = (str(self._printed), str(self._said))
        asked = (program, [str(one) for one in arguments], streams, dict(os.environ))
        self._process = warm_context().Process(target=_run, args=asked)
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None, "started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it wrote to its standard error."""
        self._process.join(PATIENCE_S)
        assert self.returncode is not None, f"it runs for {PATIENCE_S} s"
        return self.returncode, self._said.read_text(encoding="utf-8")

    @property
    def printed(self) -> str:
        """What it wrote to its standard output."""
        return self._printed.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        self._process.kill()
        self._process.join()

    def _file(self) -> Path:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        path = Path(name)
        weakref.finalize(self, path.unlink, missing_ok=True)
        return path


def empty_stdin() -> None:
    """Let standard input be file 0, and empty: multiprocessing has given it another number."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process lives


def printed(program: Path | str, *arguments: object) -> str:
    """Return what a program prints, which has to end well."""
    process = Program(program, *arguments)
    code, said = process.ended()
    assert code == 0, said
    return process.printed


def _run(
    program: Path | str,
    arguments: list[str],
    streams: tuple[str, str],
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment says
    empty_stdin()
    for number, path in enumerate(streams, 1):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = [str(program), *arguments]
    found = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [one for one in found if one and one not in sys.path]
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
