"""Small federations of assisted boosting."""

from pathlib import Path
from typing import Any, Final

from securevfl.testing import write_federation

LINEAR: Final[dict[str, Any]] = {
    "family": "assist",
    "outputs": 3,
    "rounds": 2,
    "neighbours": 1,
    "estimator": "linear",
}
"""The fastest model that there is; :func:`write_federation` makes labels of three classes."""

TREES: Final[dict[str, Any]] = {**LINEAR, "estimator": "boosting", "trees": 3, "leaves": 4}


def write_assisted(folder: Path, *, rows: int = 120, **sections: dict[str, Any]) -> Path:
    """Write tables, and a file whose secondaries fit models of their own, linear by default."""
    given: dict[str, Any] = {
        "model": LINEAR,
        "training": {"batch_size": 32},
        **sections,
    }
    return write_federation(folder, rows=rows, **given)
