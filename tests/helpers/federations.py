"""Small federations on made-up tables, for tests of whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
from helpers.patience import PATIENCE_S

ROWS = 240
KEYS = ["lon", "lat"]


def write_federation(
    folder: Path, *, secondaries: int = 2, rows: int = ROWS, **sections: dict[str, Any]
) -> Path:
    """Write tables and ``fed.toml`` to ``folder``; ``sections`` update those of the file.

    A model of another family takes the place of the default one, and so do privacy settings.

    The label depends on the primary's first feature and on every secondary's, and keys of one
    entity are nearly equal at all parties, so that the joint model has something to learn. Rows are
    split at random, as for the figures that are kept.
    """
    random = np.random.default_rng(7)
    keys = random.uniform(0, 10, (rows, len(KEYS)))
    own = random.normal(size=(rows, 3))
    theirs = [random.normal(size=(rows, 3)) for _ in range(secondaries)]
    signal = own[:, 0] + sum(table[:, 0] for table in theirs)
    parties = []
    for number, features in enumerate([own, *theirs]):
        name = f"bank-{number}" if number else "agency"
        order = random.permutation(rows) if number else np.arange(rows)
        noisy = keys + random.normal(scale=0.01, size=keys.shape)
        columns = {**dict(zip(KEYS, noisy.T, strict=True))}
        columns.update({f"x{axis}": features[:, axis] for axis in range(features.shape[1])})
        frame = pd.DataFrame(columns)
        if not number:
            frame["y"] = (signal > 0).astype(int) + (signal > 1.5)
        frame.iloc[order].to_csv(folder / f"{name}.csv", index=False)
        party = {"name": name, "role": "secondary", "data": f"{name}.csv", "key": KEYS}
        if not number:
            party |= {"role": "primary", "label": "y", "address": "127.0.0.1:0"}
        parties.append(party)
    source: dict[str, Any] = {
        "federation": {"name": "test", "task": "multiclass", "seed": 3},
        "model": {
            "family": "fet",
            "neighbours": 4,
            "hidden": 8,
            "heads": 2,
            "fourier_features": 8,
            "fourier_width": 8,
        },
        "training": {"epochs": 2, "batch_size": 32, "learning_rate": 5e-3, "split": "random"},
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {"protection": "none"},
        "runtime": {"join_timeout_s": PATIENCE_S, "round_timeout_s": PATIENCE_S},
        "party": parties,
    }
    for name, section in sections.items():
        if name == "privacy" or "family" in section:
            source[name] = section
        else:
            source[name] = {**source.get(name, {}), **section}
    return save(folder, source)


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
        "training": {"epochs": 2, "batch_size": 32, "labelled_rows": 60, "split": "random"},
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
    return save(folder, source)


def save(folder: Path, source: dict[str, Any]) -> Path:
    """Write a federation file."""
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


FROZEN = {
    "epsilon": 50.0,
    "delta": 1e-4,
    "encoder": "frozen",
    "unit": "secondary-record",
    "links_per_record": 2,
}
"""A sound promise for :func:`write_federation`; its parties then need declared bounds."""
