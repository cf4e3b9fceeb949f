"""Processes that share work: they end with the one that started them; a lost one is an error."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers.patience import SOON_S

from securevfl.core.errors import OutOfMemoryError, PartyFailedError
from securevfl.linkage.cores import on_cores
from securevfl.transport.message import failure_kind

pytestmark = pytest.mark.multiprocess

PROGRAM = textwrap.dedent(
    """
    import os, time

    from securevfl.stages.encrypted_linkage.paillier import on_cores

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


def kill_at(task: tuple[int, int]) -> int:
    """Return a task's number; at one of them, end as the system ends whoever takes most memory."""
    number, fatal = task
    if number == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("fatal", [0, 3, 7])
def test_a_killed_worker_is_an_error_at_once(fatal: int) -> None:
    """At the start, in the middle and at the end."""
    with (
        pytest.raises(OutOfMemoryError, match=r"^a worker process was killed: not enough memory\?"),
        on_cores(2) as apply,
    ):
        list(apply(kill_at, [(number, fatal) for number in range(8)]))
    assert failure_kind(OutOfMemoryError("")) == "lost"
    wait_for_no_child()


def test_a_worker_that_is_killed_when_all_is_done_is_missed_by_the_next_task_alone() -> None:
    with on_cores(2) as apply:
        assert list(apply(kill_at, [(number, -1) for number in range(4)])) == [0, 1, 2, 3]
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        with pytest.raises(OutOfMemoryError):
            list(apply(kill_at, [(0, -1)]))
    wait_for_no_child()


def stop(_task: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_wait_for_a_worker_ends_with_the_federation() -> None:
    """Whoever waits looks every second whether the others are still there; a stopped one too."""
    looked = 0

    def check() -> None:
        nonlocal looked
        looked += 1
        if looked == 2:
            raise PartyFailedError("bank: is gone")

    with pytest.raises(PartyFailedError), on_cores(2, check=check) as apply:
        list(apply(stop, [1, 2]))
    assert looked == 2
    wait_for_no_child()


def wait_for_no_child() -> None:
    """Reap the workers, which end with the context, stopped or not."""
    end = time.monotonic() + SOON_S
    # The pool's own thread reaps them too; whoever comes second may be told that nothing has ended.
    while (left := multiprocessing.active_children()) and time.monotonic() < end:
        for process in left:
            process.join(0.1)
    assert left == []
