"""What parties are started with."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from securevfl import read_federation
from securevfl.launch.process import PartyCommand
from securevfl.runtime import launching
from securevfl.runtime.run_options import RunOptions
from securevfl.testing import write_federation


class StartedError(Exception):
    """Ends the run when its processes are due."""


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what each of three parties is told of threads, nothing having been started."""
    told: list[tuple[str, str]] = []

    def note(commands: Sequence[PartyCommand], **_: Any) -> None:
        told.extend(
            (one.environment["OMP_NUM_THREADS"], one.environment["MKL_NUM_THREADS"])
            for one in commands
        )
        raise StartedError

    def ask() -> list[tuple[str, str]]:
        monkeypatch.setattr(launching, "run_party_processes", note)
        config = read_federation(write_federation(tmp_path, rows=20))
        with pytest.raises(StartedError):
            launching.train_in_processes(
                config,
                RunOptions(
                    run_folder=tmp_path / "run", data_root=tmp_path, observe=lambda _event: None
                ),
            )
        return told

    return ask


@pytest.mark.parametrize(("cores", "each"), [(2, "1"), (3, "1"), (12, "4")])
def test_parties_share_the_cores(
    threads: Any, monkeypatch: pytest.MonkeyPatch, cores: int, each: str
) -> None:
    """All of them together have as many threads as there are cores, and each has one."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads() == 3 * [(each, each)]


def test_threads_that_the_user_has_set_stand(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as in a simulation under the same variable, so that both add in one order."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads() == 3 * [("7", "7")]
