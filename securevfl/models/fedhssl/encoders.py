"""FedHSSL's settings and encoders: a perceptron, with embeddings of categorical columns or not.

Each has a bottom, which never leaves its party, and a top, whose weights parties may average
(partial model aggregation): equal settings give equal tops, for any features of a party.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.family import Step
from securevfl.models.layers import LayerNorm


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """One categorical variable among a table's feature columns.

    It is stored either as one column of whole numbers from 0 (few bytes for large vocabularies), or
    as one 0/1 column for each category, which may be scaled: the largest entry marks the category.
    The code ``categories`` stands for "replaced", which no record has; with one column for each
    category, equal entries stand for it.
    """

    places: tuple[int, ...]
    """Feature columns that hold it: one, or as many as there are categories."""

    categories: int
    """Different values."""

    def __post_init__(self) -> None:
        checks.at_least(1, categories=self.categories)
        if not self.places or len(self.places) not in (1, self.categories):
            raise ConfigError(
                f"places must be one column or one for each of {self.categories} categories, "
                f"got {len(self.places)}"
            )

    @property
    def one_hot(self) -> bool:
        """Whether there is one column a category."""
        return len(self.places) > 1

    def codes(self, features: Float[Tensor, "rows features"]) -> Int[Tensor, " rows"]:
        """Return each row's category number; a value outside the vocabulary is "replaced"."""
        if self.one_hot:
            own = features[:, list(self.places)]
            chosen = own.argmax(dim=1)
            replaced = own.amin(dim=1) == own.amax(dim=1)
        else:
            chosen = features[:, self.places[0]].round().long()
            replaced = (chosen < 0) | (chosen >= self.categories)
        return torch.where(replaced, self.categories, chosen)


