"""The demo's federation: real handwritten digits, split between five parties by FeT's protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from securevfl.data.builtin import load_builtin
from securevfl.data.partition import split_table
from securevfl.data.tables import PartyTable

PARTIES = ("clinic", "lab-a", "lab-b", "lab-c", "lab-d")
"""The primary, then the secondaries."""


def digits_tables(*, seed: int) -> list[PartyTable]:
    """Return the tables of the five parties; ``entities`` tells the true matches."""
    digits = load_builtin("digits")
    return split_table(digits.X, digits.y, parties=len(PARTIES), seed=seed, names=PARTIES)


def write_tables(tables: Sequence[PartyTable], folder: Path) -> None:
    """Write each party's table as ``NAME.csv``; labels are called ``y``, truth ``entity``."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        frame = pd.DataFrame(
            {
                **dict(zip(table.key_names, table.keys.T, strict=True)),
                **dict(zip(table.feature_names, table.features.T, strict=True)),
                "entity": table.entities,
            }
        )
        if table.labels is not None:
            frame["y"] = np.asarray(table.classes)[table.labels]
        frame.to_csv(folder / f"{table.name}.csv", index=False)


def digits_federation(
    *, seed: int, model: dict[str, Any], training: dict[str, Any], privacy: dict[str, Any]
) -> dict[str, Any]:
    """Return the federation file of the demo as a mapping, for ``tables`` next to it."""
    keys = [f"key_{axis}" for axis in range(4)]
    parties = [
        {
            "name": name,
            "role": "secondary" if number else "primary",
            "data": f"tables/{name}.csv",
            "key": keys,
            # Pixels count ink from 0 to 16: bounds that are known without looking at the data.
            "scaling": "bounds",
            "bounds": [0.0, 16.0],
            **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
        }
        for number, name in enumerate(PARTIES)
    ]
    return {
        "federation": {"name": "digits", "task": "multiclass", "seed": seed},
        "model": {"family": "fet", **model},
        "training": training,
        "privacy": privacy,
        "linkage": {"metric": "euclidean", "protection": "none", "truth": "entity"},
        "party": parties,
    }


def demo_federation(*, seed: int, fast: bool) -> dict[str, Any]:
    """Return the demo's federation file."""
    return digits_federation(
        seed=seed,
        model={"neighbours": 4, "hidden": 64, "release": "pooled", "frozen_map": "linear"},
        training={
            "epochs": 5 if fast else 60,
            "batch_size": 64,
            "learning_rate": 2e-3,
            "patience": 20,
        },
        privacy={
            "mechanism": "gaussian",
            "epsilon": 32.0,
            "delta": 1e-5,
            "unit": "secondary-record",
            "encoder": "frozen",
            "links_per_record": 4,
        },
    )
