"""A launcher that is killed leaves nothing that is secret behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.federations import write_federation
from helpers.patience import PATIENCE_S

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2")
SECONDARIES = NAMES[1:]


def private_keys(folder: Path) -> list[Path]:
    """Files below a folder that hold a private key."""
    return [
        path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    ]


def logged(run: Path, name: str, event: str) -> bool:
    log = run / "parties" / name / "log.jsonl"
    return log.exists() and f'"event": "{event}"' in log.read_text()


def until(condition, process) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the launcher ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_launcher_leaves_no_key(tmp_path):
    """Neither in the temporary folder nor in the run's, then or later; the parties end."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = tmp_path / "run"
    path = write_federation(tmp_path, training={"epochs": 100_000, "patience": 100_000})
    launcher = subprocess.Popen(
        [sys.executable, "-m", "securevfl.cli.main", "train", str(path), "--out", str(run)],
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        until(lambda: all(logged(run, name, "connected") for name in SECONDARIES), launcher)
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=PATIENCE_S)
    finally:
        launcher.kill()
    parties_gone = time.monotonic() + PATIENCE_S
    while not all(logged(run, name, "failed") for name in NAMES):
        assert time.monotonic() < parties_gone
        time.sleep(0.02)
    assert private_keys(tmp_path) == []
    assert list(temporary.iterdir()) == []