def one_hot_columns(feature_names: Sequence[str]) -> tuple[CategoricalColumn, ...]:
    """Return the categorical columns of a table with one-hot columns named ``name=value``.

    A name with a single such column stays a number: one 0/1 column holds all its information.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(feature_names):
        if "=" in name:
            places.setdefault(name.split("=", 1)[0], []).append(place)
    return tuple(CategoricalColumn(tuple(own), len(own)) for own in places.values() if len(own) > 1)


def continuous_places(num_features: int, columns: Sequence[CategoricalColumn]) -> tuple[int, ...]:
    """Return the feature columns that belong to no categorical column.

    Raises:
        ConfigError: If a column is out of range, or belongs to two categorical ones.
    """
    taken = [place for column in columns for place in column.places]
    if len(set(taken)) < len(taken):
        raise ConfigError("columns: a feature column belongs to two categorical ones")
    if not all(0 <= place < num_features for place in taken):
        raise ConfigError(f"columns: must lie in 0 to {num_features - 1}")
    return tuple(sorted(set(range(num_features)) - set(taken)))


Norm = Literal["batch", "layer", "none"]


class Encoder(nn.Module):
    """A party's encoder, from a record to a vector."""

    def __init__(self, bottom: nn.Module, top: nn.Module, width: int) -> None:
        super().__init__()
        self.bottom = bottom
        """Bottom layers, which stay with the party."""
        self.top = top
        """Top layers, which may be averaged over parties."""
        self.width = width
        """H, width of the output."""

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return one representation for each row."""
        outputs: Tensor = self.top(self.bottom(features))
        return outputs


class EmbeddedColumns(nn.Module):
    """Replaces each categorical column by an embedding; numbers pass through."""

    def __init__(
        self, num_features: int, columns: Sequence[CategoricalColumn], *, width: int
    ) -> None:
        super().__init__()
        self.columns = tuple(columns)
        places = torch.tensor(continuous_places(num_features, columns), dtype=torch.int64)
        self.continuous: Tensor
        # A buffer on the model's device: a list would be copied there in every step.
        self.register_buffer("continuous", places, persistent=False)
        # The last row means "replaced". As a padding row it gets no gradient: [FedHSSL] V-A,
        # "extra untrained embedding vectors".
        self.embeddings = nn.ModuleList(
            nn.Embedding(column.categories + 1, width, padding_idx=column.categories)
            for column in self.columns
        )
        self.num_outputs = len(self.continuous) + width * len(self.columns)

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows outputs"]:
        """Return the numbers, then the embeddings."""
        parts = [features[:, self.continuous]]
        parts += [
            embedding(column.codes(features))
            for column, embedding in zip(self.columns, self.embeddings, strict=True)
        ]
        return torch.cat(parts, dim=1)


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that uses its running statistics for a batch of one row.

    One row has no batch statistics; a batch may have one row, where few rows are linked.
    """

    def forward(self, values: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Return the rows normalised."""
        if len(values) > 1 or not self.training:
            return super().forward(values)
        return functional.batch_norm(
            values, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def _layer(inputs: int, outputs: int, norm: Norm) -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(inputs, outputs)]
    if norm == "batch":
        layers.append(BatchNorm(outputs))
    elif norm == "layer":
        layers.append(LayerNorm(outputs))
    return [*layers, nn.ReLU()]


EncoderName = Literal["cross", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FedHSSLConfig:
    """The ``[model]`` table of a federation with ``family = "fedhssl"``; all parties share it."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross", "local", "aggregate")
    """Steps of pretraining: cross-party learning, local learning (guided by the cross-party
    encoder where there is one), aggregation of local top encoders."""

    encoder: Literal["mlp", "embedding"] = "mlp"
    """Encoder of a record; ``embedding`` for tables with categorical columns."""

    encoder_hidden: checks.Width = 512
    """Width of an encoder's first layer."""

    hidden: checks.Width = 512
    """H, width of an encoder's output."""

    embedding: checks.Width = 32
    """Width of a categorical column's embedding."""

    norm: Norm = "batch"
    """``batch`` mixes rows of a batch, which no noise covers; the others do not."""

    encoders: Literal["both", "cross", "local"] = "both"
    """Pretrained encoders to fine-tune; their outputs are concatenated."""

    normalise: bool = True
    """The head reads the primary's representation and the aggregate at mean 0 and deviation 1
    each."""

    head: tuple[checks.Width, ...] = ()
    """Widths of hidden layers of the head."""

    dropout: checks.Fraction = 0.0
    """Share of units dropped before each layer of the head."""

    neighbours: int = 1
    """K, links of a row; an aligned row has one."""

    party_dropout: checks.Fraction = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: ClassVar[bool] = False
    """Keys are never model inputs."""

    average_positions_every: int = 0
    """There are no positional encodings to average."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        checks.within(0, checks.MOST_LAYERS, layers_of_head=len(self.head))
        if self.neighbours != 1:
            raise ConfigError(f"neighbours must be 1: a row has one match, got {self.neighbours}")
        if self.average_positions_every != 0:
            raise ConfigError("average_positions_every must be 0: there are no positions")
        if not self.used_encoders:
            raise ConfigError(f"encoders: this method has no {self.encoders} encoder")

    def columns(self, feature_names: Sequence[str]) -> tuple[CategoricalColumn, ...]:
        """Return a table's categorical columns if the encoder embeds them, else none."""
        return one_hot_columns(feature_names) if self.encoder == "embedding" else ()

    @property
    def used_encoders(self) -> tuple[EncoderName, ...]:
        """The encoders that fine-tuning starts from; a method without any has a new local one."""
        names: tuple[EncoderName, ...] = ("cross", "local")
        # Without pretraining there is one encoder, with the width of one of the others'.
        trained = [name for name in names if name in self.STEPS] or ["local"]
        return tuple(name for name in names if name in trained and self.encoders in ("both", name))

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return (1, self.hidden * len(self.used_encoders))


def build_encoder(
    config: FedHSSLConfig, *, num_features: int, columns: Sequence[CategoricalColumn] = ()
) -> Encoder:
    """Build an encoder, ready to be initialised.

    Args:
        config: The model's settings.
        num_features: Feature columns of the party's table.
        columns: Categorical columns, read by ``encoder = "embedding"`` alone.

    Raises:
        ConfigError: If a categorical column does not exist.

    References:
        [FedHSSL] Table III: two fully-connected layers (NUS-WIDE), an embedding layer before them
        (Avazu). The top is the last fully-connected layer.
    """
    checks.at_least(0, num_features=num_features)
    first: list[nn.Module] = []
    inputs = num_features
    if config.encoder == "embedding":
        embedded = EmbeddedColumns(num_features, columns, width=config.embedding)
        first.append(embedded)
        inputs = embedded.num_outputs
    return Encoder(
        nn.Sequential(*first, *_layer(inputs, config.encoder_hidden, config.norm)),
        nn.Sequential(*_layer(config.encoder_hidden, config.hidden, config.norm)),
        config.hidden,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FedGSSLConfig(FedHSSLConfig):
    """FedHSSL without aggregation of models."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross", "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class FedCSSLConfig(FedHSSLConfig):
    """Cross-party learning only."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FedLocalSSLConfig(FedHSSLConfig):
    """Local pretraining only: nothing is exchanged before fine-tuning."""

    STEPS: ClassVar[tuple[Step, ...]] = ("local",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FedSplitNNConfig(FedHSSLConfig):
    """No pretraining: the joint model only."""

    STEPS: ClassVar[tuple[Step, ...]] = ()
