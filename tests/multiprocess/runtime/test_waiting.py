"""Runs that wait for a party that is lost: killed, stopped, or gone for good."""

import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.launched import processes_of
from helpers.patience import PATIENCE_S
from helpers.undisturbed import undisturbed

import securevfl as sv
from securevfl.core.errors import PartyFailedError
from securevfl.core.progress import ProgressEvent, RoundDone, SessionLost, Warned
from securevfl.testing import save_federation, write_federation

pytestmark = pytest.mark.multiprocess

EPOCHS = 3


def federation(folder: Path, **runtime: Any) -> Path:
    return write_federation(
        folder,
        rows=60,
        training={"epochs": EPOCHS, "batch_size": 16},
        runtime={"on_loss": "wait", "wait_s": PATIENCE_S, **runtime},
    )


class Watcher:
    """Keeps what a run tells, and disturbs it once at each point."""

    def __init__(self, disturb: dict[int, Callable[[], None]]) -> None:
        self.disturb = disturb
        """By epoch: what happens when its first round is done."""
        self.on_loss: Callable[[], None] = lambda: None
        self.told: list[str] = []
        self.losses = 0

    def __call__(self, event: ProgressEvent) -> None:
        match event:
            case RoundDone() if event.epoch in self.disturb:
                self.disturb.pop(event.epoch)()
            case SessionLost():
                self.losses += 1
                self.told.append(event.why)
                self.on_loss()
            case Warned():
                self.told.append(event.text)
            case _:
                pass


def kill(out: Path, name: str, number: int = signal.SIGKILL) -> Callable[[], None]:
    return lambda: os.kill(processes_of(out)[name], number)


FIGURES = ("train", "validation", "test", "epochs", "best_epoch")


def test_killed_parties_are_started_again_and_nothing_but_time_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first epoch a secondary, then the primary, then the other secondary.

    The last two by the signals of an operator, which count as any other.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = federation(tmp_path)
    out = tmp_path / "run"
    watcher = Watcher(
        {
            1: kill(out, "bank-2"),
            2: kill(out, "agency", signal.SIGTERM),
            3: kill(out, "bank-1", signal.SIGINT),
        }
    )
    found = sv.train(path, out=out, observe=watcher)
    assert not watcher.disturb
    for party in ("bank-2: was ended by SIGKILL", "agency: was interr", "bank-1: was interr"):
        assert any(text.startswith(party) for text in watcher.told), watcher.told
    whole = undisturbed(path, tmp_path / "whole")
    assert {name: found.metrics[name] for name in FIGURES} == {
        name: whole.metrics[name] for name in FIGURES
    }


def test_helpers_stay_as_long_as_they_may_be_needed_again(tmp_path: Path) -> None:
    """The session after a loss links with them, whoever was lost, and however long after."""
    path = federation(tmp_path)
    source = tomllib.loads(path.read_text())
    source["party"] += [{"name": role, "role": role} for role in ("coordinator", "dealer")]
    source["linkage"] = {"protection": "shares", "ranges": [[-1.0, 11.0]] * 2}
    out = tmp_path / "run"
    watcher = Watcher({2: kill(out, "bank-1"), 3: kill(out, "dealer")})
    found = sv.train(save_federation(tmp_path, source), out=out, observe=watcher)
    assert found.metrics["epochs"] == EPOCHS
    for name in ("bank-1", "dealer"):
        assert any(text.startswith(f"{name}: was ended by SIGKILL") for text in watcher.told)
    assert processes_of(out) == {}


def test_a_party_that_stood_still_comes_back_by_itself(tmp_path: Path) -> None:
    """The others close the session when it is silent; what it reads then, it takes as the end."""
    path = federation(tmp_path, silence_timeout_s=3.0)
    watcher = Watcher({2: kill(tmp_path / "run", "bank-1", signal.SIGSTOP)})
    watcher.on_loss = kill(tmp_path / "run", "bank-1", signal.SIGCONT)
    found = sv.train(path, out=tmp_path / "run", observe=watcher)
    assert found.metrics["epochs"] == EPOCHS
    assert watcher.losses
    assert "bank-1: gave no sign of life for 3 s" in watcher.told


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """A party that stands still past ``wait_s`` is named, and the run ends for everybody."""
    path = federation(tmp_path, silence_timeout_s=3.0, wait_s=5.0)
    watcher = Watcher({2: kill(tmp_path / "run", "bank-1", signal.SIGSTOP)})
    with pytest.raises(PartyFailedError, match=r"^bank-1: did not join within 5 s"):
        sv.train(path, out=tmp_path / "run", observe=watcher)
