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
from helpers import warm
from helpers.patience import PATIENCE_S

from securevfl import read_federation
from securevfl.lab.comparison import Comparison, compare_methods
from securevfl.lab.one_run import LeftOut, Recipe, Run, StudyOptions, Task, train_tasks
from securevfl.lab.study_outputs import TableStore
from securevfl.testing import write_federation

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


@pytest.mark.slow
@pytest.mark.full_fits  # as in interpreters that are spawned
def test_interrupted_workers_end_and_their_work_is_kept(tmp_path: Path) -> None:
    """As from a terminal: the signal reaches every process of the group at once."""
    path = write_federation(tmp_path, **SMALL)
    many = 500
    command = [sys.executable, "-m", "securevfl.cli.main", "lab", "compare", str(path)]
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
    assert "the same command resumes from there" in said
    assert said.splitlines()[-1] == "securevfl: interrupted"
    results = list((tmp_path / "out").rglob("result.json"))
    assert 2 <= len(results) < many
    by_worker = json.loads(results[0].read_text())
    path = write_federation(tmp_path, federation={"seed": by_worker["seed"]}, **SMALL)
    (here,) = compare_methods(plan_of(path, out="here", seeds=1))
    for figure in ("train", "validation", "test"):
        assert by_worker[figure] == here[figure]


def test_failure_of_a_worker_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose process dies is begun once more; then its method is given up, and others go on."""
    # Forked from a process that has loaded all; the test below spawns them, as users do.
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: warm.warm_context())
    path = write_federation(tmp_path, **SMALL)
    plan = plan_of(path, out="out")
    store = TableStore(tmp_path)
    tables = store.digest_for(plan.config)
    order = (("fet", 3), ("fet", 4), ("solo", 3))
    tasks = [
        Task(
            run=Run(name=method, seed=seed),
            recipe=Recipe(source=plan.config.source, method=method),
            digest="",
            tables=tables,
        )
        for method, seed in order
    ]
    killed: list[int | None] = []

    def kill(run: Run, event: Mapping[str, Any]) -> None:
        for process in multiprocessing.active_children():
            if process.pid not in killed:
                killed.append(process.pid)
                process.kill()

    # One worker, so that runs begin one after the other.
    monkeypatch.setattr(StudyOptions, "in_other_processes", True)
    done, failed = train_tasks(
        tasks,
        folder=plan.folder,
        device="cpu",
        tables=store.by_digest,
        options=StudyOptions(tell=kill),
    )
    assert list(done) == [tasks[2].run]
    assert [failure.name for failure in failed.values()] == ["fet"]
    assert failed["fet"].reason == "its process ended with exit code -9"
    assert len(killed) == 2
    assert not multiprocessing.active_children()


def test_failures_are_told_alike_by_workers_and_here(tmp_path: Path) -> None:
    """A table that is too small for a method's K: that one is left out, the others have figures."""
    path = write_federation(tmp_path, **SMALL)
    table = tmp_path / "bank-1.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))
    config = read_federation(path)
    for jobs in (1, 2):
        plan = Comparison(
            config=config,
            methods=("fet", "solo", "combine"),
            seeds=1,
            data_root=tmp_path,
            folder=tmp_path / f"out-{jobs}",
        )
        out: list[LeftOut] = []
        (result,) = compare_methods(plan, StudyOptions(jobs=jobs, leave_out=out.append))
        assert result["name"] == "solo"
        combine, fet = sorted(out, key=lambda one: one.name)
        assert (combine.name, combine.status) == ("combine", "skipped")
        assert combine.reason.startswith("needs linkage.truth")
        assert (fet.name, fet.status) == ("fet", "failed")
        assert fet.reason.startswith("seed 3: table of 'bank-1': has 2 records")
