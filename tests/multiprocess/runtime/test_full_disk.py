"""A party whose disk is full ends with one line, and the others learn that much and no more."""

import json

import pytest
from helpers.warm import Program

from securevfl.ledger.chain import ChainedFile
from securevfl.testing import write_federation

pytestmark = pytest.mark.multiprocess

# Logs and ledgers of the run below are smaller, checkpoints larger.
MOST_BYTES = 3_000


LIMITED = f"""
import resource

from securevfl.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, ({MOST_BYTES}, {MOST_BYTES}))
main()
"""
"""The command, where no file may grow beyond that, nor any of its processes."""


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_checkpoint_that_does_not_fit(tmp_path, monkeypatch, command):
    """One line, exit code 2, no traceback anywhere, whole ledgers, and no path to the others."""
    path = write_federation(
        tmp_path, secondaries=1, rows=60, training={"epochs": 1, "batch_size": 32}
    )
    out = tmp_path / "run"
    program = tmp_path / "limited.py"
    program.write_text(LIMITED, encoding="utf-8")
    # A compiled module that does not fit would be kept cut short, and break the next import.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code, said = Program(program, command, path, "--out", out).ended()
    assert code == 2
    last = said.splitlines()[-1]
    assert last.startswith("securevfl: ")
    assert "best-1.pt: cannot be written (File too large)" in last
    written = {kept: kept.read_text() for kept in out.rglob("*.*") if kept.suffix != ".pt"}
    assert not any("Traceback" in text for text in [said, *written.values()])
    assert not [kept for kept in out.rglob(".*") if kept.is_file()]  # half a file
    for ledger in out.rglob("ledger.jsonl"):
        chain = ChainedFile(ledger)
        assert chain.entries
        chain.close()
    for log in out.rglob("log.jsonl"):
        reason = json.loads(log.read_text().splitlines()[-1])["reason"]
        own = f"{log.parent / 'best-1.pt'}: cannot be written" in reason
        assert own or reason.endswith("StorageError: it cannot write to its own disk")
