"""Settings of FedHSSL's model and of the methods that are parts of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.family import Step
from securevfl.models.fedhssl.augment import CategoricalColumn, one_hot_columns
from securevfl.models.fedhssl.encoders import EncoderConfig, Norm, Stem

EncoderName = Literal["cross", "local"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FedHSSLConfig:
    """The ``[model]`` table of a federation with ``family = "fedhssl"``; all parties share it."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross", "local", "aggregate")
    """What pretraining does: cross-party learning, local learning (guided by the cross-party
    encoder where there is one), aggregation of local top encoders."""

    encoder: Literal["mlp", "embedding", "resnet18"] = "mlp"
    """What encodes a record; ``embedding`` for tables with categorical columns."""

    encoder_hidden: int = 512
    """Width of an encoder's first layer."""

    hidden: int = 512
    """H, width of an encoder's output."""

    embedding: int = 32
    """Width of a categorical column's embedding."""

    norm: Norm = "batch"
    """``batch`` mixes the rows of a batch, which no noise covers; ``layer`` and ``none`` do not."""

    image: tuple[int, ...] = ()
    """Channels, height and width of the image that a record is, for ``resnet18``."""

    stem: Stem = "imagenet"
    """First layers of ``resnet18``; ``small`` for small images."""

    encoders: Literal["both", "cross", "local"] = "both"
    """Which pretrained encoders are fine-tuned: a party's representation is their outputs side by
    side."""

    normalise: bool = True
    """Whether the head gets the primary's representation and the aggregate each at mean 0 and
    deviation 1 in every row; an aggregate is clipped, and the primary's own is not."""

    head: tuple[int, ...] = ()
    """Widths of hidden layers between the representations and the outputs."""

    dropout: float = 0.0
    """Share of units dropped before each layer of the head in training."""

    neighbours: int = 1
    """K, links of a row; an aligned row has one."""

    party_dropout: float = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: ClassVar[bool] = False
    """Keys are never model inputs."""

    average_positions_every: int = 0
    """There are no positional encodings to average."""

    def __post_init__(self) -> None:
        checks.fraction(dropout=self.dropout, party_dropout=self.party_dropout)
        checks.within(
            1,
            checks.MOST_WIDTH,
            encoder_hidden=self.encoder_hidden,
            hidden=self.hidden,
            embedding=self.embedding,
        )
        widths = {f"head[{i}]": width for i, width in enumerate(self.head)}
        checks.within(1, checks.MOST_WIDTH, **widths)
        checks.within(0, checks.MOST_LAYERS, layers_of_head=len(self.head))
        if self.neighbours != 1:
            raise ConfigError(f"neighbours must be 1: a row has one match, got {self.neighbours}")
        if self.average_positions_every != 0:
            raise ConfigError("average_positions_every must be 0: there are no positions")
        if not self.used_encoders:
            raise ConfigError(f"encoders: this method has no {self.encoders} encoder")
        _ = self.encoder_config

    @property
    def encoder_config(self) -> EncoderConfig:
        """What one encoder is made of."""
        return EncoderConfig(
            kind=self.encoder,
            hidden=self.encoder_hidden,
            width=self.hidden,
            embedding=self.embedding,
            norm=self.norm,
            image=self.image,
            stem=self.stem,
        )

    def columns(self, feature_names: Sequence[str]) -> tuple[CategoricalColumn, ...]:
        """Return the categorical columns of a table, as far as the encoder tells them apart."""
        return one_hot_columns(feature_names) if self.encoder == "embedding" else ()

    @property
    def used_encoders(self) -> tuple[EncoderName, ...]:
        """The encoders that fine-tuning starts from; a method without any has a new local one."""
        names: tuple[EncoderName, ...] = ("cross", "local")
        # Without pretraining there is one encoder, as wide as one of the others'.
        trained = [name for name in names if name in self.STEPS] or ["local"]
        return tuple(name for name in names if name in trained and self.encoders in ("both", name))

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return (1, self.hidden * len(self.used_encoders))


@dataclass(frozen=True, kw_only=True, slots=True)
class FedGSSLConfig(FedHSSLConfig):
    """FedHSSL without aggregation of models."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross", "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class FedCSSLConfig(FedHSSLConfig):
    """Cross-party learning alone."""

    STEPS: ClassVar[tuple[Step, ...]] = ("cross",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FedLocalSSLConfig(FedHSSLConfig):
    """Every party pretrains alone: nothing is exchanged before fine-tuning."""

    STEPS: ClassVar[tuple[Step, ...]] = ("local",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FedSplitNNConfig(FedHSSLConfig):
    """No pretraining: the joint model alone."""

    STEPS: ClassVar[tuple[Step, ...]] = ()
