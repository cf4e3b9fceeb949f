"""An error that nobody foresaw ends a party in one line that says where its traceback is."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from helpers.jobs import secondary_job

from securevfl import SecureVflError
from securevfl.core import interrupts
from securevfl.core.errors import DataError, StorageError
from securevfl.runtime import launching, party
from securevfl.runtime.run_options import PartyJob


@pytest.fixture
def job(tmp_path):
    return secondary_job(tmp_path)


def failing(monkeypatch, error: Exception) -> None:
    def live(_life):
        raise error

    monkeypatch.setattr(launching, "_role_of", lambda _job: live)


def last_line(job: PartyJob) -> dict[str, object]:
    lines = (job.folder / "log.jsonl").read_text().splitlines()
    line: dict[str, object] = json.loads(lines[-1])
    return line


def test_the_line_names_the_log_that_has_the_traceback(job, monkeypatch):
    """The frames are in the log, for whoever mends the program."""
    failing(monkeypatch, KeyError("x7"))
    with pytest.raises(SecureVflError) as caught:
        launching.run_party(job)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert "unexpected KeyError" in str(caught.value)
    assert str(job.folder / "log.jsonl") in str(caught.value)
    logged = last_line(job)
    assert logged["error"] == "KeyError"
    assert any("in live" in frame for frame in logged["trace"])


def test_a_full_disk_is_named_whoever_met_it(job, monkeypatch):
    """Another library's write that failed for want of room is no mistake of the program."""
    failing(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/data/links.npz"))
    with pytest.raises(StorageError, match=r"^/data/links\.npz: cannot be written \(No space left"):
        launching.run_party(job)
    assert last_line(job)["error"] == "StorageError"


def test_a_log_that_takes_no_line_hides_nothing(job, monkeypatch):
    """The reason comes home though its line in the log cannot be written."""
    failing(monkeypatch, SecureVflError("the true reason"))

    def full(*_arguments: object, **_fields: object) -> None:
        raise StorageError.of(Path("log.jsonl"), OSError(errno.ENOSPC, "No space left"))

    write = party.PartyFiles.log
    monkeypatch.setattr(
        party.PartyFiles,
        "log",
        lambda own, event, **more: full() if event == "failed" else write(own, event, **more),
    )
    with pytest.raises(SecureVflError, match="the true reason"):
        launching.run_party(job)


def test_an_error_of_an_interrupted_party_is_the_interrupt(job, monkeypatch):
    """A library that turns the signal into an error of its own does not blame the table."""

    def live(_life):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise DataError("base.estimator: can't be fitted") from None

    monkeypatch.setattr(launching, "_role_of", lambda _job: live)
    with interrupts.watch_signals(), pytest.raises(KeyboardInterrupt):
        launching.run_party(job)
    assert last_line(job)["error"] == "KeyboardInterrupt"
