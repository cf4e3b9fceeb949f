"""FeT: the bottom model of dynamic masks and attention, two top models, and the family.

The top models are an attention decoder and an additive one. B = rows of a batch, K = links of a
row, L = positions of the aggregate, D = key dimension.
"""

from types import MappingProxyType
from typing import Final, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.models.family import (
    Aggregate,
    Family,
    Present,
    Preset,
    RecordFeatures,
    RecordKeys,
    RowFeatures,
    RowKeys,
    Similarities,
)
from securevfl.models.fet.attention import DecoderBlock, EncoderBlock, gather_records, last_norm
from securevfl.models.fet.positions import FourierPositions, fourier_positions
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.frozen import FrozenBottom
from securevfl.models.layers import MLP, ByteDropout, LayerNorm, known_full, rank_scores


class RecordEmbedding(nn.Module):
    """Embeds features linearly and adds the positional encoding of the key.

    References:
        [FeT] section 5.1, figure 2: positional encodings join the features before the encoder.
    """

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        inputs = num_features + (key_dim if config.keys_as_features else 0)
        self.linear = nn.Linear(inputs, config.hidden)
        self.positions = fourier_positions(config, key_dim)

    def forward(
        self,
        features: Float[Tensor, "*rows features"],
        keys: Float[Tensor, "*rows dimension"],
    ) -> Float[Tensor, "*rows width"]:
        """Return one vector for each record."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        embedded: Tensor = self.linear(inputs) + self.positions(keys)
        return embedded


def dynamic_mask(config: FeTConfig, key_dim: int) -> nn.Module:
    """Return the mask that ``mask_reads`` names, from keys and presence to (B, K) numbers."""
    if config.mask_reads == "keys":
        return JoinedMask(key_dim, links=config.neighbours)
    return DynamicMask(key_dim, hidden=config.hidden)


class JoinedMask(nn.Module):
    """Dynamic mask that reads all K keys of a row, concatenated, by one perceptron.

    It distinguishes links by their place in the list only, and has K times the inputs.

    References:
        [FeT] section 5.1, "Dynamic Masking"; widths as in the published code.
    """

    def __init__(self, key_dim: int, *, links: int) -> None:
        super().__init__()
        self.score = MLP(links * key_dim, [2 * links * key_dim], links)

    def forward(self, keys: RecordKeys, present: Present) -> Float[Tensor, "batch links"]:
        """Return the additive mask; entries of absent links are meaningless."""
        there = keys.masked_fill(~present.unsqueeze(-1), 0.0)
        score: Tensor = self.score(there.flatten(1))
        return score


class DynamicMask(nn.Module):
    """Dynamic mask: one number for every link of a row, added to the link's attention scores.

    A perceptron reads the link's key and its offset from the centre of the row's links. The centre
    stands in for the primary's key, which a secondary need not know. The same perceptron serves
    every link, so reordering the links reorders the mask.

    References:
        [FeT] section 5.1, "Dynamic Masking".
    """

    def __init__(self, key_dim: int, *, hidden: int) -> None:
        super().__init__()
        self.score = MLP(2 * key_dim + 1, [hidden], 1)

    def forward(self, keys: RecordKeys, present: Present) -> Float[Tensor, "batch links"]:
        """Return the additive mask; entries of absent links are meaningless."""
        there = present.unsqueeze(-1).to(keys.dtype)
        count = there.sum(dim=1, keepdim=True).clamp_min(1)
        centre = (keys * there).sum(dim=1, keepdim=True) / count
        offset = keys - centre
        spread = (offset.square().sum(dim=-1, keepdim=True) * there).sum(
            dim=1, keepdim=True
        ) / count
        # Relative to the neighbourhood's extent, so that dense and sparse places look alike.
        offset = offset / spread.clamp_min(1e-12).sqrt()
        distance = offset.square().sum(dim=-1, keepdim=True)
        score: Tensor = self.score(torch.cat([keys, offset, distance], dim=-1))
        return score.squeeze(-1)


def attention_bias(
    mask: Float[Tensor, "batch links"] | None, present: Bool[Tensor, "batch links"]
) -> Float[Tensor, "batch links"]:
    """Return the bias of attention scores: the mask, and minus infinity at absent links.

    A row without any link gets its mask (or zeros), since a softmax over nothing is NaN; the caller
    must drop such a row's result. The computation does not branch on which links exist, so that
    gradients can be taken row by row (:mod:`torch.func`).
    """
    bias = torch.zeros(present.shape, device=present.device) if mask is None else mask
    empty = ~present.any(dim=1, keepdim=True)
    return bias.masked_fill(~(present | empty), float("-inf"))


class FeTBottom(nn.Module):
    """FeT's bottom model: encodes a row's links, nearest first.

    Reordering the links reorders the encoded sequence and does not change a pooled row, unless the
    model knows the order (``ranked``, or ``mask_reads = "keys"``).

    References:
        [FeT] section 5.1 and Algorithm 1, line 7. With ``release = "pooled"`` the K vectors are
        averaged with the softmax of the dynamic mask.
    """

    recordwise = False
    stackable = True
    features_weight = "embedding.linear.weight"

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.pools = config.release == "pooled"
        self.embedding = RecordEmbedding(config, num_features=num_features, key_dim=key_dim)
        self.mask = dynamic_mask(config, key_dim) if config.dynamic_masking else None
        self.rank_bias = (
            nn.Parameter(rank_scores(config.neighbours, decay=config.rank_prior))
            if config.ranked
            else None
        )
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_blocks))
        self.norm = last_norm(config)

    @property
    def positions(self) -> FourierPositions:
        """Positional encoding, which parties may average."""
        return self.embedding.positions

    def forward(
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> Float[Tensor, "batch positions width"]:
        """Return (B, K, H), zero at absent links, or (B, 1, H) if pooled."""
        bias = attention_bias(self._link_scores(keys, present), present)
        hidden = self.embedding(features, keys)
        for block in self.blocks:
            hidden = block(hidden, bias)
        hidden = self.norm(hidden)
        return _pool(hidden, bias, present) if self.pools else _of_links(hidden, present)

    def of_distinct(
        self,
        features: Float[Tensor, "records features"],
        keys: Float[Tensor, "records dimension"],
        place: Int64[Tensor, "batch links"],
        present: Present,
    ) -> Float[Tensor, "batch positions width"]:
        """Return :meth:`forward` of ``features[place]`` and ``keys[place]``."""
        bias = attention_bias(self._link_scores(gather_records(keys, place), present), present)
        first = cast(EncoderBlock, self.blocks[0])
        hidden = first.of_distinct(self.embedding(features, keys), place, bias)
        for block in self.blocks[1:]:
            hidden = block(hidden, bias)
        hidden = self.norm(hidden)
        if self.pools:
            return _pool(hidden, bias, present)
        return hidden if known_full(present) else _of_links(hidden, present)

    def _link_scores(self, keys: Tensor, present: Tensor) -> Tensor | None:
        scores = None if self.mask is None else self.mask(keys, present)
        if self.rank_bias is None:
            return scores
        # Attention kernels need a bias of the batch's shape, not a broadcast one.
        ranks = self.rank_bias.expand(keys.shape[0], -1)
        return ranks if scores is None else scores + ranks


def _of_links(hidden: Tensor, present: Tensor) -> Tensor:
    return hidden * present.unsqueeze(-1)


def _pool(hidden: Tensor, bias: Tensor, present: Tensor) -> Tensor:
    pooled = bias.softmax(dim=1).unsqueeze(1) @ hidden
    return pooled * present.any(dim=1)[:, None, None]


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
        self.embedding = RecordEmbedding(config, num_features=num_features, key_dim=key_dim)
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
        hidden = self.embedding(features, keys).unsqueeze(1)
        for block in self.encoder:
            hidden = block(hidden)
        if self.own_clip_norm is not None:
            hidden = hidden.renorm(2, 0, self.own_clip_norm)
        memory = self.memory_norm(aggregate)
        if self.ranks is not None:
            memory = memory + self.ranks
        bias = None if self.rank_bias is None else self.rank_bias.expand(memory.shape[0], -1)
        for block in self.decoder:
            hidden = block(hidden, memory, bias)
        out: Tensor = self.output(self.norm(hidden.squeeze(1)))
        return out


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
        kind = FrozenBottom if frozen else FeTBottom
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
