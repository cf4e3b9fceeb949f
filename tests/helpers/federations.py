"""A federation whose parties know the same people in part only, and a promise for small ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from helpers.patience import PATIENCE_S

from securevfl.testing import save_federation

ROWS = 240

COMMON_IDS = 100
"""Ids that all parties of :func:`write_overlapping` know."""


def write_overlapping(folder: Path, *, secondaries: int = 2, **sections: dict[str, Any]) -> Path:
    """Write a federation whose parties know the same people in part only, by whole-number ids.

    The primary has the ids 0 to 239. Every secondary has as many records: the ids 0 to 99, twenty
    of the primary's that no other secondary has, and strangers, whose ids are halves so that each
    has some row as its nearest. Column ``x0`` holds a thousandth of the id, at every party. Rows
    are split at random, as for the figures that are kept.
    """
    random = np.random.default_rng(11)
    ids = [np.arange(ROWS, dtype=np.float64)]
    for number in range(secondaries):
        own = COMMON_IDS + 20 * number + np.arange(20)
        strangers = np.arange(ROWS - COMMON_IDS - 20) * 2 + 0.5
        ids.append(random.permutation(np.concatenate([np.arange(COMMON_IDS), own, strangers])))
    parties = []
    for number, known in enumerate(ids):
        name = f"bank-{number}" if number else "agency"
        columns = {"id": known, "x0": known / 1000, "x1": random.normal(size=len(known))}
        if not number:
            columns["y"] = (columns["x1"] > 0).astype(np.float64)
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
        party: dict[str, Any] = {"name": name, "role": "secondary", "data": f"{name}.csv"}
        if not number:
            party |= {"role": "primary", "label": "y", "address": "127.0.0.1:0"}
        parties.append({**party, "key": ["id"], "scaling": "none"})
    source: dict[str, Any] = {
        "federation": {"name": "overlap", "task": "binary", "seed": 3},
        "model": {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8},
        "training": {
            "epochs": 2,
            "batch_size": 32,
            "labelled_rows": 60,
            "split": "random",
            "validation_fraction": 0.1,
        },
        "pretraining": {
            "iterations": 2,
            "batch_size": 32,
            "projector": [8, 8, 8],
            "predictor": 8,
        },
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {"protection": "none", "max_distance": 0.0},
        "runtime": {"join_timeout_s": PATIENCE_S, "round_timeout_s": PATIENCE_S},
        "party": parties,
    }
    for name, section in sections.items():
        whole = name == "linkage" or "family" in section
        source[name] = section if whole else {**source[name], **section}
    return save_federation(folder, source)


FROZEN = {
    "epsilon": 50.0,
    "delta": 1e-4,
    "encoder": "frozen",
    "unit": "secondary-record",
    "links_per_record": 2,
}
"""A sound promise for :func:`write_federation`; its parties then need declared bounds."""
