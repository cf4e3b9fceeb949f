"""FeT's top models, an attention decoder and an additive one, and the family."""

from types import MappingProxyType
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.family import Aggregate, Family, Preset, RowFeatures, RowKeys, Similarities
from securevfl.models.fet import fet_bottom
from securevfl.models.fet.attention import DecoderBlock, EncoderBlock, last_norm
from securevfl.models.fet.positions import FourierPositions
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.frozen import FrozenBottom
from securevfl.models.layers import MLP, ByteDropout, LayerNorm, rank_scores

# The variance of a clipped aggregate may be 1e-6; the usual 1e-5 would swallow it.
_MEMORY_EPSILON: Final = 1e-10


class FeTTop(nn.Module):
    """FeT's top model: the primary's row attends to the L positions of the aggregate.

    References:
        [FeT] section 5.1, figure 2, and Algorithm 1, lines 10, 11 and 13.
    """

    stackable = True

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int, outputs: int) -> None:
        super().__init__()
        self.own_clip_norm = config.own_clip_norm
        self.embedding = fet_bottom.RecordEmbedding(
            config, num_features=num_features, key_dim=key_dim
        )
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_blocks))
        # Clipping leaves the aggregate at the scale of C / sqrt(L H), far too small for attention;
        # a norm at the primary is post-processing of the release.
        self.memory_norm = (
            LayerNorm(config.hidden, eps=_MEMORY_EPSILON) if config.memory_norm else nn.Identity()
        )
        # Position j of a sequence averages the parties' j-th nearest links.
        self.ranks = nn.Parameter(torch.zeros(config.cut_shape)) if config.ranked else None
        positions = config.cut_shape[0]
        self.rank_bias = (
            nn.Parameter(rank_scores(positions, decay=config.rank_prior))
            if config.ranked and positions > 1
            else None
        )
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_blocks))
        self.norm = last_norm(config)
        self.output = nn.Linear(config.hidden, outputs)

    @property
    def positions(self) -> FourierPositions:
        """Positional encoding, which parties may average."""
        return self.embedding.positions

    def forward(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch; this family ignores similarities."""
        hidden, memory = self._own_and_memory(features, keys, aggregate)
        bias = self._bias_of(memory)
        for block in self.decoder:
            hidden = block(hidden, memory, bias)
        out: Tensor = self.output(self.norm(hidden.squeeze(1)))
        return out

    def _own_and_memory(
        self, features: Tensor, keys: Tensor, aggregate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the decoder's input and its memory."""
        hidden = self.embedding(features, keys).unsqueeze(1)
        for block in self.encoder:
            hidden = block(hidden)
        if self.own_clip_norm is not None:
            hidden = hidden.renorm(2, 0, self.own_clip_norm)
        memory = self.memory_norm(aggregate)
        return hidden, memory if self.ranks is None else memory + self.ranks

    def _bias_of(self, memory: Tensor) -> Tensor | None:
        """Return the attention bias of the positions' ranks, (B, L)."""
        return None if self.rank_bias is None else self.rank_bias.expand(memory.shape[0], -1)

    def explain(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> dict[str, Any]:
        """Return the decoder's attention to positions of the aggregate.

        Position j averages the secondaries' representations at their j-th nearest links.
        ``attention`` is a list for each block; ``notes`` say why something is missing.

        References:
            [FeT] section 5.1, figure 2.

        Reveals:
            Nothing: the result is computed from earlier releases.
        """
        if aggregate.shape[1] == 1:
            return {"notes": ["the decoder attends to the one position that was released"]}
        hidden, memory = self._own_and_memory(features, keys, aggregate)
        bias = self._bias_of(memory)
        attention = []
        for block in self.decoder:
            weights = cast(DecoderBlock, block).weights(hidden, memory, bias)
            attention.append(fet_bottom.attention_by_rank(weights))
            hidden = block(hidden, memory, bias)
        return {"attention": attention}


_OWN_WIDTHS: Final = (128, 64)
_JOINT_WIDTHS: Final = (128,)
_DROPPED_AGGREGATE: Final = 0.3


class RunningScale(nn.Module):
    """Scales every coordinate to mean 0 and deviation 1 over the training rows seen so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count: Tensor
        self.total: Tensor
        self.squares: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(width, dtype=torch.float64))

    def forward(self, inputs: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        """Return the scaled inputs; in training, include them in the statistics first."""
        if self.training:
            with torch.no_grad():
                exact = inputs.detach().double()
                self.count += len(exact)
                self.total += exact.sum(dim=0)
                self.squares += exact.square().sum(dim=0)
        mean = self.total / self.count.clamp_min(1)
        variance = (self.squares / self.count.clamp_min(1) - mean.square()).clamp_min(0)
        # A constant coordinate, such as that of a party without links, becomes 0.
        deviation = torch.where(variance > 0, variance.sqrt(), torch.ones_like(variance))
        return ((inputs - mean) / deviation).to(inputs.dtype)


class AdditiveTop(nn.Module):
    """Additive top model: own evidence, linear evidence of the aggregate, and a joint correction.

    If secondaries' vectors are independent given the label and their noise is large and Gaussian,
    the label's log-odds are those of the primary's row plus a linear function of the aggregate.
    Both are separate terms here; a perceptron over both adds the non-linear part.

    An addition to the paper, for releases that are mostly noise.
    """

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int, outputs: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        inputs = num_features + (key_dim if config.keys_as_features else 0)
        positions, width = config.cut_shape
        aggregate = positions * width
        self.positions = nn.Identity()
        self.scale = RunningScale(aggregate)
        self.own = MLP(inputs, _OWN_WIDTHS[:-1], _OWN_WIDTHS[-1], dropout=config.dropout)
        self.own_output = nn.Linear(_OWN_WIDTHS[-1], outputs)
        self.linear = nn.Linear(aggregate, outputs)
        self.drop = ByteDropout(_DROPPED_AGGREGATE)
        self.joint = MLP(
            _OWN_WIDTHS[-1] + aggregate, _JOINT_WIDTHS, outputs, dropout=_DROPPED_AGGREGATE
        )

    def forward(
        self,
        features: RowFeatures,
        keys: RowKeys,
        aggregate: Aggregate,
        similarities: Similarities = None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        inputs = torch.cat([features, keys], dim=1) if self.keys_as_features else features
        own = nn.functional.gelu(self.own(inputs))
        released = self.drop(self.scale(aggregate.flatten(1)))
        out: Tensor = self.own_output(own) + self.linear(released)
        return out + self.joint(torch.cat([own, released], dim=1))

    def explain(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> dict[str, Any]:
        """Return a note that there is nothing to show."""
        return {"notes": ["an additive top model attends to no link"]}


class FeTFamily(Family[FeTConfig]):
    """``family = "fet"``."""

    name = "fet"
    settings_class = FeTConfig
    presets = MappingProxyType(
        {
            "paper": Preset(
                base="none",
                model={
                    "norm": "post",
                    "activation": "relu",
                    "mask_reads": "keys",
                    "ranked": False,
                    "memory_norm": False,
                    "fourier_octaves": 0,
                    "positions_start": "separate",
                    "average_positions_every": 1,
                    "neighbours": 100,
                    "hidden": 100,
                    "heads": 4,
                    "encoder_blocks": 3,
                    "decoder_blocks": 3,
                    "dropout": 0.3,
                },
                training={
                    "optimizer": "lamb",
                    "learning_rate": 1e-3,
                    "weight_decay": 1e-5,
                    "batch_size": 128,
                    "epochs": 100,
                    "patience": 100,
                },
            )
        }
    )
    """[FeT] section 5.1 for the network; sizes and training, which the paper leaves to appendices
    and scripts, as its authors' scripts have them for tables of houses. Under noise,
    ``own_clip_norm`` is line 11 of its Algorithm 1."""

    def build_bottom(
        self,
        settings: FeTConfig,
        *,
        num_features: int,
        key_dim: int,
        frozen: bool = False,
        **_: object,
    ) -> nn.Module:
        """Return the encoder of linked records; a frozen one is random features."""
        kind = FrozenBottom if frozen else fet_bottom.FeTBottom
        return kind(settings, num_features=num_features, key_dim=key_dim)

    def build_top(
        self, settings: FeTConfig, *, num_features: int, key_dim: int, outputs: int, **_: object
    ) -> nn.Module:
        """Return the paper's decoder or the additive top model."""
        kind = AdditiveTop if settings.top == "additive" else FeTTop
        return kind(settings, num_features=num_features, key_dim=key_dim, outputs=outputs)

    def reads_keys(self, settings: FeTConfig, *, frozen: bool) -> bool:
        """Return whether keys must be numbers; not for frozen encoders below an additive top."""
        attends = not frozen or settings.top == "attention"
        return attends or settings.keys_as_features

    def pools_records(self, settings: FeTConfig, *, frozen: bool) -> bool:
        """Return whether frozen encoders are pooled."""
        # FeTBottom itself pools, after attention has mixed the records.
        return frozen and settings.release == "pooled"

    def shares_positions(self, settings: FeTConfig) -> bool:
        """Return whether ``positions_start`` is ``shared``."""
        return settings.positions_start == "shared"
