"""Options of a run and of a party's process, and checks of them before anything starts."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from securevfl.config.federation import FederationConfig, links_equal_ids
from securevfl.config.reading import read_federation
from securevfl.core import checks
from securevfl.core.column_names import keys_in_clear
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, unheard

if TYPE_CHECKING:
    # They bring pandas, and a party that only helps has no table.
    import pandas as pd

    from securevfl.data.tables import PartyTable
    from securevfl.federation.base import Base
    from securevfl.runtime.prediction_session import NamedRows

FederationSource = str | Path | FederationConfig
"""A federation: the path of its file, or what :func:`securevfl.read_federation` returned."""


def resolve_federation(
    federation: FederationSource, data_root: Path | None, *, only_linkage: bool = False
) -> tuple[FederationConfig, Path]:
    """Return a federation, read if it is a file, and the folder where relative paths start."""
    if isinstance(federation, FederationConfig):
        return federation, data_root or Path()
    path = Path(federation)
    return read_federation(path, only_linkage=only_linkage), data_root or path.parent


_CPU: Final = torch.device("cpu")
_WITH_BFLOAT16: Final = (8, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """Where and how a federation runs on this machine."""

    run_folder: Path
    """Gets the files that docs/run-folder.md lists."""
    data_root: Path = Path()
    """Where relative data paths start."""
    device: torch.device = _CPU
    """Where models and noise are computed, at every party."""
    resume: bool = False
    """Continue from the last epoch that was saved in ``run_folder``."""
    observe: Observer = unheard
    """Called with progress and warnings; an exception that it raises ends the run."""
    record_mib: float | None = None
    """MiB of what a party of this process receives and holds, which it records in its own folder
    for attacks on it; None records nothing."""
    base: Any = None
    """An estimator of scikit-learn, where the file's ``base.estimator`` is ``python``."""
    top: Any = None
    """The same where ``model.top`` is one from Python."""
    fitted_base: "Base | None" = None
    """The base of another run of the same table, seed and ``[base]``; taken if its rows were split
    alike."""

    def __post_init__(self) -> None:
        if self.record_mib is not None:
            checks.positive(record_views=self.record_mib)


def device_named(name: str) -> torch.device:
    """Return the torch device called ``name``.

    Raises:
        ConfigError: If it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(name) from None
    if device.type == "mps":
        raise ConfigError(
            "device: mps has no float64, in which a promise's bound on norms is kept; use "
            "--device cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise _no_device(name)
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= there:
            available = f"{there} of them, counted from 0" if there else "no GPU"
            raise ConfigError(
                f"device: {name} was asked for, and torch finds {available}; use --device cpu"
            )
    return device


def require_precision(config: FederationConfig, device: torch.device) -> None:
    """Refuse a precision that a GPU does not compute in.

    Raises:
        ConfigError: Naming the setting.
    """
    precisions = config.training.precision, config.pretraining.precision
    if "bfloat16" not in precisions or device.type != "cuda":
        return
    if torch.cuda.get_device_capability(device) < _WITH_BFLOAT16:
        raise ConfigError(
            f"training.precision: {torch.cuda.get_device_name(device)} does not compute in "
            f'bfloat16; write "float32", in [pretraining] too, or use --device cpu'
        )


def _no_device(name: str) -> ConfigError:
    return ConfigError(f'device: must be "cpu", "cuda" or a GPU such as "cuda:1", got {name!r}')


def warnings_about(config: FederationConfig) -> list[str]:
    """Return warnings about a federation file, one sentence each."""
    warnings = []
    if len(config.secondaries) == 1:
        warnings.append(
            "there is one secondary, so averaging hides nothing: only the noise protects it"
        )
    if config.privacy.mechanism == "none":
        warnings.append('privacy.mechanism = "none": no noise is added and nothing is promised')
    shown = keys_in_clear(config.linkage.protection, config.primary.key)
    if shown is not None:
        warnings.append(shown)
    if links_equal_ids(config):
        warnings.append(
            "rows are aligned where keys are equal, since the key is one number; write "
            "linkage.max_distance = 0.0 if it is an id, and else how far a true match may be"
        )
    if config.privacy.accounting == "as-published":
        warnings.append(
            'privacy.accounting = "as-published": the papers\' formula is not a guarantee'
        )
    return warnings


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictionJob:
    """The primary's new rows, and where their predictions go."""

    named: "NamedRows"
    out: Path
    without: tuple[str, ...] = ()
    """Secondaries that are absent."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function in a file, which all parties run together."""

    path: Path
    function: str
    digest: str
    """SHA-256 of the function's name and the file."""

    @classmethod
    def of(cls, path: Path, function: str = "program") -> "Program":
        """Return the program that a file has now.

        Raises:
            ConfigError: If there is no such file.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"program: {path}: {error.strerror}") from None
        digest = hashlib.sha256(function.encode() + b"\0" + content).hexdigest()
        return cls(path=path.resolve(), function=function, digest=digest)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartyJob(RunOptions):
    """The job of a party's process, with the options of its run."""

    config: FederationConfig
    name: str
    identity_folder: Path
    listen: str | None = None
    """Where the primary listens, if not at the address of the federation file."""
    serves: bool = False
    """Answer requests with the model that this party has kept, and do not train."""
    serves_on: bool = False
    """Wait for the next session when one has ended."""
    table: "PartyTable | None" = None
    """Its table, where it is in memory; None: the federation file says where it is."""
    frame: "pd.DataFrame | None" = None
    """Its table as it is, where the parties run a program."""
    with_alone: bool = True
    """Also find the local baseline, the primary's best model alone."""
    prediction: PredictionJob | None = None
    """New rows that the primary requests predictions for, where it serves."""
    program: Program | None = None
    """Program that all parties run together, where they do not train."""
    after_loss: bool = False
    """True if this party was in an earlier session of the run, which was lost or broken off."""
    may_be_second: bool = False
    """True if the session already had a party of this name when this one first called."""

    @property
    def returning(self) -> bool:
        """Whether the primary may still believe that this party is connected."""
        return self.resume or self.after_loss

    @property
    def join_timeout_s(self) -> float:
        """Seconds that all parties may take to join, or to come back after a loss.

        Whoever calls while one of its name is there waits until the primary would know that one
        for lost.
        """
        waits = self.config.waits
        if self.may_be_second:
            return waits.second_s
        return waits.return_s if self.after_loss else waits.join_s

    @property
    def folder(self) -> Path:
        """This party's own folder within the run folder."""
        return self.run_folder / "parties" / self.name
