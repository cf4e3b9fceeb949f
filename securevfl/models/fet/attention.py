"""Transformer blocks: multi-head attention with an additive bias for each memory position.

B = rows of the batch, Q = queries, M = memory positions, H = width, h = heads, E = H/h.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import linear

from securevfl.core.devices import widen_floats
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import ByteDropout, LayerNorm

_VECTOR: Final = 16
"""Most float32 numbers in a vector instruction of a CPU."""


class Attention(nn.Module):
    """Multi-head attention of queries to a memory.

    Products and softmax are written out, since torch's fused kernel is slower where the bias is
    learned, as in most of our encoders (research/fet/attention.py). Attention weights are not
    dropped out; blocks drop units of the output.
    """

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self._scale = (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        queries: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return the attended values, after the output projection.

        Args:
            queries: The vectors that attend.
            memory: The vectors that they attend to.
            bias: Added to every score of a memory position; minus infinity hides it.
        """
        if memory.shape[1] == 1:
            return self._of_one_position(memory).expand(-1, queries.shape[1], -1)
        if queries.shape[1] == 1:
            return self._of_one_query(queries, memory, bias)
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self._mix(self.query(queries) * self._scale, key, value, bias)

    def among(
        self,
        inputs: Float[Tensor, "batch links width"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return self-attention: :meth:`forward` with ``inputs`` as queries and memory."""
        if inputs.shape[1] == 1:
            return self._of_one_position(inputs)
        query, key, value = self._project(inputs)
        return self._mix(query, key, value, bias)

    def among_distinct(
        self,
        records: Float[Tensor, "records width"],
        place: Int64[Tensor, "batch links"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return :meth:`among` for ``records[place]``, projecting each record once."""
        if place.shape[1] == 1:
            return gather_records(self._of_one_position(records), place)
        query, key, value = (gather_records(part, place) for part in self._project(records))
        return self._mix(query, key, value, bias)

    def _project(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return scaled queries, keys and values by one product."""
        weight = torch.cat([self.query.weight * self._scale, self.key_value.weight])
        added = torch.cat([self.query.bias * self._scale, self.key_value.bias])
        return linear(inputs, weight, added).chunk(3, dim=-1)

    def _of_one_position(self, memory: Tensor) -> Tensor:
        """Return the value of a memory's only position, which gets all attention."""
        _, weight = self.key_value.weight.chunk(2)
        _, added = self.key_value.bias.chunk(2)
        out: Tensor = self.out(linear(memory, weight, added))
        return out

    def _of_one_query(self, query: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """Return the attention of one query, without projecting the memory to keys and values.

        With query q and memory m of a head, (W_k m + b_k) . q = m . (W_k^T q) + a constant, which a
        softmax over the memory ignores; and the mean of W_v m + b_v is W_v (mean of m) + b_v.
        """
        width = memory.shape[2]
        into_key_hEH, into_value_hEH = self.key_value.weight.view(2, self.heads, -1, width)
        q_BhE = (self.query(query) * self._scale).unflatten(2, (self.heads, -1)).squeeze(1)
        asked_BhH = (q_BhE.transpose(0, 1) @ into_key_hEH).transpose(0, 1)
        scores_BhM = asked_BhH @ memory.transpose(1, 2)
        if bias is not None:
            scores_BhM = scores_BhM.add_(bias.unsqueeze(1))
        mean_BhH = softmax(scores_BhM) @ memory
        mixed_hBE = mean_BhH.transpose(0, 1) @ into_value_hEH.transpose(1, 2)
        _, added = self.key_value.bias.chunk(2)
        out: Tensor = self.out(mixed_hBE.transpose(0, 1).flatten(1).unsqueeze(1) + added)
        return out

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        scores_BhQM = self._by_head(query) @ self._by_head(key).transpose(2, 3)
        if bias is not None:
            scores_BhQM = scores_BhQM.add_(bias[:, None, None, :])
        mixed_BhQE = softmax(scores_BhQM) @ self._by_head(value)
        out: Tensor = self.out(mixed_BhQE.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (self.heads, -1)).transpose(1, 2)


def softmax(scores: Float[Tensor, "*batch memory"]) -> Float[Tensor, "*batch memory"]:
    """Return the softmax over the memory, in single precision."""
    scores = widen_floats(scores)
    if scores.is_cuda or scores.shape[-1] >= _VECTOR or not torch.is_grad_enabled():
        return scores.softmax(dim=-1)
    shares: Tensor = _ShortSoftmax.apply(scores)  # type: ignore[no-untyped-call]
    return shares


class _ShortSoftmax(torch.autograd.Function):
    """Softmax over fewer scores than a CPU's vector holds, which torch computes one by one.

    It takes a third of torch's time; for longer rows torch is faster.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor) -> Tensor:
        powers = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
        return powers.div_(powers.sum(dim=-1, keepdim=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        weighed = gradient * shares
        return weighed.sub_(shares * weighed.sum(dim=-1, keepdim=True))


def gather_records(
    records: Float[Tensor, "records width"], place: Int64[Tensor, "batch links"]
) -> Float[Tensor, "batch links width"]:
    """Return ``records[place]`` by ``index_select``, whose gradient is fast on a CPU."""
    return records.index_select(0, place.flatten()).unflatten(0, place.shape)


class FeedForward(nn.Sequential):
    """Position-wise perceptron of a block, with twice the width in its hidden layer."""

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(
            nn.Linear(config.hidden, 2 * config.hidden),
            nn.GELU() if config.activation == "gelu" else nn.ReLU(),
            ByteDropout(config.dropout),
            nn.Linear(2 * config.hidden, config.hidden),
            ByteDropout(config.dropout),
        )


class _Block(nn.Module):
    """Layers on a residual path, with norms before each layer (``pre``) or after it (``post``)."""

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
    """Encoder block: self-attention and a perceptron.

    References:
        [FeT] section 5.1: "the conventional transformer", which is ``norm = "post"`` and
        ``activation = "relu"``.
    """

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(config)
        self.attention_norm = LayerNorm(config.hidden)
        self.attention = Attention(config.hidden, heads=config.attention_heads)
        self.forward_norm = LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        hidden: Float[Tensor, "batch links width"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return the block's output; ``bias`` as in :class:`Attention`."""

        def attend(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.attention.among(inputs, bias))
            return out

        hidden = self._add(hidden, self.attention_norm, attend)
        return self._add(hidden, self.forward_norm, self.feed_forward)

    def of_distinct(
        self,
        records: Float[Tensor, "records width"],
        place: Int64[Tensor, "batch links"],
        bias: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links width"]:
        """Return the block's output for ``records[place]``, projecting each record once."""
        attending = self.attention_norm(records) if self.norm_first else records
        mixed = self.attention_dropout(self.attention.among_distinct(attending, place, bias))
        hidden = gather_records(records, place) + mixed
        if not self.norm_first:
            hidden = self.attention_norm(hidden)
        return self._add(hidden, self.forward_norm, self.feed_forward)


class DecoderBlock(_Block):
    """Decoder block: self-attention, attention to a memory, and a perceptron.

    References:
        As :class:`EncoderBlock`.
    """

    def __init__(self, config: FeTConfig) -> None:
        super().__init__(config)
        self.self_norm = LayerNorm(config.hidden)
        self.self_attention = Attention(config.hidden, heads=config.attention_heads)
        self.memory_norm = LayerNorm(config.hidden)
        self.memory_attention = Attention(config.hidden, heads=config.attention_heads)
        self.forward_norm = LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        hidden: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch memory width"],
        bias: Float[Tensor, "batch memory"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Return the block's output; ``bias`` is added to the scores of memory positions."""

        def attend(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.self_attention.among(inputs))
            return out

        def look_up(inputs: Tensor) -> Tensor:
            out: Tensor = self.attention_dropout(self.memory_attention(inputs, memory, bias))
            return out

        hidden = self._add(hidden, self.self_norm, attend)
        hidden = self._add(hidden, self.memory_norm, look_up)
        return self._add(hidden, self.forward_norm, self.feed_forward)


def last_norm(config: FeTConfig) -> nn.Module:
    """Return the norm after the last block, which ``pre`` leaves without one; else the identity."""
    return LayerNorm(config.hidden) if config.norm == "pre" else nn.Identity()
