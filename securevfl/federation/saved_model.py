"""The model that a party takes home: its half of the network, and all that it needs to be used.

It lies in the party's own folder of a run, ``parties/NAME/model/``: the weights in
``weights.safetensors``, everything else and their hash in ``model.json``. With a base the primary
has it in ``base.skops``, ``base.safetensors`` or, an average of several, ``base.models``; and its
local baseline, where that is another model, in ``alone.*``. Where records choose their rows
(``privacy.links_per_record``) the primary keeps its keys of training too, in ``keys.json``: new
rows are linked beside them, so that records go on to choose as they did.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import safetensors.torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.checks import strict_json
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.data.scaling import FeatureScaler, KeyScaler, LabelScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import SimilarityScale
from securevfl.models.alone.choice import Model, Used
from securevfl.models.alone.saving import model_bytes, model_of
from securevfl.models.tasks import HALF, TaskHead
from securevfl.version import __version__

FORMAT: Final = 11
"""Format number of the files that this program writes, and the only one that it reads."""

FOLDER: Final = "model"
_DESCRIPTION: Final = "model.json"
_Kind = TypeVar("_Kind")
_WEIGHTS: Final = "weights.safetensors"
_KEYS: Final = "keys.json"
_MOST_LEVELS: Final = 32
_ENDINGS: Final = {"estimator": "skops", "network": "safetensors", "average": "models"}


@dataclass(frozen=True, kw_only=True)
class PrimaryPart:
    """What only the primary's model has."""

    head: TaskHead
    """The task."""
    classes: tuple[Any, ...] | None
    """The label of each class number; None for regression."""
    label_scaler: LabelScaler | None
    """Brings a regression's predictions back to the label's unit."""
    threshold: float = HALF
    """Above which probability a row counts as one of the second class, of two."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics on the test rows of training."""
    rows: int
    """Rows of the training table."""
    base: Model | None = None
    """Model whose outputs the top model's are added to; None where there is no base."""
    alone: Model | None = None
    """The best model of the primary alone; None where there is no base."""
    scale: float = 1.0
    """lambda: what the top model's outputs are multiplied by before they are added to the base."""
    used: Used = "joint"
    """Who answers."""
    keys: KeyTable | None = None
    """Keys of all rows of the training table, whichever part they were in, where there is a cap on
    a record's links; None without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Described:
    """What a model's description holds as it is."""

    party: str
    role: Literal["primary", "secondary"]
    federation: str
    """The federation's name."""
    digest: str
    """:attr:`FederationConfig.model_digest` of the file that it was trained under."""
    run: str
    """Id of the run that trained it."""
    family: str
    settings: dict[str, Any]
    """The family's, as the federation file says them."""
    features: tuple[str, ...]
    """Names of its inputs, in order."""
    schema: dict[str, Any] | None
    """How columns of a table become these inputs; None for a table that was made in Python."""
    key_scale: KeyScaler | None
    """How keys are scaled for models; None for texts."""
    similarity_scale: SimilarityScale | None
    """Scale of similarities, where this party makes them."""
    noise_share_std: float
    """``tau`` of training, in the units of the representation."""
    ledger_head: str
    """The head of the party's ledger when the model was kept."""
    version: str = __version__


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedModel(Described):
    """One party's model as it was at the end of training."""

    feature_scaler: FeatureScaler
    weights: Mapping[str, Tensor] = field(repr=False)
    primary: PrimaryPart | None = None

    @property
    def primary_part(self) -> PrimaryPart:
        """The part that the primary's model alone has.

        Raises:
            ConfigError: If the model is a secondary's.
        """
        if self.primary is None:
            raise ConfigError(f"model of {self.party!r}: is a secondary's, and the primary answers")
        return self.primary

    @property
    def head(self) -> TaskHead:
        """The task, of a primary's model."""
        return self.primary_part.head

    def into(self, model: nn.Module) -> None:
        """Load the weights into a model of the same family and settings.

        Raises:
            ConfigError: If they do not fit.
        """
        try:
            model.load_state_dict(dict(self.weights))
        except RuntimeError:
            raise ConfigError(
                f"model of {self.party!r}: its weights do not fit {self.family!r} as the "
                f"federation file sets it and as this table's columns ask for it; restore both"
            ) from None

    def save(self, folder: Path) -> None:
        """Write it, for this user alone; what was there before is replaced.

        Raises:
            StorageError: If the disk takes no more.
        """
        # Copies: tensors that share memory, as tied weights do, are refused otherwise.
        own = {name: value.detach().cpu().clone() for name, value in self.weights.items()}
        weights = safetensors.torch.save({name: value.contiguous() for name, value in own.items()})
        files.write_bytes(folder / _WEIGHTS, weights)
        description: dict[str, Any] = {
            "format": FORMAT,
            **_description_of(self, Described),
            "feature_scaler": self.feature_scaler.as_json(),
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        part = self.primary
        if part is not None:
            plain = _description_of(part, _PlainPart)
            description["primary"] = {
                **plain,
                "lambda": plain.pop("scale"),
                "label_scaler": None if part.label_scaler is None else part.label_scaler.as_json(),
                "keys": None,
                "base": _write_model(folder, "base", part.base),
                "alone": None
                if part.alone is part.base
                else _write_model(folder, "alone", part.alone),
            }
            if part.keys is not None:
                keys = _as_json(part.keys)
                files.write_bytes(folder / _KEYS, keys)
                description["primary"]["keys"] = hashlib.sha256(keys).hexdigest()
        # Last: with it the folder holds a model.
        files.write_json(folder / _DESCRIPTION, description)


def load_model(folder: Path, config: FederationConfig, *, party: str) -> SavedModel:
    """Read a party's model, and check that it is whole and of this federation.

    Args:
        folder: ``RUN/parties/NAME/model``.
        config: The federation file that it is to be used under.
        party: Whose it must be.

    Raises:
        ConfigError: If there is none, a file is damaged or of another version, or the model is of
            another party, or of other settings.
    """
    path = folder / _DESCRIPTION
    try:
        text = files.read_text(path)
    except FileNotFoundError:
        raise ConfigError(
            f"model {folder}: there is none; a run keeps it when its training has ended"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be read ({error})") from None
    try:
        content = strict_json(text, depth=_MOST_LEVELS)
        header = content["format"], content["version"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"model {path}: is damaged; restore it from a copy") from None
    if header[0] != FORMAT:
        raise ConfigError(
            f"model {path}: is of format {header[0]!r}, written by securevfl {header[1]}; this "
            f"program, {__version__}, reads format {FORMAT}. Train again, or use that version"
        )
    weights = _bytes_of(folder / _WEIGHTS, content.get("weights"))
    try:
        model = _model_of(content, folder, safetensors.torch.load(weights))
    except ConfigError:
        raise  # it names the file that is damaged
    except Exception:  # noqa: BLE001 - whatever its formats' readers meet in a file that is damaged
        raise ConfigError(f"model {path}: is damaged; restore it from a copy") from None
    if model.party != party:
        raise ConfigError(f"model {folder}: is that of {model.party!r}, not of {party!r}")
    if model.federation != config.federation.name:
        raise ConfigError(
            f"model {folder}: is of the federation {model.federation!r}, and the federation file "
            f"is that of {config.federation.name!r}"
        )
    if model.digest != config.model_digest:
        raise ConfigError(
            f"model {folder}: was trained under other settings than the federation file has now; "
            f"only [prediction], [runtime], [methods], linkage.most_keys, addresses and identities "
            f"may change. Take federation.toml of its run"
        )
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlainPart:
    """What it holds of a :class:`PrimaryPart` as it is, ``lambda`` by another name."""

    head: TaskHead
    classes: tuple[str | bool | int | float, ...] | None
    threshold: float
    metrics: dict[str, float | None]
    rows: int
    scale: float
    used: Used


def _description_of(model: Any, kind: type[Any]) -> dict[str, Any]:
    """Return those fields of a model that ``kind`` has, as JSON takes them."""
    values = {name: getattr(model, name) for name in kind.__annotations__}
    return {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in values.items()
    }


def _bytes_of(path: Path, digest: object) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"model {path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise ConfigError(f"model {path}: is damaged; restore it from a copy")
    return data


def _model_of(
    content: Mapping[str, Any], folder: Path, weights: Mapping[str, Tensor]
) -> SavedModel:
    plain = _parse_description(
        Described, {name: content[name] for name in Described.__annotations__}, folder
    )
    part = content.get("primary")
    return SavedModel(
        **{name: getattr(plain, name) for name in Described.__annotations__},
        feature_scaler=FeatureScaler.from_json(content["feature_scaler"]),
        weights=weights,
        primary=None if part is None else _primary_part(part, folder, plain.party),
    )


def _parse_description(kind: type[_Kind], about: Mapping[str, Any], folder: Path) -> _Kind:
    """Return what a description says, each field of its own type.

    Raises:
        ConfigError: Naming the file and the field.
    """
    try:
        return read_settings(kind, about, where="it")
    except ConfigError as error:
        raise ConfigError(
            f"model {folder / _DESCRIPTION}: is damaged ({error}); restore it from a copy"
        ) from None


def _primary_part(part: Mapping[str, Any], folder: Path, party: str) -> PrimaryPart:
    named = {name: part[name] for name in _PlainPart.__annotations__ if name != "scale"}
    plain = _parse_description(_PlainPart, {**named, "scale": part["lambda"]}, folder)
    scaler, head = part["label_scaler"], plain.head
    base = None if part["base"] is None else _read(folder, part["base"], head)
    return PrimaryPart(
        **{name: getattr(plain, name) for name in _PlainPart.__annotations__},
        label_scaler=None if scaler is None else LabelScaler.from_json(scaler),
        keys=None if part["keys"] is None else _keys_of(folder / _KEYS, part["keys"], party),
        base=base,
        alone=base if part["alone"] is None else _read(folder, part["alone"], head),
    )


def _write_model(folder: Path, name: str, model: Model | None) -> dict[str, Any] | None:
    """Write a model of the primary alone, and return what describes its file."""
    if model is None:
        return None
    content, about = model_bytes(model)
    file = f"{name}.{_ENDINGS[about['kind']]}"
    files.write_bytes(folder / file, content)
    return {**about, "file": file, "sha256": hashlib.sha256(content).hexdigest()}


def _read(folder: Path, about: Mapping[str, Any], head: TaskHead) -> Model:
    """Read what :func:`_write_model` has written."""
    path = folder / Path(about["file"]).name
    content = _bytes_of(path, about["sha256"])
    try:
        return model_of(content, about, head)
    except ConfigError as error:
        raise ConfigError(f"model {path}: {error}") from None
    except Exception as error:
        # skops raises whatever an estimator's own loading does.
        raise ConfigError(f"model {path}: is damaged; restore it from a copy") from error


def _as_json(keys: KeyTable) -> bytes:
    columns = [
        {"name": name, "kind": "text", "cells": list(cells)}
        if cells.dtype == object
        else {
            "name": name,
            "kind": "number",
            "cells": [None if math.isnan(cell) else cell for cell in cells.tolist()],
        }
        for name, cells in keys.columns.items()
    ]
    return json.dumps(columns).encode()


def _keys_of(path: Path, digest: str, party: str) -> KeyTable:
    key_columns = strict_json(_bytes_of(path, digest), depth=3)
    columns = {}
    for column in key_columns:
        cells = np.array(column["cells"], dtype=object)
        texts = column["kind"] == "text"
        if cells.ndim != 1 or not all(
            cell is None or isinstance(cell, str) is texts for cell in cells
        ):
            raise ValueError("a cell is of another kind than its column")
        columns[str(column["name"])] = cells if texts else cells.astype(np.float64)
    if len({len(cells) for cells in columns.values()}) != 1:
        raise ValueError("columns are not equally long")
    return KeyTable(name=party, columns=columns)
