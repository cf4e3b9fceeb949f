"""Export of each party's half of a trained network as ONNX or TorchScript, checked when written."""

import hashlib
import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError, in_one_line, require_extra
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_bottom, build_top
from securevfl.federation.rounds.cut import Aggregation
from securevfl.federation.run_plan import kept_aggregation
from securevfl.federation.saved_model import FOLDER, SavedModel, load_model
from securevfl.models.alone.choice import mix_outputs
from securevfl.models.family import share_of_base
from securevfl.models.fitted_top import FittedTop, MixedTop
from securevfl.runtime.run_tables import schema_of
from securevfl.version import __version__

NOT_PRIVATE = (
    "NOT PRIVATE: this file gives representations of single records before noise and averaging. "
    "What left the party under its promise was clipped, noised and averaged; what this file gives "
    "is covered by no epsilon. Keep it and what it gives where the table is."
)
"""The warning of a secondary's exported part."""


@dataclass(frozen=True)
class Port:
    """An input or an output of a part."""

    name: str
    """Name of the input or output."""
    shape: tuple[str | int, ...]
    """Its sizes; ``"batch"`` is any number of rows."""
    dtype: Literal["float32", "float64", "bool"]
    """Type of its numbers."""
    what: str
    """Content, in words."""

    def as_json(self) -> dict[str, Any]:
        """Return the port for the description file."""
        return {**asdict(self), "shape": list(self.shape)}


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportedPart:
    """A party's half, ready to be written."""

    model: SavedModel
    """The saved model."""
    module: nn.Module
    """Computes the output from the inputs, in evaluation."""
    inputs: tuple[Port, ...]
    """Its inputs, in order."""
    output: Port
    """Output of the part."""

    def sample(self, rows: int, *, seed: int) -> tuple[Tensor, ...]:
        """Return random inputs about as large as those of training, with empty slots."""
        random = np.random.default_rng(seed)
        scale = self.model.feature_scaler
        made: list[np.ndarray] = []
        for port in self.inputs:
            shape = tuple(rows if size == "batch" else int(size) for size in port.shape)
            values: np.ndarray = random.normal(size=shape)
            if port.name == "features":
                values = scale.centre + scale.width * values
            elif port.name == "keys" and self.model.key_scale is not None:
                values = np.array(self.model.key_scale.centre) + values * np.array(
                    self.model.key_scale.width
                )
            elif port.name == "present":
                # The last row has no record at all.
                values = random.random(shape) < 0.8
                values[-1] = False
            elif port.name == "similarities":
                values[random.random(shape) < 0.2] = np.nan
            made.append(values.astype(port.dtype))
        return tuple(torch.from_numpy(values) for values in made)

    def compute(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the output, by torch."""
        with torch.no_grad():
            out: Tensor = self.module(*inputs)
            return out


def part_of(config: FederationConfig, model: SavedModel) -> ExportedPart:
    """Return the exported part of a party's saved model.

    Args:
        config: The federation file.
        model: The party's model.

    Raises:
        ConfigError: If the weights do not fit the family.
    """
    keys = 0 if model.key_scale is None else len(model.key_scale.centre)
    names = tuple(f"key {axis}" for axis in range(keys))
    table = PartyTable(
        name=model.party,
        key_names=names,
        keys=np.zeros((1, keys)),
        feature_names=model.features,
        features=np.zeros((1, len(model.features)), dtype=np.float32),
        schema=None if model.schema is None else schema_of(model),
    )
    if model.role == "secondary":
        return _secondary(config, model, table)
    return _primary(config, model, table)


def _secondary(config: FederationConfig, model: SavedModel, table: PartyTable) -> ExportedPart:
    aggregation = kept_aggregation(config, noise_share_std=model.noise_share_std)
    bottom = build_bottom(config, config.party(model.party), table)
    model.into(bottom)
    links = config.model.neighbours
    positions, width = config.family.cut_shape(config.model)
    inputs = [
        _features(model, "batch", links),
        *_keys(table, "batch", links),
        Port(
            "present",
            ("batch", links),
            "bool",
            "which slots hold a record; nearest records come first",
        ),
    ]
    return ExportedPart(
        model=model,
        module=SecondaryPart(_Scaling(model), bottom, aggregation, keys=table.key_dim > 0).eval(),
        inputs=tuple(inputs),
        output=Port(
            "representation",
            ("batch", positions, width),
            "float32",
            f"this party's clipped term of the average, before noise. {NOT_PRIVATE}",
        ),
    )


def _primary(config: FederationConfig, model: SavedModel, table: PartyTable) -> ExportedPart:
    part = model.primary_part
    top = build_top(config, table, model.head)
    model.into(top)
    if isinstance(top, MixedTop) and not top.share:
        top = top.tied
    if isinstance(top, FittedTop | MixedTop) and config.top is not None:
        raise ConfigError(
            f'model.top: "{config.top.name}" is an estimator of scikit-learn, which is no network '
            f"to export; take --party for the secondaries' parts, and securevfl predict or serve "
            f"for predictions"
        )
    positions, width = config.family.cut_shape(config.model)
    inputs = [
        _features(model, "batch"),
        *_keys(table, "batch"),
        Port(
            "aggregate",
            ("batch", positions, width),
            "float32",
            "the average of the secondaries' terms; zeros where a row has no record anywhere",
        ),
    ]
    reads_similarities = config.family.needs_similarities(config.model)
    if reads_similarities:
        inputs.append(
            Port(
                "similarities",
                ("batch", len(config.secondaries), config.model.neighbours),
                "float32",
                "scaled similarity of each link, secondaries in the order of the federation "
                "file; NaN where a slot holds no record",
            )
        )
    if part.base is not None:
        inputs.append(
            Port(
                "base",
                ("batch", model.head.outputs),
                "float32",
                "margins of the base, which model/base.skops has: a standardised number, log "
                "odds, or log probabilities, which the joint model's are averaged with",
            )
        )
    if part.classes is None:
        output = Port("prediction", ("batch",), "float64", "in the label's unit")
    else:
        output = Port(
            "probabilities",
            ("batch", len(part.classes)),
            "float64",
            "of each class, in the order of classes",
        )
    return ExportedPart(
        model=model,
        module=PrimaryModule(
            _Scaling(model), top, model, keys=table.key_dim > 0, similarities=reads_similarities
        ).eval(),
        inputs=tuple(inputs),
        output=output,
    )


def _features(model: SavedModel, *rows: str | int) -> Port:
    return Port(
        "features",
        (*rows, len(model.features)),
        "float32",
        "as the schema encodes columns; scaling is in the model",
    )


def _keys(table: PartyTable, *rows: str | int) -> list[Port]:
    if not table.key_dim:
        return []
    return [
        Port(
            "keys",
            (*rows, table.key_dim),
            "float64",
            "in the keys' own units; scaling is in the model",
        )
    ]


class _Scaling(nn.Module):
    """Scalers of the saved model, in float64 as in training."""

    def __init__(self, model: SavedModel) -> None:
        super().__init__()
        scaler, keys = model.feature_scaler, model.key_scale
        self.limit = scaler.limit
        self.centre: Tensor
        self.width: Tensor
        self.key_centre: Tensor
        self.key_width: Tensor
        self.register_buffer("centre", torch.from_numpy(scaler.centre))
        self.register_buffer("width", torch.from_numpy(scaler.width))
        for name, values in (
            ("key_centre", () if keys is None else keys.centre),
            ("key_width", () if keys is None else keys.width),
        ):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))

    def features(self, features: Tensor) -> Tensor:
        """Return scaled features."""
        scaled = (features.double() - self.centre) / self.width
        if self.limit is not None:
            scaled = scaled.clamp(-self.limit, self.limit)
        return scaled.float()

    def keys(self, keys: Tensor) -> Tensor:
        """Return scaled keys."""
        return ((keys - self.key_centre) / self.key_width).float()


class SecondaryPart(nn.Module):
    """Scaling, the bottom model, the clip, and the mean over slots where rows are pooled."""

    def __init__(
        self, scaling: _Scaling, bottom: nn.Module, aggregation: Aggregation, *, keys: bool
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.bottom = bottom
        self.aggregation = aggregation
        self.has_keys = keys

    def forward(self, features: Tensor, *rest: Tensor) -> Tensor:
        """Return this party's term of the average, shape (B, L, H)."""
        *keys, present = rest
        there = present.unsqueeze(-1)
        scaled = self.scaling.features(features).masked_fill(~there, 0.0)
        if self.has_keys:
            places = self.scaling.keys(keys[0]).masked_fill(~there, 0.0)
        else:
            places = scaled[..., :0]
        out: Tensor = self.bottom(scaled, places, present)
        return self.aggregation.term(self.aggregation.clip(out))


class PrimaryModule(nn.Module):
    """Scaling, the top model, and the conversion of its outputs."""

    def __init__(
        self,
        scaling: _Scaling,
        top: nn.Module,
        model: SavedModel,
        *,
        keys: bool,
        similarities: bool,
    ) -> None:
        super().__init__()
        part = model.primary_part
        self.scaling = scaling
        self.top = top
        self.task = part.head.task
        self.label = part.label_scaler
        self.has_keys = keys
        self.has_similarities = similarities
        self.has_base = part.base is not None
        self.scale = part.scale
        self.of_base = share_of_base(top)

    def forward(self, features: Tensor, *rest: Tensor) -> Tensor:
        """Return predictions in the label's unit, or the probability of each class."""
        others = list(rest)
        own = self.scaling.features(features)
        keys = self.scaling.keys(others.pop(0)) if self.has_keys else own[..., :0]
        aggregate = others.pop(0)
        similarities = others.pop(0) if self.has_similarities else None
        outputs: Tensor = self.top(own, keys, aggregate, similarities)
        if self.has_base:
            base = others.pop(0)
            outputs = mix_outputs(base, self.of_base * base + outputs, self.scale)
        outputs = outputs.double()
        if self.label is not None:
            return outputs[:, 0] * self.label.deviation + self.label.mean
        if self.task == "binary":
            second = torch.sigmoid(outputs[:, 0])
            return torch.stack([1 - second, second], dim=1)
        return torch.softmax(outputs, dim=1)


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
            **asdict(self),
            "path": str(self.path),
            "description": str(self.path.with_suffix(".json")),
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
