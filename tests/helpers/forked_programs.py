"""Party programs whose processes are forked from the fork server of tests, with all loaded."""

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from securevfl.launch import process

_PROGRAM = "--program"
_COMMAND = process.PartyCommand


@contextmanager
def forked_programs(starts: ModuleType = process) -> Iterator[None]:
    """Fork what programs in the block start, each with the environment that it would have had.

    Args:
        starts: The module that starts them by the ``PartyCommand`` of this name in it.
    """
    with patch.object(starts, "PartyCommand", _forked):
        yield


def or_program(run: Callable[[], None]) -> Callable[[], None]:
    """Return what a fork server's child does: ``run``, or a program that was asked for above."""
    return lambda: _run() if sys.argv[1:2] == [_PROGRAM] else run()


def _forked(
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    program: Sequence[str] = (),
    **others: Any,
) -> process.PartyCommand:
    _, *command = [*program, *arguments]
    # Of one environment, so that one fork server does for all ranks and all tests.
    own = json.dumps({"TMPDIR": tempfile.gettempdir(), **environment})
    return _COMMAND(
        arguments=[_PROGRAM, own, *command],
        fork_server="securevfl.cli.fork_server_program",
        **others,
    )


def _run() -> None:
    _, _, environment, *sys.argv = sys.argv
    own = json.loads(environment)
    os.environ |= own
    tempfile.tempdir = None  # as the environment says
    if "PYTHONPATH" in own:
        sys.path[:] = own["PYTHONPATH"].split(os.pathsep)
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(code, {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
