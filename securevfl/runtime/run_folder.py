"""The figures in a run folder: ``metrics.json``, ``history.csv`` and ``federation.toml``."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tomli_w

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.federation.epoch_lines import BY_ITSELF, VALIDATION
from securevfl.runtime.figures import RunFigures

_COUNTS = ("epoch", "bytes")
HISTORY_FIELDS = ("epoch", "loss", "train", "validation", "seconds", "epsilon", "bytes")

EXPLANATION: Final = "explanation.json"
"""What models make of links, for pictures: the primary's in the run folder, for others to read; a
secondary's in its own, for itself."""

OWN_FACTS: Final = "party.json"
"""What a secondary knows of its own part in a run, in its own folder, for its own page."""


def own_folders(folder: Path) -> list[Path]:
    """Return the folders of secondaries that can have a page of their own.

    Args:
        folder: A party's own, or a run's.
    """
    if (folder / OWN_FACTS).exists():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"parties/*/{OWN_FACTS}"))


def write_history(run_folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Write ``history.csv``: a row an epoch, with each of the validation rows' metrics.

    ``by_itself`` is the joint model's without its base.
    """
    of_validation = (VALIDATION, BY_ITSELF)
    metrics = dict.fromkeys(
        name for row in history for name in row if name.startswith(of_validation)
    )
    names = (*HISTORY_FIELDS, *metrics)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: row.get(name, "") for name in names} for row in history)
    files.write_text(run_folder / "history.csv", buffer.getvalue(), for_others=True)


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """Read ``history.csv``: one mapping an epoch, without what was not known.

    Raises:
        ConfigError: If the folder has none.
    """
    path = run_folder / "history.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [
                {name: _number(name, text) for name, text in row.items() if text}
                for row in csv.DictReader(file)
            ]
    except OSError:
        raise ConfigError(f"run folder {run_folder}: has no {path.name}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: was cut or changed ({error})") from None


def _number(name: str, text: str) -> float | int:
    return int(text) if name in _COUNTS else float(text)


def write_federation(run_folder: Path, config: FederationConfig) -> None:
    """Write ``federation.toml``: the settings that this run was made with."""
    files.write_text(
        run_folder / "federation.toml", tomli_w.dumps(dict(config.source)), for_others=True
    )


def write_explanation(
    folder: Path, explanation: Mapping[str, Any], *, for_others: bool = False
) -> None:
    """Write ``explanation.json`` if there is anything to explain.

    Args:
        folder: The run's for the primary, its own in it for a secondary.
        explanation: What a model tells.
        for_others: Whether others may read it, as they may a run's figures.
    """
    if explanation:
        files.write_json(folder / EXPLANATION, explanation, for_others=for_others)


def write_figures(run_folder: Path, figures: RunFigures) -> None:
    """Write ``metrics.json``: the last of a run's files, since it says that the run is finished."""
    files.write_json(run_folder / "metrics.json", figures.as_json(), for_others=True)


def read_figures(run_folder: Path) -> dict[str, Any]:
    """Read ``metrics.json``.

    Raises:
        ConfigError: If it is not that of a finished run, or lacks figures.
    """
    path = run_folder / "metrics.json"
    if not path.exists():
        raise ConfigError(f"run folder {run_folder}: has no {path.name}; is it a finished run?")
    figures = files.read_json(path)
    needed = {"metric", "test_metrics", "evaluation", "privacy", "alone", "ended", "rows"}
    missing = sorted(needed - set(figures))
    if missing:
        raise ConfigError(
            f"{path}: has no {missing[0]!r}; it is of another version, or no run's figures"
        )
    return figures
