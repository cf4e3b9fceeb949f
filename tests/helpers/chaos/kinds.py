"""The kinds of runs that are killed: tiny, and of every way in which something leaves a party."""

import tomllib
from pathlib import Path
from typing import Any, Final

from helpers.federations import FROZEN
from helpers.patience import SOON_S

from securevfl.testing import save_federation, write_federation

NAMES: Final = ("agency", "bank-1", "bank-2")
"""The parties of each; the first is the primary."""

_EPOCHS: Final = {"epochs": 3, "batch_size": 16}
_FITTED: Final[dict[str, Any]] = {
    "model": {"release": "pooled", "top": "additive", "hidden": 4},
    "encoder": {"method": "principal"},
}
_NETWORK: Final = {
    "projector": [8, 8, 8],
    "predictor": 8,
    "batch_size": 16,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "trained": {"training": _EPOCHS},
    "trained-noise": {
        "training": _EPOCHS,
        "privacy": {"epsilon": 20.0, "delta": 1e-4, "encoder": "trained"},
    },
    "frozen": {
        **_FITTED,
        "training": {"epochs": 2, "batch_size": 5},
        "privacy": {"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
    },
    "frozen-noise": {
        **_FITTED,
        "training": {"epochs": 2, "batch_size": 5},
        "privacy": {**FROZEN, "links_per_record": 1},
    },
    "dp-trained": {
        "model": {"release": "pooled"},
        "training": _EPOCHS,
        "privacy": {
            "epsilon": 40.0,
            "delta": 1e-4,
            "encoder": "dp-trained",
            "links_per_record": 2,
            "gradient_clip_norm": 0.5,
        },
    },
    "pretraining": {
        "model": {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8},
        "training": {"epochs": 2, "batch_size": 16, "labelled_rows": 30},
        "pretraining": {"iterations": 3, **_NETWORK},
    },
}
"""Sections of their federation files, by name."""

WITHOUT_NOISE: Final = frozenset({"trained", "frozen", "pretraining"})
"""These end with one model, bit for bit, whatever becomes of them on the way."""

ROWS: Final = 60


def write_kind(folder: Path, kind: str, *, on_loss: str) -> Path:
    """Write tables and the federation file of one kind."""
    runtime: dict[str, Any] = {"on_loss": on_loss, "wait_s": SOON_S}
    runtime |= {"join_timeout_s": SOON_S, "round_timeout_s": SOON_S}
    folder.mkdir(parents=True, exist_ok=True)
    path = write_federation(folder, rows=ROWS, **KINDS[kind], runtime=runtime)
    source = tomllib.loads(path.read_text())
    if source["privacy"]["encoder"] != "trained":
        for party in source["party"][1:]:
            party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def budget_of(kind: str) -> float | None:
    """Return the epsilon that the kind's federation file allows; None without noise."""
    epsilon: float | None = KINDS[kind].get("privacy", {}).get("epsilon")
    return epsilon


def ledgers_of(folder: Path) -> dict[str, Path]:
    """Return the ledgers of a federation's tables, by party."""
    return {name: folder / f"{name}.csv.ledger.jsonl" for name in NAMES}
