"""The numbers behind FeT's pictures are those that the model computes, and no record's."""

import json

import pytest
import torch
from torch import Tensor

from securevfl.models.fet.family import (
    AdditiveTop,
    FeTBottom,
    FeTTop,
    attention_bias,
    attention_by_rank,
)
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.layers import initialise

B, K, F = 6, 5, 3


def config(**settings: object) -> FeTConfig:
    """Return small settings."""
    return FeTConfig(**{"neighbours": K, "hidden": 8, "heads": 2, "dropout": 0.0, **settings})


def batch(dimension: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, keys and presence, with a row of two links and one of none."""
    generator = torch.Generator().manual_seed(5)
    present = torch.ones(B, K, dtype=torch.bool)
    present[1, 2:] = False
    present[3] = False
    return (
        torch.randn(B, K, F, generator=generator),
        torch.randn(B, K, dimension, generator=generator),
        present,
    )


def bottom_of(settings: FeTConfig, dimension: int) -> FeTBottom:
    """Return an initialised bottom model whose ranks differ."""
    bottom = FeTBottom(settings, num_features=F, key_dim=dimension)
    initialise(bottom, seed=3, positions_seed=3)
    if bottom.rank_bias is not None:
        bottom.rank_bias.data.copy_(torch.linspace(1, -1, settings.neighbours))
    return bottom.eval()


def places(keys: Tensor) -> set[tuple[int, ...]]:
    """Return keys to four digits, which is less than pictures have."""
    return {tuple(key) for key in (keys * 1e4).round().int().tolist()}


@pytest.mark.parametrize("dimension", [1, 2, 4])
@pytest.mark.parametrize("mask_reads", ["offsets", "keys"])
def test_pictured_masks_are_those_of_the_model(dimension: int, mask_reads: str) -> None:
    """Each picture's links, put into the mask, give its numbers; no record is among them."""
    bottom = bottom_of(config(mask_reads=mask_reads), dimension)
    features, keys, present = batch(dimension)
    told = bottom.explain(features, keys, present)

    assert told["key_dim"] == dimension
    assert len(told["mask"]) == 3
    rows = [one["row"] for one in told["mask"]]
    assert rows[0] != rows[1] != rows[2]
    for one in told["mask"]:
        links, row = torch.tensor(one["links"]), torch.tensor(one["row"])
        assert links.shape == (len(one["mask"]), min(2, dimension))
        away = (links - row[: links.shape[1]]).norm(dim=1)
        assert (away.diff() > -1e-4).all(), "nearest first, as links are"
        whole = row.expand(len(links), -1).clone()
        whole[:, : links.shape[1]] = links
        assert bottom.mask is not None
        values = bottom.mask(whole.unsqueeze(0), torch.ones(1, len(links), dtype=torch.bool))
        assert torch.tensor(one["mask"]) == pytest.approx(values[0].detach(), abs=1e-4)
        assert not places(keys.view(-1, dimension)) & places(whole), "no record is shown"
    assert told["mask"][0]["mask"] != told["mask"][2]["mask"], "the mask reads where links lie"


def test_attention_by_rank_is_what_mixes_the_values() -> None:
    """The weights that are shown, times the values, are the layer's output; absent links get 0."""
    bottom = bottom_of(config(encoder_blocks=2), 2)
    features, keys, present = batch(2)
    bias = attention_bias(bottom._link_scores(keys, present), present)
    hidden = bottom.embedding(features, keys)
    layer = bottom.blocks[0].attention
    weights = layer.weights(hidden, hidden, bias)
    values = layer.key_value(hidden).chunk(2, dim=-1)[1].unflatten(2, (2, -1)).transpose(1, 2)
    mixed = layer.out((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, layer.among(hidden, bias))

    told = bottom.explain(features, keys, present)
    assert len(told["attention"]) == 2
    for share in [*told["attention"], told["mask_by_rank"]]:
        assert len(share) == K
        assert sum(share) == pytest.approx(1, abs=1e-4)
    assert told["mask_by_rank"][0] > told["mask_by_rank"][-1], "ranks were made to fall"
    # By hand: the first block's, over the rows with a link and the links that there are.
    inside = bottom.blocks[0].weights(hidden, bias).mean(dim=1)
    by_row = [inside[row, present[row]].mean(dim=0) for row in (0, 1, 2, 4, 5)]
    by_hand = torch.stack(by_row).mean(dim=0).tolist()
    assert told["attention"][0] == pytest.approx(by_hand, abs=1e-5)
    only = torch.tensor([[True, True, False, False, False]])
    shares = attention_by_rank(weights[1:2], only)
    assert shares[2:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_primary_shows_what_its_decoder_looks_up(norm: str) -> None:
    """Its attention is that of its own queries; a position that shouts is the one that is heard."""
    top = FeTTop(config(norm=norm, decoder_blocks=2), num_features=F, key_dim=2, outputs=1)
    initialise(top, seed=1, positions_seed=1)
    top.eval()
    generator = torch.Generator().manual_seed(2)
    features, keys = (torch.randn(B, size, generator=generator) for size in (F, 2))
    aggregate = torch.randn(B, K, 8, generator=generator)
    seen: list[Tensor] = []
    handle = top.decoder[0].memory_attention.register_forward_pre_hook(
        lambda _layer, inputs: seen.extend(inputs)
    )
    top(features, keys, aggregate, None)
    handle.remove()
    weights = top.decoder[0].memory_attention.weights(*seen)

    told = top.explain(features, keys, aggregate, None)
    assert told["attention"][0] == pytest.approx(weights.mean(dim=(0, 1, 2)).tolist(), abs=1e-5)
    assert len(told["attention"]) == 2


@pytest.mark.parametrize("links", ["none", "one", "equal keys", "not finite"])
def test_pictures_never_break_a_run(links: str) -> None:
    """Whatever a table holds, there is something that JSON takes, and a note where one is due."""
    settings = config(neighbours=1) if links == "one" else config()
    bottom = bottom_of(settings, 2)
    features, keys, present = batch(2)
    if links == "none":
        present = torch.zeros_like(present)
    elif links == "one":
        features, keys, present = features[:, :1], keys[:, :1], present[:, :1]
    elif links == "equal keys":
        keys = torch.zeros_like(keys)
    else:
        features[0, 0, 0] = float("nan")
        keys[2, 0, 0] = float("inf")
    told = bottom.explain(features, keys, present)

    json.dumps(told, allow_nan=False)
    assert len(told["mask"]) == 3
    assert ("attention" in told) == (links in {"equal keys", "not finite"})
    assert bool(told["notes"]) == (links in {"none", "one"})
    plain = bottom_of(config(dynamic_masking=False, ranked=False), 2).explain(*batch(2))
    assert plain["notes"] == ["no mask was learned: model.dynamic_masking is false"]
    assert "mask" not in plain
    assert "mask_by_rank" not in plain


def test_top_models_that_attend_to_nothing_say_so() -> None:
    """A pooled release has one position; an additive top model has no attention."""
    features, keys, one = torch.zeros(2, F), torch.zeros(2, 2), torch.zeros(2, 1, 8)
    pooled = config(release="pooled")
    top = FeTTop(pooled, num_features=F, key_dim=2, outputs=1)
    assert "one position" in top.explain(features, keys, one, None)["notes"][0]
    additive = AdditiveTop(pooled, num_features=F, key_dim=2, outputs=1)
    assert "attends to no link" in additive.explain(features, keys, one, None)["notes"][0]
