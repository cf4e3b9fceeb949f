"""Exported part of a party: its half of the network, with scaling and conversion of outputs.

B = rows of a batch, K = links of a row, S = secondaries, F = features, D = key dimension,
L and H = shape of the cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_bottom, build_top
from securevfl.federation.rounds.cut import Aggregation
from securevfl.federation.run_plan import kept_aggregation
from securevfl.federation.saved_model import SavedModel
from securevfl.models.alone.choice import mix_outputs
from securevfl.models.family import share_of_base
from securevfl.models.fitted_top import FittedTop, MixedTop

NOT_PRIVATE = (
    "NOT PRIVATE: this file gives representations of single records before noise and averaging. "
    "What left the party under its promise was clipped, noised and averaged; what this file gives "
    "is covered by no epsilon. Keep it and what it gives where the table is."
)
"""The warning of a secondary's exported part."""


@dataclass(frozen=True, kw_only=True)
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
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "what": self.what,
        }


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
            name="present",
            shape=("batch", links),
            dtype="bool",
            what="which slots hold a record; nearest records come first",
        ),
    ]
    return ExportedPart(
        model=model,
        module=SecondaryPart(_Scaling(model), bottom, aggregation, keys=table.key_dim > 0).eval(),
        inputs=tuple(inputs),
        output=Port(
            name="representation",
            shape=("batch", positions, width),
            dtype="float32",
            what=f"this party's clipped term of the average, before noise. {NOT_PRIVATE}",
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
            name="aggregate",
            shape=("batch", positions, width),
            dtype="float32",
            what="the average of the secondaries' terms; zeros where a row has no record anywhere",
        ),
    ]
    reads_similarities = config.family.needs_similarities(config.model)
    if reads_similarities:
        inputs.append(
            Port(
                name="similarities",
                shape=("batch", len(config.secondaries), config.model.neighbours),
                dtype="float32",
                what="scaled similarity of each link, secondaries in the order of the federation "
                "file; NaN where a slot holds no record",
            )
        )
    if part.base is not None:
        inputs.append(
            Port(
                name="base",
                shape=("batch", model.head.outputs),
                dtype="float32",
                what="margins of the base, which model/base.skops has: a standardised number, log "
                "odds, or log probabilities, which the joint model's are averaged with",
            )
        )
    if part.classes is None:
        output = Port(
            name="prediction", shape=("batch",), dtype="float64", what="in the label's unit"
        )
    else:
        output = Port(
            name="probabilities",
            shape=("batch", len(part.classes)),
            dtype="float64",
            what="of each class, in the order of classes",
        )
    return ExportedPart(
        model=model,
        module=PrimaryModule(
            _Scaling(model),
            top,
            model,
            keys=table.key_dim > 0,
            similarities=reads_similarities,
        ).eval(),
        inputs=tuple(inputs),
        output=output,
    )


def _features(model: SavedModel, *rows: str | int) -> Port:
    return Port(
        name="features",
        shape=(*rows, len(model.features)),
        dtype="float32",
        what="as the schema encodes columns; scaling is in the model",
    )


def _keys(table: PartyTable, *rows: str | int) -> list[Port]:
    if not table.key_dim:
        return []
    return [
        Port(
            name="keys",
            shape=(*rows, table.key_dim),
            dtype="float64",
            what="in the keys' own units; scaling is in the model",
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
