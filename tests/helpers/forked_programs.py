"""Party programs whose processes are forked from the fork server of tests, with all loaded."""

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from securevfl.launch import process

_PROGRAM = "--program"
_COMMAND = process.PartyCommand


@contextmanager
def forked_programs() -> Iterator[None]:
    """Fork what programs in the block start, each with the environment that it would have had."""
    with patch.object(process, "PartyCommand", _forked):
        yield


def or_program(run: Callable[[], None]) -> Callable[[], None]:
    """Return what a fork server's child does: ``run``, or a program that was asked for above."""
    return lambda: _run() if sys.argv[1:2] == [_PROGRAM] else run()


def _forked(
    *, program: list[str], arguments: tuple[str, ...], environment: dict[str, str], **others: Any
) -> process.PartyCommand:
    # Of one environment, so that one fork server does for all ranks and all tests.
    own = json.dumps({"TMPDIR": tempfile.gettempdir(), **environment})
    return _COMMAND(
        arguments=[_PROGRAM, own, *program[1:], *arguments],
        fork_server="securevfl.cli.fork_server_program",
        **others,
    )


def _run() -> None:
    _, _, environment, *sys.argv = sys.argv
    os.environ |= json.loads(environment)
    tempfile.tempdir = None  # as the environment says
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(code, {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
