"""A primary that chooses its rows to find out whether one record is there, against real parties."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securevfl.config.reading import read_federation
from securevfl.core.errors import SecureVflError
from securevfl.core.progress import LinkedRowsCounted, LinksCounted, ProgressEvent, Warned
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.testing import save_federation

pytest.importorskip("rbcl")
pytestmark = pytest.mark.multiprocess

PEOPLE = [f"P{number:05d}" for number in range(400)]


def write(folder: Path, ids: list[str], *, epsilon: float) -> Path:
    """Write a bank that asks for these ids, and a lab of all people, under a promise."""
    folder.mkdir()
    random = np.random.default_rng(1)
    income = random.normal(size=len(PEOPLE))
    lab = pd.DataFrame({"id": PEOPLE, "income": income, "debt": random.normal(size=len(PEOPLE))})
    lab.to_csv(folder / "lab.csv", index=False)
    own = random.normal(size=(len(ids), 2))
    bank = pd.DataFrame({"id": ids, "own": own[:, 0], "y": own[:, 1]})
    bank.to_csv(folder / "bank.csv", index=False)
    bounds: dict[str, Any] = {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(
        folder,
        {
            "federation": {"name": "arrears", "task": "regression", "seed": 3},
            "model": {
                "family": "fet",
                "neighbours": 1,
                "hidden": 2,
                "heads": 1,
                "release": "pooled",
                "top": "additive",
                "keys_as_features": False,
            },
            "base": {"estimator": "none"},
            "encoder": {"method": "random", "layout": "sum"},
            "privacy": {
                "epsilon": epsilon,
                "delta": 1e-6,
                "encoder": "frozen",
                "links_per_record": 1,
            },
            "training": {"batch_size": 20, "epochs": 1},
            "linkage": {"protection": "psi", "metric": "exact", "choose": "records"},
            "party": [
                {
                    "name": "bank",
                    "role": "primary",
                    "data": "bank.csv",
                    "key": ["id"],
                    "label": "y",
                    "address": "127.0.0.1:0",
                },
                {"name": "lab", "role": "secondary", "data": "lab.csv", "key": ["id"], **bounds},
            ],
        },
    )


def attempt(path: Path, *, resume: bool = False) -> dict[str, Any]:
    """Run a federation; return all that its primary's side sees of the links, and how it ends."""
    events: list[ProgressEvent] = []
    seen: dict[str, Any] = {"error": None, "bytes": None}
    options = RunOptions(
        run_folder=path.parent / "run",
        data_root=path.parent,
        observe=events.append,
        resume=resume,
    )
    try:
        figures = train_in_processes(read_federation(path), options)
        seen["bytes"] = figures.bytes
    except SecureVflError as error:
        seen["error"] = type(error).__name__, str(error)
    seen["said"] = [one for one in events if isinstance(one, LinkedRowsCounted)]
    # The launcher shows the lab's own console too.
    seen["warned"] = [one for one in events if isinstance(one, Warned)]
    assert sum(isinstance(one, LinksCounted) for one in events) == 1
    return seen


def charges(path: Path, party: str) -> list[str]:
    """Return the kinds of lines that charge something in a party's ledger."""
    lines = (path.parent / f"{party}.csv.ledger.jsonl").read_text().splitlines()
    return [line["kind"] for line in map(json.loads, lines) if "epsilon" in line]


@pytest.mark.slow
def test_nineteen_invented_ids_and_a_suspect_tell_nothing_for_nothing(tmp_path: Path) -> None:
    """Member or stranger: the same end, the same warnings, and as many bytes, all of it charged.

    20 rows at epsilon 1 are too few to count: not even a noised number is sent.
    """
    seen, kinds = [], []
    for suspect in ("P00077", "Q99999"):
        path = write(tmp_path / suspect, [*(f"X{n:04d}" for n in range(19)), suspect], epsilon=1.0)
        seen.append(attempt(path))
        kinds.append(charges(path, "lab"))
    member, stranger = seen
    assert member["error"] is None
    assert member["said"] == []
    assert member == stranger
    assert kinds == [["charge"]] * 2


def test_a_run_ends_by_the_number_that_was_said_and_charged(tmp_path: Path) -> None:
    """Strangers alone: one sentence of the primary's, one charge each; resumed, the same number."""
    path = write(tmp_path / "strangers", [f"X{number:04d}" for number in range(120)], epsilon=100.0)
    first = attempt(path)
    assert "of the 120 rows are linked at lab" in first["error"][1]
    again = attempt(path, resume=True)
    assert (again["error"], again["said"]) == (first["error"], first["said"])
    assert [charges(path, name) for name in ("bank", "lab")] == [["link-count"]] * 2


def test_both_consoles_and_metrics_say_that_few_rows_are_linked(tmp_path: Path) -> None:
    folder = tmp_path / "few"
    path = write(
        folder, [*(f"P{n:05d}" for n in range(60)), *(f"X{n}" for n in range(60))], epsilon=100.0
    )
    events: list[ProgressEvent] = []
    options = RunOptions(run_folder=folder / "run", data_root=folder, observe=events.append)

    train_in_processes(read_federation(path), options)

    # The launcher shows the lab's own console too.
    doubts = {
        type(event): event.doubt
        for event in events
        if isinstance(event, LinkedRowsCounted | LinksCounted)
    }
    assert set(doubts) == {LinkedRowsCounted, LinksCounted}
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert all(
        "strip_zeros" in text for text in (*doubts.values(), metrics["linked_rows"]["lab"]["doubt"])
    )
