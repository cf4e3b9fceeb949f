"""FeT's blocks beside torch's own layers with equal weights, and the paper's form by settings."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from securevfl.core.errors import ConfigError
from securevfl.models.fet.attention import Attention, DecoderBlock, EncoderBlock, FeedForward
from securevfl.models.fet.family import FeTBottom, FeTFamily, FeTTop, JoinedMask
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import initialise

B, Q, K, F, D, H, HEADS = 3, 2, 5, 3, 2, 16, 4
CONFIG = FeTConfig(neighbours=K, hidden=H, heads=HEADS, dropout=0.0)
PAPER = dataclasses.replace(
    CONFIG,
    norm="post",
    activation="relu",
    mask_reads="keys",
    ranked=False,
    memory_norm=False,
)
FORMS = list(itertools.product(["pre", "post"], ["gelu", "relu"]))


def bias() -> Tensor:
    """Return numbers to add to scores; every row has a hidden position."""
    numbers = torch.randn(B, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    numbers[:, 3] = float("-inf")
    return numbers


def inputs(positions: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, positions, H, generator=generator, dtype=torch.float64)


def in_float64(model: nn.Module) -> nn.Module:
    """Draw every weight, those of norms too, so that none is 1 or 0."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())


def copy_perceptron(ours: FeedForward, theirs: Any) -> None:
    theirs.linear1.load_state_dict(ours[0].state_dict())
    theirs.linear2.load_state_dict(ours[3].state_dict())


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("links", [1, K])
@pytest.mark.parametrize("queries", [1, Q])
def test_attention_is_torchs_multi_head_attention(queries: int, links: int) -> None:
    """Queries, keys, values, heads and the bias are put together as torch puts them.

    One query, and a memory of one position, have ways of their own.
    """
    ours = in_float64(Attention(H, heads=HEADS))
    assert isinstance(ours, Attention)
    theirs = nn.MultiheadAttention(H, HEADS, batch_first=True, dtype=torch.float64)
    copy_attention(ours, theirs)
    asking, memory, added = inputs(queries), inputs(links, 5), bias()[:, :links]
    expected, _ = theirs(asking, memory, memory, key_padding_mask=added, need_weights=False)
    itself, _ = theirs(memory, memory, memory, key_padding_mask=added, need_weights=False)

    close(ours(asking, memory, added), expected)
    close(ours.among(memory, added), itself)


@pytest.mark.parametrize(("norm", "activation"), FORMS)
def test_an_encoder_block_is_torchs_layer(norm: Any, activation: Any) -> None:
    """Norms inside the residual path and on it, with both activations."""
    config = dataclasses.replace(CONFIG, norm=norm, activation=activation)
    ours = in_float64(EncoderBlock(config))
    assert isinstance(ours, EncoderBlock)
    theirs = nn.TransformerEncoderLayer(
        H,
        HEADS,
        dim_feedforward=2 * H,
        dropout=0.0,
        activation=activation,
        norm_first=norm == "pre",
        batch_first=True,
        dtype=torch.float64,
    )
    copy_attention(ours.attention, theirs.self_attn)
    copy_perceptron(ours.feed_forward, theirs)
    theirs.norm1.load_state_dict(ours.attention_norm.state_dict())
    theirs.norm2.load_state_dict(ours.forward_norm.state_dict())

    # Not .eval(): there torch hides positions by another path, which takes no numbers as a mask.
    close(ours(inputs(K), bias()), theirs(inputs(K), src_key_padding_mask=bias()))


@pytest.mark.parametrize(("norm", "activation"), FORMS)
def test_a_decoder_block_is_torchs_layer(norm: Any, activation: Any) -> None:
    """Self-attention, attention to the memory and the perceptron, in this order."""
    config = dataclasses.replace(CONFIG, norm=norm, activation=activation)
    ours = in_float64(DecoderBlock(config))
    assert isinstance(ours, DecoderBlock)
    theirs = nn.TransformerDecoderLayer(
        H,
        HEADS,
        dim_feedforward=2 * H,
        dropout=0.0,
        activation=activation,
        norm_first=norm == "pre",
        batch_first=True,
        dtype=torch.float64,
    )
    copy_attention(ours.self_attention, theirs.self_attn)
    copy_attention(ours.memory_attention, theirs.multihead_attn)
    copy_perceptron(ours.feed_forward, theirs)
    for mine, other in (
        (ours.self_norm, theirs.norm1),
        (ours.memory_norm, theirs.norm2),
        (ours.forward_norm, theirs.norm3),
    ):
        other.load_state_dict(mine.state_dict())
    queries, memory = inputs(Q), inputs(K, 5)

    close(ours(queries, memory, bias()), theirs(queries, memory, memory_key_padding_mask=bias()))


