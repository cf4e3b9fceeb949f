"""A server whose other parties are processes: one is killed, said to be gone, and taken back."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from fastapi.testclient import TestClient
from helpers.patience import PATIENCE_S
from helpers.shown_token import HEADERS, TOKEN

from securevfl import read_federation
from securevfl.core.files import read_json, write_json
from securevfl.launch.spawn import Launch
from securevfl.ledger.countersigning import SERVED_ROWS
from securevfl.ledger.ledger_file import ledger_of_table
from securevfl.runtime.entry import simulate
from securevfl.runtime.trained_run import trained_run
from securevfl.serving.server import ServerSettings, application, open_model
from securevfl.testing import write_federation

pytestmark = pytest.mark.multiprocess


NAMES = ("agency", "bank-1", "bank-2")


def lines_of(folder: Path, name: str) -> list[dict]:
    """Return a table's ledger, less a line that is being written."""
    content = ledger_of_table(folder / f"{name}.csv").read_text()
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


def points(folder: Path, name: str) -> list[str]:
    return [line["point"] for line in lines_of(folder, name) if line["kind"] == "countersigned"]


def until(true: Callable[[], bool]) -> None:
    waited, late = threading.Event(), time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < late
        waited.wait(0.05)


def pids_of(launch: Launch) -> dict[str, int]:
    return {party.name: party.pid for party in list(launch.parties)}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_secondary_is_said_to_be_gone_and_taken_back(tmp_path: Path) -> None:
    path = write_federation(
        tmp_path, rows=60, training={"epochs": 1}, runtime={"silence_timeout_s": 30.0}
    )
    run = tmp_path / "run"
    simulate(path, out=run)
    # What training between processes would have left: models and tables are the same.
    figures = read_json(run / "metrics.json")
    write_json(run / "metrics.json", {**figures, "mode": "federated"})
    row = pd.read_csv(tmp_path / "agency.csv").iloc[0].drop("y").to_dict()
    config = read_federation(run / "federation.toml")
    said: list[str] = []
    with open_model(
        trained_run(run, federation=config, data_root=tmp_path),
        observe=lambda event: said.append(str(event)),
    ) as model:
        assert model.processes is not None
        with TestClient(application(model, TOKEN, ServerSettings()), headers=HEADERS) as client:

            def predicted() -> int:
                return client.post("/predict", json={"row": row}).status_code

            # Who is not there yet is said to be gone.
            assert predicted() == 503
            until(lambda: client.get("/ready").status_code == 200)
            assert [predicted(), predicted()] == [200, 200]
            killed = pids_of(model.processes)["bank-1"]
            os.kill(killed, signal.SIGKILL)
            until(lambda: client.get("/ready").status_code == 503)
            gone = client.post("/predict", json={"row": row})
            assert (gone.status_code, gone.json()["error"]) == (503, "party_gone")
            assert client.get("/health").json() == {"live": True, "ready": False}
            until(lambda: client.get("/ready").status_code == 200)
            assert predicted() == 200
            pids = pids_of(model.processes)
            assert pids["bank-1"] != killed
            # Long served: all sign while nobody asks, and the session goes on.
            many = client.post("/predict", json={"rows": [row] * SERVED_ROWS})
            assert many.status_code == 200
            until(lambda: all("served" in points(tmp_path, name) for name in NAMES))
            assert predicted() == 200
    assert not any(alive(pid) for pid in pids.values())
    assert any("bank-1" in line and "SIGKILL" in line for line in said)
    for name in NAMES:
        charged = [line["rows"] for line in lines_of(tmp_path, name) if line["kind"] == "charge"]
        assert sum(charged) == 4 + SERVED_ROWS
        assert points(tmp_path, name)[-3:] == ["start", "served", "end"]
