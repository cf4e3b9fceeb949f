"""``sv.train``: a federation between processes, from Python."""

from pathlib import Path

import pytest

import securevfl as sv
from securevfl.testing import write_federation

SMALL = {"secondaries": 1, "rows": 60, "training": {"epochs": 2, "batch_size": 32}}


@pytest.mark.multiprocess
def test_train_returns_what_the_simulation_does(tmp_path: Path) -> None:
    """One process a party: the same losses and history, and resuming a finished run reads it."""
    path = write_federation(tmp_path, **SMALL)
    simulated = sv.simulate(path)
    trained = sv.train(path, out=tmp_path / "run")

    def figures(run: sv.RunResult) -> list[list[object]]:
        return [[row[name] for name in ("epoch", "loss", "validation")] for row in run.history]

    # As close as the ring's steps let sums of float32 be; see test_simulated_equals_federated.py.
    assert trained.losses == pytest.approx(simulated.losses, abs=2**-14)
    assert len(figures(trained)) == len(figures(simulated)) == 2
    assert trained.metrics["peak_memory_bytes"].keys() == {"agency", "bank-1"}
    rounds = [
        [line["round"] for line in run.ledger if line["kind"] == "charge"]
        for run in (trained, simulated)
    ]
    assert rounds[0] == rounds[1]
    again = sv.train(path, out=tmp_path / "run", resume=True)
    assert (again.metrics, again.history) == (trained.metrics, trained.history)
