"""Transformer blocks: multi-head attention with an additive bias for each key position.

B = rows of the batch, Q = queries, M = memory positions, H = width, h = heads, E = H/h.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.dropout import ByteDropout
from securevfl.models.fet.fet_config import FeTConfig


class Attention(nn.Module):
    """Multi-head attention of queries to a memory.

    Its products and softmax stand here in plain sight: torch's fused kernel is slower where the
    bias learns, which it does in most of our encoders. Attention weights themselves are not dropped
    out; blocks drop units of its output.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        queries: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return the mixed values, after the output projection.

        Args:
            queries: Where attention comes from.
            memory: Where it goes to.
            bias: Added to every score of a memory position; minus infinity hides it.
        """
        query = self.query(queries)
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self.mix(query, key, value, bias)

    def mix(
        self,
        query: Float[Tensor, "batch queries width"],
        key: Float[Tensor, "batch memory width"],
        value: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return what :meth:`forward` returns, from projections that are made already."""
        width = query.shape[-1]
        q_BhQE, k_BhME, v_BhME = (self._by_head(one) for one in (query, key, value))
        scores_BhQM = (q_BhQE * (width // self.heads) ** -0.5) @ k_BhME.transpose(2, 3)
        if bias is not None:
            scores_BhQM = scores_BhQM.add_(bias[:, None, None, :])
        mixed_BhQE = scores_BhQM.softmax(dim=3) @ v_BhME
        out: Tensor = self.out(mixed_BhQE.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Sequential):
    """The position-wise perceptron of a block, twice as wide inside."""

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden, 2 * config.hidden),
            nn.GELU() if config.activation == "gelu" else nn.ReLU(),
            ByteDropout(config.dropout),
            nn.Linear(2 * config.hidden, config.hidden),
            ByteDropout(config.dropout),
        )


class _Block(nn.Module):
    """Layers on a residual path, with norms inside it (``pre``) or on it (``post``)."""

    def __init__(self, config: FeTConfig) -> None:
        super().__init__()
        self.norm_first = config.norm == "pre"
        self.attention_dropout = ByteDropout(config.dropout)

    def _add(self, hidden: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return hidden + layer(norm(hidden))
        out: Tensor = norm(hidden + layer(hidden))
        return out


class EncoderBlock(_Block):
    """Self-attention and a perceptron.

    References:
        [FeT] section 5.1: "the conventional transformer", which is ``norm = "post"`` and
        ``activation = "relu"``.
    """

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(config)
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config.hidden, heads=config.attention_heads)
        self.forward_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        hidden: Float[Tensor, "batch links width"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return the block's output; ``bias`` as in :class:`Attention`."""

        def attend(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.attention(inputs, inputs, bias))
            return out

        hidden = self._add(hidden, self.attention_norm, attend)
        return self._add(hidden, self.forward_norm, self.feed_forward)


class DecoderBlock(_Block):
    """Self-attention, attention to a memory, and a perceptron.

    References:
        As :class:`EncoderBlock`.
    """

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(config)
        self.self_norm = nn.LayerNorm(config.hidden)
        self.self_attention = Attention(config.hidden, heads=config.attention_heads)
        self.memory_norm = nn.LayerNorm(config.hidden)
        self.memory_attention = Attention(config.hidden, heads=config.attention_heads)
        self.forward_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        hidden: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return the block's output; ``bias`` weighs memory positions."""

        def attend(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.self_attention(inputs, inputs))
            return out

        def look_up(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.memory_attention(inputs, memory, bias))
            return out

        hidden = self._add(hidden, self.self_norm, attend)
        hidden = self._add(hidden, self.memory_norm, look_up)
        return self._add(hidden, self.forward_norm, self.feed_forward)


def last_norm(config: FeTConfig) -> nn.Module:
    """Return what follows the last block: its residual path has no norm on it with ``pre``."""
    return nn.LayerNorm(config.hidden) if config.norm == "pre" else nn.Identity()
