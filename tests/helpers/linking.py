"""Keys of two parties, and federation files that link them."""

from typing import Any

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.data.tables import KeyTable

BY_KEYS_ALONE = {"family": "avgsim", "neighbours": 4}
"""A model that takes no positions, so that keys may be texts."""


def linked_config(linkage: dict[str, Any], **sections: Any) -> FederationConfig:
    """Return a federation of ``agency`` and ``bank``; ``sections`` replace those of the file."""
    source = {
        "federation": {"name": "test", "task": "regression", "seed": 3},
        "model": {"family": "fet", "neighbours": 4, "hidden": 8, "heads": 2},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {key: value for key, value in linkage.items() if value is not None},
        "party": [
            {
                "name": "agency",
                "role": "primary",
                "data": "agency.csv",
                "key": ["lon", "lat"],
                "label": "y",
                "address": "127.0.0.1:0",
            },
            {"name": "bank", "role": "secondary", "data": "bank.csv", "key": ["lon", "lat"]},
        ],
        **sections,
    }
    return parse_federation(source, file="test", only_linkage=True)


def key_table(name: str, rows: int, *, seed: int) -> KeyTable:
    """Return points of a square of width 10."""
    points = np.random.default_rng(seed).uniform(0, 10, (rows, 2))
    return KeyTable(name=name, columns={"lon": points[:, 0].copy(), "lat": points[:, 1].copy()})


def text_table(name: str, rows: int, *, seed: int) -> KeyTable:
    """Return long words of which those of one row are alike at all parties."""
    letters = np.random.default_rng(0).integers(97, 123, (rows, 30))
    words = ["".join(map(chr, row)) for row in letters.tolist()]
    distorted = [f"{word[:seed]}x{word[seed + 1 :]}" for word in words]
    columns = {"lon": distorted, "lat": [word[:4] for word in words]}
    return KeyTable(
        name=name,
        columns={key: np.array(column, dtype=object) for key, column in columns.items()},
    )
