"""The run folder: figures, history, contributions and saved models."""

import csv
import io
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tomli_w

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.rounds.primary import BY_ITSELF, VALIDATION
from securevfl.federation.saved_model import FOLDER, KeptModel, load_model
from securevfl.runtime.figures import RunFigures

# The figures in a run folder: ``metrics.json``, ``history.csv`` and ``federation.toml``.

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


def run_folder_for(config: FederationConfig, out: Path | None, *, resume: bool = False) -> Path:
    """Return the run folder: the one that was asked for, or a new one under ``runs/``.

    Raises:
        ConfigError: If a run is to go on, and there is none.
    """
    if resume and out is None:
        raise ConfigError("--resume: needs --out RUN, the folder of the run that should go on")
    if resume and out is not None and not (out / "parties").is_dir():
        raise ConfigError(f"run folder {out}: holds no run to go on with; run without --resume")
    if out is not None:
        return out
    return Path("runs") / f"{config.federation.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def federation_of_run(run_folder: Path, federation: Path | None) -> FederationConfig:
    """Read the federation file of a run, or the one that replaces it.

    Args:
        run_folder: Of a run, with its ``federation.toml``.
        federation: Another file, for settings that have changed since; None: the run's own.

    Raises:
        ConfigError: If the folder has no such file, or a setting is wrong.
    """
    path = run_folder / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run_folder}: has no federation.toml; is it the folder of a finished run?"
        )
    return read_federation(path)


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


# What was measured of a run's partners: the file in the run folder.

FILE: Final = "contribution.json"

FORMAT: Final = 1
"""Of the file that this program writes, and the only one that it reads."""


def read_contribution(run_folder: Path, *, run: str) -> dict[str, Any] | None:
    """Read ``contribution.json``; None if there is none, or it is of another run or version.

    Args:
        run_folder: Where it lies.
        run: The run's id.
    """
    path = run_folder / FILE
    if not path.exists():
        return None
    found = files.read_json(path)
    if found.get("format") != FORMAT or found.get("run") != run:
        return None
    return found


def write_contribution(run_folder: Path, measured: Mapping[str, Any]) -> None:
    """Write ``contribution.json``.

    Raises:
        StorageError: If the disk takes no more.
    """
    files.write_json(run_folder / FILE, {"format": FORMAT, **measured}, for_others=True)


# A run whose parties have kept their models: where these lie, and the parties' tables.


class TemporaryFolder:
    """A run folder that is removed when nobody can predict with it any more, or Python ends.

    ``tempfile.TemporaryDirectory`` warns when it is left to that, and a result in memory always is.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="securevfl-"))
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove it now."""
        self._removal()

    def __getstate__(self) -> dict[str, bytes]:
        """Return what is in it: another process has other folders, and this one may go before."""
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }

    def __setstate__(self, contents: Mapping[str, bytes]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, content in contents.items():
            files.write_bytes(self.path / name, content)


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptRun:
    """Where the models of a run lie, and where its parties' tables are."""

    config: FederationConfig
    """The federation file."""
    place: Path | TemporaryFolder
    """The run folder."""
    data_root: Path = field(default_factory=Path)
    """Where relative data paths start."""
    tables: Mapping[str, PartyTable] | None = field(default=None, repr=False)
    """The parties' tables by name, where they are in memory; None: they are read."""
    device: str = "cpu"
    """``"cpu"`` or ``"cuda"``, where parties compute."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place.path if isinstance(self.place, TemporaryFolder) else self.place

    def model(self, party: str) -> KeptModel:
        """Read a party's model.

        Raises:
            ConfigError: As :func:`securevfl.federation.saved_model.load_model`.
        """
        return load_model(self.folder / "parties" / party / FOLDER, self.config, party=party)
