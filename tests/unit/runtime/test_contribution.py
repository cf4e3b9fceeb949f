"""What each partner of a run is worth: from releases, from a simulation's models, or refused."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import FROZEN, save, write_federation

import securevfl as sv
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.runtime import coalitions
from securevfl.runtime.coalitions import CACHE
from securevfl.runtime.kept_contribution import FILE
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.tables import read_tables

PARTNERS = ("useful", "noise", "twin-1", "twin-2")
BLOCKS: dict[str, dict[str, Any]] = {
    "model": {"release": "pooled", "top": "additive", "hidden": 8, "neighbours": 1},
    "encoder": {"method": "random"},
    "training": {"epochs": 12, "patience": 12, "batch_size": 64, "learning_rate": 5e-3},
    "privacy": {"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
}


def partners(folder: Path, *, rows: int = 600, base: str = "none", **sections: Any) -> Path:
    """Write a regression whose label one partner knows, two know the same of, and one nothing."""
    path = write_federation(folder, secondaries=4, rows=rows, **{**BLOCKS, **sections})
    source = tomllib.loads(path.read_text())
    source["federation"]["task"] = "regression"
    source["base"] = {"estimator": base}
    random = np.random.default_rng(5)
    keys = np.arange(rows, dtype=np.float64)
    own, useful, shared, noise = (random.normal(size=(rows, 2)) for _ in range(4))
    label = own[:, 0] + 2 * useful[:, 0] + 2 * shared[:, 0] + 0.3 * random.normal(size=rows)
    theirs = dict(zip(PARTNERS, (useful, noise, shared, shared), strict=True))
    names = iter(PARTNERS)
    for party, features in zip(source["party"], (own, *theirs.values()), strict=True):
        frame = pd.DataFrame({"id": keys, "x0": features[:, 0], "x1": features[:, 1]})
        if party["role"] == "primary":
            frame["y"] = label
        else:
            party["name"] = next(names)
        party |= {"data": f"{party['name']}.csv", "key": ["id"]}
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
        frame.to_csv(folder / party["data"], index=False)
    return save(folder, source)


def run(path: Path, out: Path) -> RunResult:
    config = read_federation(path)
    return simulate_federation(
        config, read_tables(config, path.parent), out, device=torch.device("cpu"), with_solo=False
    )


def ledgers(out: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(out.rglob("*.jsonl"))}


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    """A frozen run in blocks without noise."""
    folder = tmp_path_factory.mktemp("blocks")
    result = run(partners(folder), folder / "run")
    return folder, result


def test_blocks_say_what_everybody_is_worth(blocks: tuple[Path, RunResult]) -> None:
    folder, result = blocks
    before = ledgers(folder / "run")
    found = sv.contribution(folder / "run", data_root=folder)

    assert ledgers(folder / "run") == before
    assert found.again is not None
    assert found.gone.all["rmse"].value == pytest.approx(result.metrics["test"], rel=1e-9)
    assert found.again.all == found.gone.all
    for worth in (found.gone, found.again):
        total = sum(one.shapley["rmse"].value for one in worth.partners.values())
        assert total == pytest.approx(worth.gain["rmse"].value)
        noise = worth.partners["noise"].shapley["rmse"].interval
        assert noise is not None
        assert noise[0] - 0.03 < 0 < noise[1] + 0.03
        useful = worth.partners["useful"].leave_one_out["rmse"]
        assert useful.interval is not None
        assert useful.interval[0] > 0.3
    again = found.again.partners
    # Without one twin the other one knows the same: nothing is lost, and yet each is worth half.
    for twin in ("twin-1", "twin-2"):
        assert again[twin].leave_one_out["rmse"].value < 0.1
        assert again[twin].shapley["rmse"].value > 0.2
    shares = [again[twin].shapley["rmse"].value for twin in ("twin-1", "twin-2")]
    assert shares[0] == pytest.approx(shares[1], rel=0.15)


def test_what_was_trained_again_is_kept(
    blocks: tuple[Path, RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = blocks
    first = sv.contribution(folder / "run", data_root=folder)
    kept = list((folder / "run" / "parties" / "agency" / CACHE).iterdir())
    assert len(kept) == 2**4 - 2
    kept[0].write_bytes(b"damaged")
    trained: list[int] = []
    whole = coalitions.build_primary
    monkeypatch.setattr(
        coalitions, "build_primary", lambda *a, **k: trained.append(1) or whole(*a, **k)
    )
    second = sv.contribution(folder / "run", data_root=folder)

    assert len(trained) == 1
    assert second.as_json() == first.as_json()
