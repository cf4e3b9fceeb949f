"""The primary's part: an encoder of its own row, and a decoder that attends to the aggregate."""

from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.fet.attention import DecoderBlock, EncoderBlock, last_norm
from securevfl.models.fet.embedding import RecordEmbedding
from securevfl.models.fet.explain import attention_by_rank
from securevfl.models.fet.fet_config import FeTConfig
from securevfl.models.fet.positions import FourierPositions
from securevfl.models.link_ranks import rank_scores

# The variance of a clipped aggregate may be 1e-6; the usual 1e-5 would swallow it.
_MEMORY_EPSILON: Final = 1e-10


class FeTTop(nn.Module):
    """Encode the primary's row as one position, let it attend to the L of the aggregate, predict.

    References:
        [FeT] section 5.1, figure 2, and Algorithm 1, lines 10, 11 and 13.
    """

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int, outputs: int) -> None:
        super().__init__()
        self.own_clip_norm = config.own_clip_norm
        self.embedding = RecordEmbedding(config, num_features=num_features, key_dim=key_dim)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_blocks))
        # Clipping leaves the aggregate at the scale of C / sqrt(L H), far below what attention
        # works with; a norm at the primary is post-processing of what was released.
        self.memory_norm = (
            nn.LayerNorm(config.hidden, eps=_MEMORY_EPSILON)
            if config.memory_norm
            else nn.Identity()
        )
        # Position j of a sequence averages the parties' j-th nearest links.
        self.ranks = nn.Parameter(torch.zeros(config.cut_shape)) if config.ranked else None
        positions = config.cut_shape[0]
        self.rank_bias = (
            nn.Parameter(rank_scores(positions, decay=config.rank_decay))
            if config.ranked and positions > 1
            else None
        )
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.decoder_blocks))
        self.norm = last_norm(config)
        self.output = nn.Linear(config.hidden, outputs)

    @property
    def positions(self) -> FourierPositions:
        """The positional encoding, which parties average."""
        return self.embedding.positions

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch; similarities are no input of this family."""
        hidden, memory = self._own_and_memory(features, keys, aggregate)
        bias = self._bias_of(memory)
        for block in self.decoder:
            hidden = block(hidden, memory, bias)
        out: Tensor = self.output(self.norm(hidden.squeeze(1)))
        return out

    def _own_and_memory(
        self, features: Tensor, keys: Tensor, aggregate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the decoder starts from, and what it attends to."""
        hidden = self.embedding(features, keys).unsqueeze(1)
        for block in self.encoder:
            hidden = block(hidden)
        if self.own_clip_norm is not None:
            hidden = hidden.renorm(2, 0, self.own_clip_norm)
        memory = self.memory_norm(aggregate)
        return hidden, memory if self.ranks is None else memory + self.ranks

    def _bias_of(self, memory: Tensor) -> Tensor | None:
        """Return what ranks add to the attention that positions get, (B, L)."""
        return None if self.rank_bias is None else self.rank_bias.expand(memory.shape[0], -1)

    def explain(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return which positions of the aggregate the decoder attends to.

        Position j averages the secondaries' representations at their j-th nearest links.
        ``attention`` is a list for each block; ``notes`` say what is missing and why.

        References:
            [FeT] section 5.1, figure 2.

        Reveals:
            Nothing: it is made of what was released before.
        """
        if aggregate.shape[1] == 1:
            return {"notes": ["the decoder attends to the one position that was released"]}
        hidden, memory = self._own_and_memory(features, keys, aggregate)
        bias = self._bias_of(memory)
        attention = []
        for block in self.decoder:
            weights = cast(DecoderBlock, block).weights(hidden, memory, bias)
            attention.append(attention_by_rank(weights))
            hidden = block(hidden, memory, bias)
        return {"attention": attention}
