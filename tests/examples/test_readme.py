"""What the README shows works as it stands there."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch

from securevfl.config.reading import read_federation
from securevfl.runtime.simulation import simulate_federation
from securevfl.runtime.tables import read_tables

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_federation_file_runs_and_keeps_its_epsilon(tmp_path: Path) -> None:
    """Only the number of epochs is changed: the file trains, and spends what it says."""
    random = np.random.default_rng(0)
    place = random.uniform(0, 1, (300, 2))
    rate = random.uniform(0, 1000, 300)
    rooms = random.integers(1, 6, 300)
    price = 100 * rooms + rate + random.normal(scale=10, size=300)
    columns = {"lon": place[:, 0], "lat": place[:, 1]}
    pd.DataFrame({**columns, "rooms": rooms, "price": price}).to_csv(
        tmp_path / "agency.csv", index=False
    )
    pd.DataFrame({**columns, "rate": rate}).to_csv(tmp_path / "rental.csv", index=False)
    source = tomllib.loads(block("toml"))
    source["training"]["epochs"] = 2
    path = tmp_path / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    config = read_federation(path)

    metrics = simulate_federation(
        config, read_tables(config, tmp_path), tmp_path / "run", device=torch.device("cpu")
    ).metrics

    assert metrics["metric"] == "rmse"
    assert metrics["privacy"]["epsilon"] == pytest.approx(8.0, rel=1e-3)
    assert metrics["privacy"]["epsilon"] <= 8.0


def test_the_python_lines_run() -> None:
    """The joint model beats solo without noise, and the budget prints the known epsilon."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block("python"), "README.md", "exec"), {})
    metrics, epsilon = printed.getvalue().splitlines()
    joint, solo = map(float, metrics.split())

    assert 0.7 < solo + 0.02 < joint < 0.99
    assert float(epsilon) == pytest.approx(25.206, abs=0.01)
