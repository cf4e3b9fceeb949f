"""A comparison in worker processes: Ctrl-C ends them all, and results do not depend on them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.federations import write_federation
from helpers.patience import PATIENCE_S

from securevfl.config.reading import read_federation
from securevfl.core.errors import DataError, SecureVflError
from securevfl.studies.compare import workers
from securevfl.studies.compare.comparison import Comparison, compare_methods
from securevfl.studies.compare.run import MethodRun

# Each spawns interpreters that load torch: seconds on an idle machine, minutes on a crowded one.
pytestmark = pytest.mark.multiprocess

SMALL = {"rows": 60, "secondaries": 1, "training": {"epochs": 1, "batch_size": 32}}


def plan_of(path: Path, *, out: str, seeds: int = 3) -> Comparison:
    return Comparison(
        config=read_federation(path),
        methods=("fet",),
        seeds=seeds,
        data_root=path.parent,
        folder=path.parent / out,
    )


def test_interrupted_workers_end_and_their_work_is_kept(tmp_path: Path) -> None:
    """As from a terminal: the signal reaches every process of the group at once."""
    path = write_federation(tmp_path, **SMALL)
    many = 500
    command = [sys.executable, "-m", "securevfl.cli.main", "compare", str(path)]
    command += ["--methods", "fet", "--seeds", str(many), "--jobs", "2"]
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("done 2/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    # Ends when nobody holds the pipe any more: the workers are gone too.
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "the same command goes on from there" in said
    assert said.splitlines()[-1] == "securevfl: interrupted"
    results = list((tmp_path / "out").rglob("result.json"))
    assert 2 <= len(results) < many
    by_worker = json.loads(results[0].read_text())
    path = write_federation(tmp_path, federation={"seed": by_worker["seed"]}, **SMALL)
    (here,) = compare_methods(plan_of(path, out="here", seeds=1))
    for figure in ("train", "validation", "test"):
        assert by_worker[figure] == here[figure]


def test_failure_of_a_worker_is_told_with_its_run(tmp_path: Path) -> None:
    """An error keeps its kind; a process that dies is named."""
    path = write_federation(tmp_path, **SMALL)
    plan = plan_of(path, out="out")
    job = workers.Job(
        source=plan.config.source, data_root=tmp_path, comparison=plan.folder, device="cpu"
    )
    runs = [(run, "") for run in plan.runs]

    def kill(run: MethodRun, event: Mapping[str, Any]) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    def ignore(run: MethodRun, event: Mapping[str, Any]) -> None:
        pass

    def train(tell: workers.Tell) -> None:
        workers.train_in_workers(job, runs, workers=1, tell=tell, done=pytest.fail)

    with pytest.raises(SecureVflError, match="fet, seed 3: its process ended with exit code -9"):
        train(kill)
    table = tmp_path / "bank-1.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(DataError, match=r"fet, seed 3: .*has 2 records"):
        train(ignore)
