"""Transformer blocks: pre-norm, multi-head attention with an additive bias for each key position.

B = rows of the batch, Q = queries, M = memory positions, H = width, h = heads, E = H/h.
"""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head attention of queries to a memory, by torch's fused kernel.

    Attention weights themselves are not dropped out: that leaves the fused kernel, and costs three
    times the attention on a CPU. Blocks drop units of its output.
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
        batch, positions, width = memory.shape
        q_BhQE = self.query(queries).view(batch, -1, self.heads, width // self.heads)
        kv_BM2hE = self.key_value(memory).view(batch, positions, 2, self.heads, -1)
        k_BMhE, v_BMhE = kv_BM2hE.unbind(dim=2)
        mixed_BhQE = scaled_dot_product_attention(
            q_BhQE.transpose(1, 2),
            k_BMhE.transpose(1, 2),
            v_BMhE.transpose(1, 2),
            attn_mask=None if bias is None else bias[:, None, None, :],
        )
        out: Tensor = self.out(mixed_BhQE.transpose(1, 2).reshape(batch, -1, width))
        return out


class FeedForward(nn.Sequential):
    """The position-wise perceptron of a block, twice as wide inside."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
            nn.Dropout(dropout),
        )


class EncoderBlock(nn.Module):
    """Self-attention and a perceptron, each behind its own norm and around a residual path."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout=dropout)

    def forward(
        self,
        hidden: Float[Tensor, "batch links width"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return the block's output; ``bias`` as in :class:`Attention`."""
        normed = self.attention_norm(hidden)
        hidden = hidden + self.attention_dropout(self.attention(normed, normed, bias))
        out: Tensor = hidden + self.feed_forward(self.forward_norm(hidden))
        return out


class DecoderBlock(nn.Module):
    """Self-attention, attention to a memory, and a perceptron."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads=heads)
        self.memory_norm = nn.LayerNorm(width)
        self.memory_attention = Attention(width, heads=heads)
        self.attention_dropout = nn.Dropout(dropout)
        self.forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, dropout=dropout)

    def forward(
        self,
        hidden: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return the block's output; ``bias`` weighs memory positions."""
        normed = self.self_norm(hidden)
        hidden = hidden + self.attention_dropout(self.self_attention(normed, normed))
        mixed = self.memory_attention(self.memory_norm(hidden), memory, bias)
        hidden = hidden + self.attention_dropout(mixed)
        out: Tensor = hidden + self.feed_forward(self.forward_norm(hidden))
        return out
