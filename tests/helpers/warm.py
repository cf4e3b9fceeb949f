"""Programs as processes of their own that start with everything loaded: forked, in milliseconds."""

import multiprocessing
import os
import runpy
import sys
import tempfile
import weakref
from pathlib import Path

from helpers.patience import PATIENCE_S

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["helpers.loaded"])


class Program:
    """A Python program in a process of its own.

    Args:
        program: A file, or the name of a module that is run as one.
        arguments: Of the program.
    """

    def __init__(self, program: Path | str, *arguments: object) -> None:
        handle, said = tempfile.mkstemp()
        os.close(handle)
        self._said = Path(said)
        weakref.finalize(self, self._said.unlink, missing_ok=True)
        asked = (program, [str(one) for one in arguments], said, dict(os.environ))
        self._process = _CONTEXT.Process(target=_run, args=asked)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def ended(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it wrote to its standard error."""
        self._process.join(PATIENCE_S)
        assert self.returncode is not None, f"it runs for {PATIENCE_S} s"
        return self.returncode, self._said.read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        self._process.kill()
        self._process.join()


def _run(program: Path | str, arguments: list[str], said: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, os.devnull), (2, said)):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
