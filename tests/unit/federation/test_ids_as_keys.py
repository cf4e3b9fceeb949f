"""Ids link and are no inputs: a model of them would learn how the file was made."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securevfl import read_federation
from securevfl.data.frames import from_frame
from securevfl.federation.base import own_inputs
from securevfl.runtime.run_tables import table_warnings
from securevfl.testing import read_tables, run_in_process, save_federation

ROWS = 400


def federation(folder: Path, keys: dict[str, Any], **model: Any) -> Path:
    """Write two tables in which the id of a row, and nothing else, tells its label."""
    random = np.random.default_rng(3)
    frame = pd.DataFrame({**keys, "x0": random.normal(size=ROWS)})
    trace = np.argsort(np.argsort(next(iter(keys.values()))))
    labelled = frame.assign(y=trace / ROWS + 0.05 * random.normal(size=ROWS))
    order = random.permutation(ROWS)
    labelled.iloc[order].to_csv(folder / "agency.csv", index=False)
    other = pd.DataFrame({**keys, "z0": random.normal(size=ROWS)})
    other.iloc[random.permutation(ROWS)].to_csv(folder / "bank.csv", index=False)
    source: dict[str, Any] = {
        "federation": {"name": "ids", "task": "regression", "seed": 1},
        "model": {"family": "top1sim", **model},
        "training": {"epochs": 1},
        "privacy": {"mechanism": "none"},
        "linkage": {"protection": "none", "max_distance": 0.0},
        "party": [
            {"name": "agency", "role": "primary", "label": "y", "address": "127.0.0.1:0"},
            {"name": "bank", "role": "secondary"},
        ],
    }
    for party in source["party"]:
        party |= {"data": f"{party['name']}.csv", "key": list(keys)}
    return save_federation(folder, source)


def ids(count: int = ROWS) -> np.ndarray:
    """Return ids of five digits in order, with gaps."""
    return np.sort(np.random.default_rng(8).permutation(90_000)[:count] + 10_000)


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "an id": ({"id": ids()}, {}, 1),
    "an id, asked for": ({"id": ids()}, {"keys_as_features": True}, 2),
    "a place": ({"lon": ids() / 1000, "lat": ids()[::-1] / 1000}, {}, 3),
    "a place in whole metres": ({"east": ids(), "north": ids()[::-1]}, {}, 3),
    "an age": ({"age": ids() % 40}, {}, 2),
    "days": ({"day": pd.date_range("2000-01-01", periods=ROWS).astype(str)}, {}, 2),
}


@pytest.mark.parametrize("name", KEYS)
def test_ids_alone_are_left_out(tmp_path: Path, name: str) -> None:
    """Places and times are what they are; an id is an input only where somebody asks for it."""
    keys, model, width = KEYS[name]
    config = read_federation(federation(tmp_path, keys, **model))
    table = read_tables(config, tmp_path)["agency"]
    assert own_inputs(table).values.shape == (ROWS, width)
    assert table.key_dim == len(keys)  # it links all the same


@pytest.mark.parametrize(("keys", "warned"), [("an id", True), ("a place", False)])
def test_a_family_that_reads_places_warns_of_ids(tmp_path: Path, keys: str, warned: bool) -> None:
    """FeT encodes where keys lie, which of ids is nowhere."""
    path = federation(tmp_path, KEYS[keys][0])
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    config = read_federation(save_federation(tmp_path, {**source, "model": {"family": "fet"}}))
    table = read_tables(config, tmp_path)["agency"]
    said = " ".join(table_warnings(config, config.primary, table))
    assert ("reads keys as places" in said) == warned


@pytest.mark.parametrize("asked", [False, True])
def test_a_baseline_does_not_learn_how_the_file_was_made(tmp_path: Path, asked: bool) -> None:
    """Ids in the order of the labels: without them own columns tell nothing (R2 0), with them all.

    New rows are read as those of training, however few they are.
    """
    path = federation(tmp_path, {"id": ids()}, **({"keys_as_features": True} if asked else {}))
    config = read_federation(path)
    tables = read_tables(config, tmp_path)
    run = run_in_process(config, tmp_path / "run", tables=tables, with_alone=True)
    assert run.metrics["alone"]["metrics"]["r2"] == pytest.approx(0.9 if asked else 0, abs=0.15)
    rows = pd.read_csv(tmp_path / "agency.csv").drop(columns="y")
    predicted = run.predict(rows)
    few = run.predict(rows.head(3))
    assert few.values == pytest.approx(predicted.values[:3], abs=1e-5)


def test_frames_are_read_alike() -> None:
    """A table of Python's with an id has the same inputs; few whole numbers are no ids."""
    frame = pd.DataFrame({"id": ids(30), "x": np.arange(30.0), "y": np.arange(30.0)})
    table = from_frame(frame, name="agency", key=["id"], label="y")
    assert own_inputs(table).values.shape == (30, 1)
    few = from_frame(frame.head(10), name="agency", key=["id"], label="y")
    assert own_inputs(few).values.shape == (10, 2)
