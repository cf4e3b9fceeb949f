"""Processes that share work end with the one that started them, however that ends."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = textwrap.dedent(
    """
    import os, time

    from securevfl.linkage.protections.paillier import on_cores

    def work(number):
        os.write(1, b"working\\n")
        time.sleep(0.1)
        return number

    if __name__ == "__main__":
        with on_cores(2) as apply:
            for _ in apply(work, range(10_000)):
                pass
    """
)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """They hold the program's output open: it ends when the last of them has gone."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        first = parent.stdout.readline()
        parent.send_signal(signal.SIGKILL)
        parent.stdout.read()  # to its end, within the test's time limit

    assert first == b"working\n"
