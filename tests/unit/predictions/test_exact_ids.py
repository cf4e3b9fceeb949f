"""Ids of many digits link right when new rows are predicted, whatever file holds them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from securevfl.config.reading import parse_federation
from securevfl.runtime.entry import simulate
from securevfl.runtime.trained_run import predict

ROWS = 200
FIRST = 4_000_000_000_000_001


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_new_rows_with_ids_of_sixteen_digits_find_their_records(
    tmp_path: Path, suffix: str
) -> None:
    """The label is the record's own number: rows linked to neighbours would be told another."""
    random = np.random.default_rng(0)
    ids, told = FIRST + random.permutation(ROWS), random.normal(size=ROWS)
    order = random.permutation(ROWS)
    primary = pd.DataFrame({"id": ids, "own": random.normal(size=ROWS), "y": told > 0})
    tables = {
        "shop": primary[:150],
        "bank": pd.DataFrame({"id": ids[order], "told": 10 * np.sign(told[order])}),
        "new": primary[150:].drop(columns="y"),
    }
    for name, frame in tables.items():
        path = tmp_path / f"{name}.{suffix}"
        frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    party = {"key": ["id"], "scaling": "standard"}
    config = parse_federation(
        {
            "federation": {"name": "ids", "task": "binary"},
            "model": {"family": "top1sim", "hidden": 8, "keys_as_features": False},
            "training": {"epochs": 25, "batch_size": 32, "learning_rate": 0.02},
            "base": {"estimator": "none"},
            "privacy": {"mechanism": "none"},
            "linkage": {"metric": "exact", "protection": "none"},
            "party": [
                {
                    **party,
                    "name": "shop",
                    "role": "primary",
                    "data": f"shop.{suffix}",
                    "label": "y",
                    "address": "127.0.0.1:0",
                },
                {**party, "name": "bank", "role": "secondary", "data": f"bank.{suffix}"},
            ],
        },
        file="ids.toml",
    )
    run = tmp_path / "run"
    simulate(config, out=run, data_root=tmp_path)
    found = predict(
        run,
        tmp_path / f"new.{suffix}",
        federation=config,
        out=tmp_path / "found.csv",
        id_column="id",
        data_root=tmp_path,
    )
    right = found.values == np.array(told[150:] > 0, dtype=found.values.dtype)
    assert right.mean() > 0.9
    assert [int(name) for name in found.rows] == ids[150:].tolist()
