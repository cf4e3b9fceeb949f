"""What a party does after a session that was lost: when it joins the next one, and when not."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.jobs import secondary_job

from securevfl import SecureVflError
from securevfl.core.errors import (
    BudgetExceededError,
    ConfigError,
    PartyAbsentError,
    PartyFailedError,
    PartyLostError,
    PartyTimeoutError,
    PartyTwiceError,
)
from securevfl.core.progress import ProgressEvent, SessionLost, Warned
from securevfl.federation.checkpoint import Checkpoints
from securevfl.runtime import launching
from securevfl.runtime.party import PartySession
from securevfl.runtime.run_options import PartyJob

LOST = PartyLostError("bank-2: its connection broke")
WAITS = {"on_loss": "wait", "wait_s": 900.0, "join_timeout_s": 5.0, "most_losses": 4}


class Sessions:
    """Sessions of a secondary that end as they are told; its run begins in the second one."""

    def __init__(self, *ends: SecureVflError | None) -> None:
        self.ends = list(ends)
        self.jobs: list[PartyJob] = []
        self.told: list[ProgressEvent] = []

    def __call__(self, life: PartySession) -> None:
        self.jobs.append(life.job)
        if len(self.jobs) == 2:
            Checkpoints(life.job.folder, settings_digest="any").begin("1" * 32)
        end = self.ends.pop(0)
        if end is not None:
            raise end


def run(job: PartyJob, sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_role_of", lambda _job: sessions)
    launching.run_party(replace(job, observe=sessions.told.append))


def test_it_joins_again_and_goes_on_with_what_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss before the run began is followed by a fresh start, a later one by a resumed run."""
    sessions = Sessions(LOST, PartyTimeoutError("agency: gave no sign of life for 10 s"), None)
    run(secondary_job(tmp_path, **WAITS), sessions, monkeypatch)
    assert [one.resume for one in sessions.jobs] == [False, False, True]
    assert [one.returning for one in sessions.jobs] == [False, True, True]
    assert [one.join_timeout_s for one in sessions.jobs] == [5.0, 900.0, 900.0]
    assert sessions.told == [
        SessionLost(why="bank-2: its connection broke", wait_s=900.0),
        SessionLost(why="agency: gave no sign of life for 10 s", wait_s=900.0),
    ]


def test_a_second_one_of_a_name_does_not_wait_for_the_first_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It calls until the primary would know the first one for lost; one that was there waits on."""
    twice = PartyTwiceError("bank-1: a party of this name has joined already")
    sessions = Sessions(twice, twice, None)
    run(secondary_job(tmp_path, **WAITS, silence_timeout_s=2.0), sessions, monkeypatch)
    assert [one.returning for one in sessions.jobs] == [False, True, True]
    assert [one.join_timeout_s for one in sessions.jobs] == [5.0, 4.0, 900.0]


@pytest.mark.parametrize(
    "error",
    [
        PartyFailedError("bank-2: its table does not fit"),
        PartyAbsentError("bank-2: did not join within 900 s"),
        BudgetExceededError("epsilon: would be 9"),
    ],
)
def test_it_does_not_wait_where_that_mends_nothing(
    error: SecureVflError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another party's own error, one that never came back, and this party's own."""
    sessions = Sessions(error)
    with pytest.raises(type(error), match=str(error)):
        run(secondary_job(tmp_path, **WAITS), sessions, monkeypatch)
    assert not sessions.told


def test_by_default_a_loss_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As does one while a kept model is served, which has a way of its own to join again."""
    job = secondary_job(tmp_path)
    with pytest.raises(PartyLostError):
        run(job, Sessions(LOST), monkeypatch)
    (tmp_path / "waits").mkdir()
    serving = replace(secondary_job(tmp_path / "waits", **WAITS), serves=True)
    sessions = Sessions(LOST)
    with pytest.raises(PartyLostError):
        run(serving, sessions, monkeypatch)


def test_a_run_that_is_lost_too_often_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A party that fails at the same place each time may not take all others back for ever."""
    sessions = Sessions(*[LOST] * 9)
    with pytest.raises(
        PartyFailedError, match=r"broke; the run was lost 4 times, which is runtime"
    ):
        run(secondary_job(tmp_path, **WAITS), sessions, monkeypatch)
    assert len(sessions.jobs) == 4


class Resumed(Sessions):
    """Sessions that look for the run which they go on with."""

    def __call__(self, life: PartySession) -> None:
        self.found = (life.resumed_run(), life.files.resume, life.job.returning)
        return super().__call__(life)


def test_a_resumed_party_begins_where_nothing_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that always resumes gets a run that died before it began to begin."""
    job = replace(secondary_job(tmp_path), resume=True)
    sessions = Resumed(None)
    run(job, sessions, monkeypatch)
    assert sessions.found == ("", False, True)
    [warned] = sessions.told
    assert isinstance(warned, Warned)
    assert warned.text == f"bank-1: no run has begun in {job.run_folder}: it begins now"

    Checkpoints(job.folder, settings_digest=job.config.settings_digest).begin("1" * 32)
    sessions = Resumed(None)
    run(job, sessions, monkeypatch)
    assert sessions.found == ("1" * 32, True, True)
    assert sessions.told == []


@pytest.mark.parametrize("left", ["run.pt", "epoch-1.pt", "ledger.json"])
def test_a_resumed_party_does_not_begin_anew_where_a_run_was_lost(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file, or the place of a ledger, says that something may have been released."""
    job = replace(secondary_job(tmp_path), resume=True)
    job.folder.mkdir(parents=True)
    (job.folder / left).write_text("{}")
    with pytest.raises(ConfigError, match="holds nothing that 'bank-1' could go on with"):
        run(job, Resumed(None), monkeypatch)
