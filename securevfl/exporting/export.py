"""Export of each party's half of a trained network as ONNX or TorchScript, checked when written."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.config.federation import FederationConfig
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError
from securevfl.exporting.formats import FORMATS, Format
from securevfl.exporting.parts import NOT_PRIVATE, ExportedPart, part_of
from securevfl.federation.saved_model import FOLDER, load_model
from securevfl.version import __version__

TOLERANCE: Final = 1e-4
"""Largest difference to torch, relative to the largest number that is given, or to 1."""

# Numbers of rows that the traced example does not have, so that a fixed size is detected.
_CHECKED_ROWS: Final = (1, 7, 64)

_ALONE: Final = (
    "This is the joint model, which did not beat the primary alone and does not answer: "
    "securevfl predict answers by the best model of the primary alone, in base.skops."
)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One party's part, as it was written."""

    party: str
    """Party of the exported part."""
    role: str
    """``primary`` or ``secondary``."""
    path: Path
    """The model; its description is in ``.json`` of the same name."""
    difference: float
    """Largest absolute difference to torch on random rows."""
    allowed: float
    """Largest difference that was allowed: :data:`TOLERANCE` times the largest number given."""

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``--json``."""
        return {
            "party": self.party,
            "role": self.role,
            "path": str(self.path),
            "description": str(self.path.with_suffix(".json")),
            "difference": self.difference,
            "allowed": self.allowed,
            "private": self.role == "primary",
        }


def export_run(
    config: FederationConfig,
    run_folder: Path,
    *,
    party: str | None = None,
    kind: str = "onnx",
    out: Path | None = None,
) -> list[Exported]:
    """Export the saved models in a run folder.

    Args:
        config: The federation file.
        run_folder: Folder of the run that trained.
        party: Party whose part is written; None writes all parts.
        kind: ``"onnx"`` or ``"torchscript"``.
        out: Folder for the files; None: ``parties/NAME/export`` of the run.

    Returns:
        What was written, in the order of the federation file.

    Raises:
        ConfigError: If there is no model, it is damaged or of other settings, a package is missing,
            the part does not go into the format, or what was written computes something else.
        StorageError: If the disk takes no more.

    Reveals:
        Nothing leaves the machine. Whoever is given a secondary's file can compute what no promise
        covers: representations before noise and averaging.
    """
    checks.one_of(FORMATS, kind=kind)
    form = FORMATS[kind]
    if not config.family.learns_by_gradients:
        raise ConfigError(
            f"model.family: the halves of {config.family.name!r} hold models of scikit-learn, "
            f"which go into none of the formats; use securevfl predict, or serve"
        )
    form.require_installed()
    exported = []
    for name in _parties(config, run_folder, party):
        folder = run_folder / "parties" / name
        part = part_of(config, load_model(folder / FOLDER, config, party=name))
        place = folder / "export" if out is None else out
        files.require_writable_folder(place, what="folder of --out")
        exported.append(_write(config, part, form, place))
    return exported


def _parties(config: FederationConfig, run_folder: Path, party: str | None) -> Sequence[str]:
    if party is not None:
        if config.party(party).is_helper:
            raise ConfigError(f"--party {party}: only helps to link, and has no model")
        return [party]
    names = [
        table_party.name
        for table_party in config.table_parties
        if (run_folder / "parties" / table_party.name / FOLDER).exists()
    ]
    if not names:
        raise ConfigError(
            f"run folder {run_folder}: has no party's model; is it the folder of a finished run?"
        )
    return names


def _write(config: FederationConfig, part: ExportedPart, form: Format, folder: Path) -> Exported:
    model = part.model
    path = folder / f"{model.party}{form.suffix}"
    metadata = _file_metadata(config, part)
    data = form.write(part, metadata)
    difference, allowed = _compare_with_torch(part, form, data)
    read = form.read(part, data)
    description = {
        **metadata,
        "format": form.name,
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs": [port.as_json() for port in part.inputs if port.name in read],
        "outputs": [part.output.as_json()],
        "features": list(model.features),
        "schema": model.schema,
        "check": {
            "rows": list(_CHECKED_ROWS),
            "largest_difference": difference,
            "allowed": allowed,
        },
    }
    files.write_bytes(path, data)
    files.write_json(path.with_suffix(".json"), description)
    return Exported(
        party=model.party, role=model.role, path=path, difference=difference, allowed=allowed
    )


def _file_metadata(config: FederationConfig, part: ExportedPart) -> Mapping[str, Any]:
    """Return a file's metadata."""
    model = part.model
    metadata: dict[str, Any] = {
        "party": model.party,
        "role": model.role,
        "federation": config.federation.name,
        "model_digest": model.digest,
        "run": model.run,
        "family": model.family,
        "securevfl": __version__,
        "torch": str(torch.__version__),
        "task": config.federation.task,
    }
    if model.primary is None:
        metadata["warning"] = NOT_PRIVATE
    else:
        metadata["classes"] = None if model.primary.classes is None else list(model.primary.classes)
        metadata["used"] = model.primary.used
        if model.primary.used == "alone":
            metadata["note"] = _ALONE
        metadata["threshold"] = model.primary.threshold if part.output.shape[1:] == (2,) else None
    return metadata


def _compare_with_torch(part: ExportedPart, form: Format, data: bytes) -> tuple[float, float]:
    """Compare an exported file with torch on random rows.

    Raises:
        ConfigError: If they differ by more than rounding.
    """
    worst, largest = 0.0, 1.0
    for rows in _CHECKED_ROWS:
        inputs = part.sample(rows, seed=rows)
        wanted = part.compute(inputs)
        output = form.compute(part, data, inputs)
        if output.shape != wanted.shape or output.dtype != wanted.dtype:
            raise ConfigError(
                f"model of {part.model.party!r}: as {form.name} it gives {tuple(output.shape)} for "
                f"{rows} rows, and in torch {tuple(wanted.shape)}; its family keeps a batch's size"
            )
        difference = (output - wanted).abs()
        # A number that is not one is no small difference.
        worst = max(worst, float(difference.nan_to_num(nan=torch.inf).max()))
        largest = max(largest, float(wanted.abs().max()))
    if not worst <= TOLERANCE * largest:
        raise ConfigError(
            f"model of {part.model.party!r}: as {form.name} it differs from torch by {worst:.2g}, "
            f"more than {TOLERANCE * largest:.2g}; nothing was written"
        )
    return worst, TOLERANCE * largest
