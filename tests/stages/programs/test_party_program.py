"""One program at every party: started by one call, by CrypTen's variables, or by torchrun."""

import ast
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.forked_programs import forked_programs
from helpers.warm import Program

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.stages.programs.scripts import ThisParty, detect_torchrun, launch

pytestmark = pytest.mark.multiprocess

GIVEN: dict[str, Any] = {
    "privacy": sv.dp.Privacy(mechanism="none"),
    "training": sv.TrainingSettings(epochs=2, learning_rate=0.02),
    "with_alone": False,
}
DEALT: dict[str, Any] = {
    "privacy": sv.dp.Privacy(epsilon=8.0, delta=1e-4, encoder="frozen", links_per_record=1),
    "encoder": sv.EncoderSettings(method="class-means", labels="shares", label_epsilon=4.0),
    "linkage": sv.LinkageSettings(protection="none", choose="records"),
    "bounds": [-6.0, 6.0],
    "with_alone": False,
}


def table(rank: int) -> sv.data.PartyTable:
    """A bank's, or what a bureau knows of the same people."""
    random = np.random.default_rng(0)
    wealth, ids = random.normal(size=120), np.arange(120)
    if rank:
        frame = pd.DataFrame({"id": ids, "wealth": wealth})
        return sv.data.from_frame(frame, name="bureau", key="id")
    frame = pd.DataFrame({"id": ids, "age": random.normal(size=120), "y": wealth > 0})
    return sv.data.from_frame(frame, name="bank", key="id", label="y")


@sv.party_program(parties=3)
def dealt(me: ThisParty) -> float | None:
    model = sv.models.FeT(release="pooled", neighbours=1, hidden=1)
    run = me.train(table(me.rank) if me.rank < 2 else None, model, **DEALT)
    return None if run is None else run.metrics["privacy"]["epsilon"]


def wrong(me: ThisParty) -> None:
    if me.rank:
        raise KeyError("a cell")
    raise SystemExit(0)


def lacking(me: ThisParty) -> None:
    me.train(None, sv.models.Top1Sim(hidden=4), **GIVEN)


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_last_ranks_are_helpers(private: Path) -> None:
    """A dealer, which has no table; under a promise, the same epsilon as in a simulation."""
    with forked_programs():
        found = dealt()
    assert found[0] is not None
    assert 0 < found[0] <= 8.0
    assert found[1:] == [None, None]


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import securevfl as sv
from test_party_program import GIVEN, table

@sv.party_program(parties=2)
def program(me):
    run = me.train(table(me.rank), sv.models.Top1Sim(hidden=4), **GIVEN)
    return None if run is None else run.losses

print("returned", program(), file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["by itself", "environment", "torchrun"])
def test_the_same_script_runs_under_each_launcher(
    how: str, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a guard; one line comes from each process that the launcher did not make itself.

    Where nothing is noised, losses are those of a simulation.
    """
    script = private.parent / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    tests = str(Path(__file__).parents[2])
    torchrun = ["--standalone", "--nproc-per-node", "2", script]
    with monkeypatch.context() as there:
        there.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), tests]))
        there.setenv("TMPDIR", str(private))
        if how == "torchrun":
            running = [Program("torch.distributed.run", *torchrun)]
        elif how == "by itself":
            running = [Program(script)]
        else:
            there.setenv("WORLD_SIZE", "2")
            there.setenv("RENDEZVOUS", f"file://{private / 'meeting'}")
            running = []
            for rank in range(2):
                there.setenv("RANK", str(rank))
                running.append(Program(script))
    try:
        ended = [one.ended() for one in running]
    finally:
        for one in running:
            one.kill()
    assert [code for code, _ in ended] == [0] * len(running), ended
    said = [line for _, text in ended for line in text.splitlines() if line.startswith("returned")]
    assert len(said) == (1 if how == "by itself" else 2)
    by_rank = [ast.literal_eval(line.removeprefix("returned ")) for line in said]
    (losses,) = [one for returned in by_rank for one in returned if one is not None]
    model = sv.models.Top1Sim(hidden=4)
    run = sv.simulate([table(0), table(1)], model, progress=False, **GIVEN)
    assert losses == [pytest.approx(epoch, abs=2**-14) for epoch in run.losses]
    del run
    assert list(private.glob("meeting*")) == list(private.glob(f"securevfl-{os.getuid()}-*")) == []


def test_the_rank_that_fails_is_named(private: Path) -> None:
    with (
        forked_programs(),
        pytest.raises(sv.SecureVflError, match="rank-1: exited with 1: KeyError"),
    ):
        launch(wrong, parties=2)
    assert list(private.iterdir()) == []


def test_a_party_without_a_table_is_named(private: Path) -> None:
    with (
        forked_programs(),
        pytest.raises(ConfigError, match=r"rank . of 2: lacks a table; .* all have one"),
    ):
        launch(lacking, parties=2)


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A notebook's function, a number of processes, and places where they could not meet."""
    with pytest.raises(ConfigError, match="parties: must be 2 or more processes, got 1"):
        launch(lacking, parties=1)
    here = lacking
    monkeypatch.setattr(here, "__module__", "__main__")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match=r"'lacking' is defined in a notebook.*own_program\.py"):
        launch(here, parties=2)
    assert detect_torchrun() is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "RENDEZVOUS": "tcp://host:1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RENDEZVOUS: must be file:///PATH"):
        launch(here)
    monkeypatch.delenv("RENDEZVOUS")
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun: all parties of a program must be on one"):
        launch(here)
    monkeypatch.setenv("RENDEZVOUS", f"file://{tmp_path / 'meeting'}")
    with pytest.raises(ConfigError, match="parties: 2, and 3 processes were started"):
        launch(here, parties=2)
    (tmp_path / "meeting.parties").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"must belong to this user alone \(mode 0700\)"):
        launch(here)
