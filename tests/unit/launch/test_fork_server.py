"""Reports of how a fork server's children end, and numbers of processes that are used again."""

import os
import sys
import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

from securevfl.launch import fork_server
from securevfl.launch.fork_server import ChildFiles, Forked, ForkServer

# Every child ends at once, has the number 7, and its end is reported when a file is there.
LATE = """\
import json, os, socket, subprocess, sys, time
from pathlib import Path

wire = socket.socket(fileno=int(sys.argv[1]))
while content := socket.recv_fds(wire, 1 << 16, 16)[0]:
    child = subprocess.Popen(["true"])
    socket.send_fds(wire, [json.dumps({"started": 7}).encode()], [os.pidfd_open(child.pid)])
    while not Path(json.loads(content)["arguments"][0]).exists():
        time.sleep(0.01)
    child.wait()
    wire.send(json.dumps({"ended": 7, "code": 5}).encode())
"""


def ended(child: Forked) -> Forked:
    deadline = time.monotonic() + PATIENCE_S
    while not child.has_ended:
        assert time.monotonic() < deadline
        os.sched_yield()
    return child


@pytest.mark.skipif(not fork_server.is_offered(), reason="there is no fork server here")
def test_a_number_that_is_used_again_is_given_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second child's report is not late because the first one's was."""
    (tmp_path / "late.py").write_text(LATE)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    server = ForkServer("late", environment)
    files = ChildFiles(lifeline=0, log=1, events=2, handed={})
    now = time.monotonic()
    try:
        first = ended(server.fork([str(tmp_path / "first")], files, name="first"))
        assert first.poll() is None, "its end is not reported yet"
        (tmp_path / "first").touch()
        assert first.wait() == 5
        second = ended(server.fork([str(tmp_path / "second")], files, name="second"))
        monkeypatch.setattr(time, "monotonic", lambda: now + 2 * fork_server.SILENT_S)
        assert second.poll() is None, "it has just ended"
        (tmp_path / "second").touch()
        assert second.wait() == 5
        assert second.why_lost is None
        first.close()
        second.close()
    finally:
        server.close()
