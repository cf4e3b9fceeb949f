"""Encoders: shapes, what parties may share, initial weights."""

import pytest
import torch
from torch import nn

from securevfl.core.errors import ConfigError
from securevfl.models.fedhssl.encoders import (
    CategoricalColumn,
    FedHSSLConfig,
    build_encoder,
    one_hot_columns,
)
from securevfl.models.layers import initialise


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_only_batch_norm_lets_one_row_change_another(norm: str) -> None:
    """What a differentially private bottom must not do."""
    config = FedHSSLConfig(encoder_hidden=8, hidden=6, norm=norm)  # type: ignore[arg-type]
    encoder = build_encoder(config, num_features=20)
    initialise(encoder, seed=1, positions_seed=0)
    batch = torch.rand(4, 20, generator=torch.Generator().manual_seed(2))
    changed = batch.clone()
    changed[3] += 3

    same = torch.allclose(encoder(batch)[:3], encoder(changed)[:3], atol=1e-5)
    assert same is (norm != "batch")


def test_tops_fit_one_another_whatever_the_features() -> None:
    """Partial model aggregation averages them between parties with different tables."""
    config = FedHSSLConfig(encoder_hidden=8, hidden=6)
    one, other = (build_encoder(config, num_features=number) for number in (5, 9))

    shapes = [[p.shape for p in encoder.top.parameters()] for encoder in (one, other)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    "config", [FedHSSLConfig(encoder_hidden=8, hidden=6), FedHSSLConfig(encoder="embedding")]
)
def test_initial_weights_follow_from_the_seed_alone(config: FedHSSLConfig) -> None:
    """Two builds and one seed give equal weights; another seed gives others."""
    columns = (CategoricalColumn((0,), 4),)

    def built(seed: int) -> nn.Module:
        encoder = build_encoder(config, num_features=189, columns=columns)
        encoder(torch.rand(6, 189))  # moves batch norm's running statistics
        initialise(encoder, seed=seed, positions_seed=0)
        return encoder

    one, same, other = built(1).state_dict(), built(1).state_dict(), built(2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    drawn = [name for name, value in one.items() if value.dim() > 1]
    assert drawn
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


def test_codes_and_one_hot_columns_give_equal_embeddings() -> None:
    """The same variable, stored in either way, scaled or not."""
    codes = torch.tensor([2, 0, 1, 2])
    as_code = torch.cat([codes[:, None].float(), torch.ones(4, 1)], dim=1)
    one_hot = torch.cat([nn.functional.one_hot(codes, 3).float(), torch.ones(4, 1)], dim=1)
    scaled = one_hot.clone()
    scaled[:, :3] = (one_hot[:, :3] - 0.4) / 0.3
    config = FedHSSLConfig(
        encoder="embedding", encoder_hidden=8, hidden=6, embedding=5, norm="none"
    )
    encoders = [
        build_encoder(config, num_features=2, columns=[CategoricalColumn((0,), 3)]),
        build_encoder(
            config, num_features=4, columns=one_hot_columns(["c=x", "c=y", "c=z", "age"])
        ),
    ]
    for encoder in encoders:
        initialise(encoder, seed=1, positions_seed=0)

    expected = encoders[0](as_code)
    assert torch.equal(encoders[1](one_hot), expected)
    assert torch.equal(encoders[1](scaled), expected)


def test_replaced_words_have_an_embedding_that_is_never_trained() -> None:
    """Out of the vocabulary means replaced; its embedding gets no gradient, the others do."""
    config = FedHSSLConfig(
        encoder="embedding", encoder_hidden=8, hidden=6, embedding=5, norm="none"
    )
    encoder = build_encoder(config, num_features=1, columns=[CategoricalColumn((0,), 3)])
    initialise(encoder, seed=1, positions_seed=0)
    encoder(torch.tensor([[0.0], [3.0], [-1.0], [7.0]])).sum().backward()
    (table,) = (m for m in encoder.modules() if isinstance(m, nn.Embedding))

    assert table.weight.grad is not None
    assert table.weight.grad[3].abs().sum() == 0
    assert table.weight.grad[0].abs().sum() > 0
    assert table.weight[3].abs().sum() > 0


def test_one_hot_columns_are_found_by_their_names() -> None:
    """A single 0/1 column is a number; order and gaps do not matter."""
    assert one_hot_columns(["a=1", "size", "b=x", "a=2", "flag=yes"]) == (
        CategoricalColumn((0, 3), 2),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"encoder_hidden": 0}, "encoder_hidden must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    """With the rule and the value."""
    with pytest.raises(ConfigError, match=message):
        FedHSSLConfig(**settings)  # type: ignore[arg-type]


def test_columns_that_do_not_exist_are_refused() -> None:
    """Out of range, or in two variables at once."""
    config = FedHSSLConfig(encoder="embedding")
    with pytest.raises(ConfigError, match="must lie in 0 to 1"):
        build_encoder(config, num_features=2, columns=[CategoricalColumn((2,), 3)])
    twice = [CategoricalColumn((0,), 3), CategoricalColumn((0,), 4)]
    with pytest.raises(ConfigError, match="belongs to two"):
        build_encoder(config, num_features=2, columns=twice)
