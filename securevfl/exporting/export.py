"""Export of each party's half of a trained network as ONNX or TorchScript, checked when written."""

import hashlib
import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError, in_one_line, require_extra
from securevfl.exporting.parts import NOT_PRIVATE, ExportedPart, part_of
from securevfl.federation.saved_model import FOLDER, load_model
from securevfl.version import __version__

_EXAMPLE_ROWS: Final = 5
_OPSET: Final = 17


class Format(ABC):
    """A file format of models."""

    name: ClassVar[str]
    """Name of the format for ``--format``."""
    suffix: ClassVar[str]
    """Suffix of its files."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Optional packages that the format needs."""

    def require_installed(self) -> None:
        """Refuse if a package is missing.

        Raises:
            ConfigError: Saying how to install it.
        """
        require_extra(*self.needs, use=f"--format {self.name}")

    def write(self, part: ExportedPart, metadata: Mapping[str, Any]) -> bytes:
        """Return the file of a part.

        Args:
            part: What is written.
            metadata: What the file says of itself.

        Raises:
            ConfigError: If the part does not go into this format.
        """
        with _quiet(), _blame_part(part, f"can't be written as {self.name}"):
            return self._write(part, metadata)

    def compute(self, part: ExportedPart, data: bytes, inputs: Sequence[Tensor]) -> Tensor:
        """Return the output of the written file for inputs.

        Raises:
            ConfigError: If it can't be run.
        """
        with _quiet(), _blame_part(part, f"can't be run as {self.name}"):
            return self._compute(part, data, inputs)

    @abstractmethod
    def read(self, part: ExportedPart, data: bytes) -> tuple[str, ...]:
        """Return the names of the inputs that the written file reads."""

    @abstractmethod
    def _write(self, part: ExportedPart, metadata: Mapping[str, Any]) -> bytes: ...

    @abstractmethod
    def _compute(self, part: ExportedPart, data: bytes, inputs: Sequence[Tensor]) -> Tensor: ...


class Onnx(Format):
    """ONNX, through torch's exporter of traced programs.

    The newer exporter of torch takes minutes where this one takes a second, keeps the number of
    rows of inputs that are not read, and has no stable sort.
    """

    name = "onnx"
    suffix = ".onnx"
    needs = ("onnx", "onnxruntime")

    def read(self, part: ExportedPart, data: bytes) -> tuple[str, ...]:
        """Return the names of the inputs that the graph reads."""
        del part
        return tuple(graph_input.name for graph_input in _session(data).get_inputs())

    def _write(self, part: ExportedPart, metadata: Mapping[str, Any]) -> bytes:
        import onnx

        buffer = io.BytesIO()
        ports = (*part.inputs, part.output)
        with torch.no_grad():
            torch.onnx.export(
                part.module,
                part.sample(_EXAMPLE_ROWS, seed=0),
                buffer,  # type: ignore[arg-type]  # its hint is of the newer exporter
                dynamo=False,
                opset_version=_OPSET,
                input_names=[port.name for port in part.inputs],
                output_names=[part.output.name],
                dynamic_axes={port.name: {0: "batch"} for port in ports},
            )
        model = onnx.load_from_string(buffer.getvalue())
        model.doc_string = part.output.what
        for name, value in metadata.items():
            text = value if isinstance(value, str) else json.dumps(value)
            model.metadata_props.add(key=name, value=text)
        data: bytes = model.SerializeToString()
        return data

    def _compute(self, part: ExportedPart, data: bytes, inputs: Sequence[Tensor]) -> Tensor:
        session = _session(data)
        read = {graph_input.name for graph_input in session.get_inputs()}
        fed = {
            port.name: values.numpy()
            for port, values in zip(part.inputs, inputs, strict=True)
            if port.name in read
        }
        return torch.from_numpy(session.run([part.output.name], fed)[0])


class TorchScript(Format):
    """A traced torch program, for programs that have torch and not this package."""

    name = "torchscript"
    suffix = ".pt"

    def read(self, part: ExportedPart, data: bytes) -> tuple[str, ...]:
        """Return all inputs: they are given by place."""
        del data
        return tuple(port.name for port in part.inputs)

    def _write(self, part: ExportedPart, metadata: Mapping[str, Any]) -> bytes:
        with torch.no_grad():
            traced = torch.jit.trace(
                part.module, part.sample(_EXAMPLE_ROWS, seed=0), check_trace=False
            )
        buffer = io.BytesIO()
        extra = {"securevfl.json": json.dumps(metadata)}
        torch.jit.save(traced, buffer, _extra_files=extra)
        return buffer.getvalue()

    def _compute(self, part: ExportedPart, data: bytes, inputs: Sequence[Tensor]) -> Tensor:
        del part
        with torch.no_grad():
            out: Tensor = torch.jit.load(io.BytesIO(data))(*inputs)
            return out


FORMATS: Final[Mapping[str, Format]] = {form.name: form for form in (Onnx(), TorchScript())}
"""Every format by its name."""


def _session(data: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; warnings are of its own optimiser
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns that tracing is old, and of every shape that it takes for a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _blame_part(part: ExportedPart, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"model of {part.model.party!r}: family {part.model.family!r} {what}: "
            f"{in_one_line(error)[:400]}"
        ) from error


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
    exported, models = [], list(run_folder.glob(f"parties/*/{FOLDER}/*"))
    for name in _parties(config, run_folder, party):
        folder = run_folder / "parties" / name
        part = part_of(config, load_model(folder / FOLDER, config, party=name))
        place = folder / "export" if out is None else out
        for file in (place / f"{name}{form.suffix}", place / f"{name}.json"):
            files.output_path(file, [*models, run_folder / "federation.toml"])
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
