"""A killed program's temporary run folder goes when the next one is made."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

from securevfl.core import files
from securevfl.runtime.run_folder import TemporaryFolder

LEAVES = """
import os, signal
from securevfl.runtime.run_folder import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "model").write_text("x")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not files.LOCKS_ITSELF, reason="needs the system's locks of files")
def test_what_a_killed_program_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the folder of one that runs, nor what somebody has put under its name."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("securevfl-run-*")
    (tmp_path / "securevfl-run-elsewhere").symlink_to(left)
    assert (left / "model").exists()
    (tmp_path / "securevfl-run-other").mkdir()
    running = TemporaryFolder()
    other = TemporaryFolder()
    assert not left.exists()
    assert running.path.is_dir()
    assert (tmp_path / "securevfl-run-other").is_dir()
    other.remove()
    assert not other.path.exists()
