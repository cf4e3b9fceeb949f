"""A launcher that is killed leaves nothing that is secret behind."""

import time
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S
from helpers.warm import Program

from securevfl.testing import write_federation

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
        assert process.returncode is None, "the launcher ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_launcher_leaves_no_key(tmp_path, monkeypatch):
    """Neither in the temporary folder nor in the run's, then or later; the parties end."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    run = tmp_path / "run"
    path = write_federation(tmp_path, training={"epochs": 100_000, "patience": 100_000})
    with monkeypatch.context() as there:
        there.setenv("TMPDIR", str(temporary))
        launcher = Program("securevfl.cli.main", "train", path, "--out", run)
    try:
        until(lambda: all(logged(run, name, "connected") for name in SECONDARIES), launcher)
    finally:
        launcher.kill()
    parties_gone = time.monotonic() + PATIENCE_S
    while not all(logged(run, name, "failed") for name in NAMES):
        assert time.monotonic() < parties_gone
        time.sleep(0.02)
    assert private_keys(tmp_path) == []
    assert list(temporary.iterdir()) == []