def test_the_papers_form_written_out() -> None:
    """A whole forward pass, secondary and primary, from torch's layers and the paper's lines."""
    config = dataclasses.replace(PAPER, own_clip_norm=0.5)
    bottom = in_float64(FeTBottom(config, num_features=F, key_dim=D))
    top = in_float64(FeTTop(config, num_features=F, key_dim=D, outputs=2))
    assert isinstance(bottom, FeTBottom)
    assert isinstance(top, FeTTop)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(B, K, F, generator=generator, dtype=torch.float64)
    keys = torch.randn(B, K, D, generator=generator, dtype=torch.float64)
    present = torch.ones(B, K, dtype=torch.bool)
    own = torch.randn(B, F, generator=generator, dtype=torch.float64)
    own_keys = torch.randn(B, D, generator=generator, dtype=torch.float64)

    assert isinstance(bottom.mask, JoinedMask)
    scores = bottom.mask.score(keys.reshape(B, K * D))
    embedded = bottom.embedding.linear(torch.cat([features, keys], dim=-1))
    embedded = embedded + bottom.positions(keys)
    block = bottom.blocks[0]
    hidden = block.attention_norm(embedded + block.attention(embedded, embedded, scores))
    released = block.forward_norm(hidden + block.feed_forward(hidden))

    row = top.embedding.linear(torch.cat([own, own_keys], dim=-1)) + top.positions(own_keys)
    row = top.encoder[0](row.unsqueeze(1))
    norm = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    row = row / (norm / 0.5).clamp_min(1)
    expected = top.output(top.decoder[0](row, released).squeeze(1))

    close(bottom(features, keys, present), released)
    # torch.renorm adds 1e-7 to the norm that it divides by.
    torch.testing.assert_close(top(own, own_keys, released, None), expected, rtol=1e-5, atol=1e-6)


def test_a_joined_mask_reads_all_keys_of_a_row() -> None:
    """Each number depends on every key that is there, and on none that is not."""
    mask = JoinedMask(D, links=K)
    initialise(mask, seed=1, positions_seed=1)
    keys = torch.randn(1, K, D, generator=torch.Generator().manual_seed(1))
    present = torch.tensor([[True, True, True, True, False]])
    moved, absent = keys.clone(), keys.clone()
    moved[0, 0] += 3
    absent[0, 4] += 3

    assert not torch.isclose(mask(moved, present), mask(keys, present)).any()
    torch.testing.assert_close(mask(absent, present), mask(keys, present))


@pytest.mark.parametrize(
    "changed",
    [{"norm": "post"}, {"mask_reads": "keys"}, {"activation": "relu"}, {"release": "pooled"}],
    ids=str,
)
def test_row_gradients_of_the_papers_form_add_up(changed: dict[str, Any]) -> None:
    """torch.func takes each row's gradient by itself; their sum is the batch's."""
    config = dataclasses.replace(PAPER, **changed)
    bottom = FeTBottom(config, num_features=F, key_dim=D)
    initialise(bottom, seed=4, positions_seed=5)
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(B, K, F, generator=generator)
    keys = torch.randn(B, K, D, generator=generator)
    present = torch.ones(B, K, dtype=torch.bool)
    present[1, 2:] = False
    present[2] = False
    parameters = {name: value.detach() for name, value in bottom.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, k: Tensor, there: Tensor) -> Tensor:
        one = (x.unsqueeze(0), k.unsqueeze(0), there.unsqueeze(0))
        out: Tensor = functional_call(bottom, weights, one)
        return out.square().sum()

    rows = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, features, keys, present)
    bottom(features, keys, present).square().sum().backward()

    for name, parameter in bottom.named_parameters():
        whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(rows[name].sum(0), whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"norm": "both"},
        {"activation": "tanh"},
        {"mask_reads": "similarities"},
        {"positions_start": "random"},
        {"own_clip_norm": 0.0},
    ],
    ids=str,
)
def test_impossible_forms_are_refused(wrong: dict[str, Any]) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError, match=f"model.*{next(iter(wrong))}"):
        FeTFamily().settings_from(wrong)
