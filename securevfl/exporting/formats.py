"""Formats of an exported part, ONNX and TorchScript, and execution of written files."""

import io
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from securevfl.core.errors import ConfigError, in_one_line, require_extra
from securevfl.exporting.parts import ExportedPart

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
