"""A small federation from a seed: the frames of its parties, and their files in a folder."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.formatting import toml_text

KEYS: Final = ("lon", "lat")
"""Key columns of every party."""

_FEATURES: Final = 3
_EXTENT: Final = 10.0
# Deviation of one party's keys of an entity.
_KEY_NOISE: Final = 0.01
_WAIT_S: Final = 300.0


def make_frames(
    *,
    secondaries: int = 2,
    rows: int = 240,
    seed: int = 7,
    shared_signal: bool = True,
    binary: bool = False,
) -> dict[str, pd.DataFrame]:
    """Return the frames of a small federation: ``agency``, then ``bank-1`` and so on.

    Each has the key columns ``lon`` and ``lat``, between 0 and 10, which are nearly equal for the
    same entity at all parties, and three standard normal features ``x0`` to ``x2``. ``agency`` is
    the primary and has the label ``y``; secondaries have their rows in another order.

    Args:
        secondaries: How many there are.
        rows: Rows of every frame.
        seed: Seed of all values.
        shared_signal: Whether the label depends on every party's ``x0``, or on the primary's alone.
        binary: Whether the label has two classes, 0 and 1, in place of three.
    """
    random = np.random.default_rng(seed)
    keys = random.uniform(0, _EXTENT, (rows, len(KEYS)))
    features = [random.normal(size=(rows, _FEATURES)) for _ in range(1 + secondaries)]
    signal = sum((table[:, 0] for table in features[1:]), np.zeros(rows)) if shared_signal else 0.0
    signal = features[0][:, 0] + signal
    frames = {}
    for number, values in enumerate(features):
        order = random.permutation(rows) if number else np.arange(rows)
        noisy = keys + random.normal(scale=_KEY_NOISE, size=keys.shape)
        columns = dict(zip(KEYS, noisy.T, strict=True))
        columns |= {f"x{axis}": column for axis, column in enumerate(values.T)}
        if not number:
            columns["y"] = (signal > 0).astype(int) + (0 if binary else signal > 1.5)
        frames[f"bank-{number}" if number else "agency"] = pd.DataFrame(columns).iloc[order]
    return frames


def write_federation(
    folder: Path,
    *,
    secondaries: int = 2,
    rows: int = 240,
    of_secondaries: Mapping[str, Any] = MappingProxyType({}),
    frames: Mapping[str, pd.DataFrame] | None = None,
    **sections: Mapping[str, Any],
) -> Path:
    """Write the tables of a small federation and ``fed.toml`` to a folder; return its path.

    Without changes the file says: FeT with few weights, two epochs, a random split, no base model,
    no noise and keys in the clear, so that a run takes about a second.

    Args:
        folder: Where the files go, which exists.
        secondaries: How many there are.
        rows: Rows of every table.
        of_secondaries: Settings of every secondary, for example ``{"scaling": "bounds", "bounds":
            [-5.0, 5.0]}``, which a promise asks for.
        frames: Tables by party, the primary's first, with the columns of :func:`make_frames`;
            default: those of :func:`make_frames`.
        **sections: Sections of the federation file, which update those above. ``privacy``, and one
            that names a ``family``, take their place.
    """
    made = frames or make_frames(secondaries=secondaries, rows=rows)
    parties: list[dict[str, Any]] = []
    for name, frame in made.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
        party = {"name": name, "role": "secondary", "data": f"{name}.csv", "key": list(KEYS)}
        if parties:
            party |= of_secondaries
        else:
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
        "training": {
            "epochs": 2,
            "batch_size": 32,
            "learning_rate": 5e-3,
            "split": "random",
            "validation_fraction": 0.1,
        },
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {"protection": "none"},
        "runtime": {"join_timeout_s": _WAIT_S, "round_timeout_s": _WAIT_S},
        "party": parties,
    }
    for name, section in sections.items():
        whole = name == "privacy" or "family" in section
        source[name] = section if whole else {**source.get(name, {}), **section}
    return save_federation(folder, source)


def save_federation(folder: Path, source: Mapping[str, Any]) -> Path:
    """Write ``source``, the sections of a federation file, to ``fed.toml``; return its path."""
    path = folder / "fed.toml"
    path.write_text(toml_text(source), encoding="utf-8")
    return path
