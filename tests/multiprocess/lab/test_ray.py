"""Whole runs on a Ray cluster of two nodes: the local pool's numbers, and workers that die."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from securevfl import read_federation
from securevfl.core.errors import ConfigError
from securevfl.lab.comparison import Comparison, compare_methods
from securevfl.lab.engine import Place, RunObservers
from securevfl.lab.on_ray import RayEngine
from securevfl.lab.one_run import LeftOut, Recipe, Run, RunFailure, Task
from securevfl.lab.study import StudyOptions, TableStore
from securevfl.testing import write_federation

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="securevfl[ray] is not installed", exc_type=ImportError
)
pytestmark = [
    pytest.mark.multiprocess,
    # Ray's own, of sockets and processes that it leaves to its garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
]

SMALL: dict[str, Any] = {
    "rows": 60,
    "secondaries": 1,
    "training": {"epochs": 1, "batch_size": 32},
    "methods": {"solo": {"epochs": 2}, "wide": {"family": "fet", "neighbours": 61}},
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes with a core each; all of their processes end with the module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        node = {"num_cpus": 1, "include_dashboard": False}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1)
            yield cluster.address
        finally:
            cluster.shutdown()


def without_times(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in one.items() if not name.endswith("seconds")}
        for one in results
    ]


def test_numbers_and_files_are_those_of_this_machine(tmp_path: Path, address: str) -> None:
    """What failed there is told; what was trained there is not trained again here."""
    path = write_federation(tmp_path, **SMALL)

    def plan(out: str, *methods: str) -> Comparison:
        return Comparison(
            config=read_federation(path),
            methods=methods,
            seeds=1,
            data_root=tmp_path,
            folder=tmp_path / out,
        )

    out: list[LeftOut] = []
    heard: set[str] = set()
    on_ray = compare_methods(
        plan("ray", "fet", "wide", "solo"),
        StudyOptions(
            engine="ray",
            address=address,
            tell=lambda run, _: heard.add(run.name),
            leave_out=out.append,
        ),
    )
    here = compare_methods(plan("here", "fet", "solo"))
    assert without_times(on_ray) == without_times(here)
    assert [(one.name, one.status) for one in out] == [("wide", "failed")]
    assert "fet" in heard
    folders = [tmp_path / name / "runs/fet/seed-3" for name in ("ray", "here")]
    names = [{str(one.relative_to(each)) for one in each.rglob("*")} for each in folders]
    assert names[0] == names[1] > {"result.json", "metrics.json", "federation.toml"}
    for name in ("predictions.csv", "federation.toml"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert compare_methods(plan("ray", "fet", "solo"), StudyOptions(tell=pytest.fail)) == on_ray


def test_a_worker_that_dies_is_replaced_once(tmp_path: Path, address: str) -> None:
    """Killed once, a run is done; killed twice, it is given up by name; the others go on."""
    path = write_federation(tmp_path, **SMALL)
    config, store = read_federation(path), TableStore(tmp_path)
    whole = store.by_digest[store.digest_for(config)]

    # Local, so that workers are sent the class itself and need not find this file.
    class Deadly(dict[str, Any]):
        """Tables that kill whoever takes them, so many times; a file counts."""

        deaths: Path
        most: int

        def __deepcopy__(self, memo: object) -> dict[str, Any]:
            import os
            import signal

            many = len(self.deaths.read_bytes())
            if many < self.most:
                self.deaths.write_bytes(b"x" * (many + 1))
                os.kill(os.getpid(), signal.SIGKILL)
            return dict(self)

    most = {"fet": 2, "solo": 1}
    tables = {name: Deadly(whole) for name in most}
    for name, deadly in tables.items():
        deadly.deaths, deadly.most = tmp_path / name, most[name]
        deadly.deaths.write_bytes(b"")
    tasks = [
        Task(
            run=Run(name=name, seed=seed),
            recipe=Recipe(source=config.source, method=name),
            digest="",
            tables=name,
        )
        for name, seed in (("fet", 3), ("fet", 4), ("solo", 3))
    ]
    done: list[Run] = []
    failed: list[tuple[Run, RunFailure]] = []
    hearing = RunObservers(
        tell=lambda _run, _event: None,
        done=lambda run, _: done.append(run),
        failed=lambda run, why: failed.append((run, why)),
    )
    place = Place(folder=tmp_path / "out", device="cpu", tables=tables)
    with closing(RayEngine(place, jobs=1, address=address, gpus_per_run=None)) as engine:
        assert engine.width == 1
        engine.train(tasks, hearing)
    assert {name: len((tmp_path / name).read_bytes()) for name in most} == most
    assert done == [tasks[2].run]
    ((run, why),) = failed
    assert run == tasks[0].run
    assert why.reason.startswith("seed 3: its Ray worker ended: ")


def test_what_the_cluster_lacks_is_one_line(tmp_path: Path, address: str) -> None:
    """No node with such a GPU; nobody at an address."""
    place = Place(folder=tmp_path, device="cuda", tables={})
    with pytest.raises(ConfigError, match=r"a run takes 0.5, and no node .* has more than 0"):
        RayEngine(place, jobs=None, address=address, gpus_per_run=0.5)
    with pytest.raises(ConfigError, match="address: Ray does not answer at nowhere"):
        RayEngine(place, jobs=None, address="nowhere", gpus_per_run=0.5)
