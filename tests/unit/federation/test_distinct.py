"""Each record once gives what each link by itself gives."""

import numpy as np
import pytest
import torch
from helpers.secondaries import FEATURES, LINKS, WIDTH, make_secondary
from torch import nn

from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.own_records import represent_distinct, represent_linked
from securevfl.models.fedhssl.encoders import FedHSSLConfig
from securevfl.models.fedhssl.family import FedHSSLBottom
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.pairs import ManyLinksSettings, RecordBottom


@pytest.mark.parametrize("records", [7, 500], ids=["few records", "many records"])
def test_vectors_and_gradients_are_those_of_every_link(records: int) -> None:
    """Repeated and absent links included; gradients add up over the links to a record."""
    torch.manual_seed(1)
    bottom = RecordBottom(ManyLinksSettings(hidden=4), num_features=3, key_dim=2)
    features, keys = torch.randn(records, 3), torch.randn(records, 2)
    index = torch.randint(0, 7, (5, 6)) * (records // 7)
    present = torch.rand(5, 6) < 0.8
    weigh = torch.randn(5, 6, 4)
    results = []
    for vectors in (
        represent_distinct(bottom, features, keys, index, present),
        bottom(features[index], keys[index], present),
    ):
        bottom.zero_grad()
        (vectors * weigh).sum().backward()
        results.append([vectors.detach(), *(p.grad.clone() for p in bottom.parameters())])

    assert not results[0][0][~present].any()
    for once, each in zip(*results, strict=True):
        torch.testing.assert_close(once, each)


def test_no_record_stands_in_for_an_absent_link() -> None:
    """Batch norm sees the linked records alone: record 0 is nobody's link here."""
    torch.manual_seed(1)
    settings = FedHSSLConfig(hidden=4, encoder_hidden=4)
    bottom = FedHSSLBottom(settings, num_features=3, columns=()).train()
    features, keys = torch.randn(7, 3), torch.zeros(7, 0)
    present = torch.tensor([[True], [False], [True]])
    some = represent_distinct(bottom, features, keys, torch.tensor([[3], [0], [5]]), present)
    linked = torch.tensor([[3], [5]])
    alone = represent_distinct(bottom, features, keys, linked, torch.ones(2, 1, dtype=torch.bool))
    torch.testing.assert_close(some[present[:, 0]], alone)
    assert not some[1].any()


def test_one_linked_record_of_a_batch_is_represented() -> None:
    """It has no batch statistics of its own, so the running ones serve, and stay as they are."""
    torch.manual_seed(1)
    settings = FedHSSLConfig(hidden=4, encoder_hidden=4)
    bottom = FedHSSLBottom(settings, num_features=3, columns=()).train()
    features, keys = torch.randn(7, 3), torch.zeros(7, 0)
    index, present = torch.tensor([[3], [0]]), torch.tensor([[True], [False]])
    before = {name: value.clone() for name, value in bottom.named_buffers()}
    trained = represent_distinct(bottom, features, keys, index, present)
    assert all(torch.equal(value, before[name]) for name, value in bottom.named_buffers())
    torch.testing.assert_close(
        trained, represent_distinct(bottom.eval(), features, keys, index, present)
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("release", ["sequence", "pooled"])
@pytest.mark.parametrize("all_present", [True, False], ids=["all links", "absent links"])
def test_attention_over_distinct_records_is_that_over_all_links(
    release: str, norm: str, *, all_present: bool
) -> None:
    """Values and gradients; a row without links, and a record that is not a number and unlinked."""
    torch.manual_seed(1)
    settings = FeTConfig(
        neighbours=6, hidden=8, heads=2, encoder_blocks=2, dropout=0.0, release=release, norm=norm
    )
    bottom = FeTBottom(settings, num_features=3, key_dim=2).double()
    features, keys = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    index = torch.randint(1, 7, (5, 6))
    present = torch.full((5, 6), fill_value=True)
    if not all_present:
        present[1:3, 2:], present[4] = False, False
        index[~present], features[0] = 0, torch.nan
    empty = ~present.unsqueeze(-1)
    weigh = torch.randn(5, *settings.cut_shape).double()
    results = []
    for vectors in (
        represent_linked(bottom, features, keys, index, present),
        bottom(
            features[index].masked_fill(empty, 0.0), keys[index].masked_fill(empty, 0.0), present
        ),
    ):
        bottom.zero_grad()
        (vectors * weigh).sum().backward()
        results.append([vectors.detach(), *(p.grad.clone() for p in bottom.parameters())])

    for once, each in zip(*results, strict=True):
        torch.testing.assert_close(once, each)


def test_nobody_is_linked() -> None:
    """A batch without a link is zeros, and teaches nothing that is not a number."""
    settings = FeTConfig(neighbours=3, hidden=8, heads=2, dropout=0.0)
    bottom = FeTBottom(settings, num_features=3, key_dim=2)
    features, index = torch.full((4, 3), torch.nan), torch.zeros(2, 3, dtype=torch.int64)
    out = represent_linked(bottom, features, torch.zeros(4, 2), index, index.bool())
    out.sum().backward()

    assert not out.any()
    assert all(not p.grad.isnan().any() for p in bottom.parameters())


@pytest.mark.parametrize(
    "bottom",
    [
        RecordBottom(ManyLinksSettings(hidden=WIDTH), num_features=FEATURES, key_dim=2),
        FeTBottom(
            FeTConfig(hidden=WIDTH, heads=1, neighbours=LINKS), num_features=FEATURES, key_dim=2
        ),
    ],
    ids=["recordwise", "attention"],
)
def test_behind_noise_no_product_has_a_size_that_links_decide(bottom: nn.Module) -> None:
    """A record more or less must not reach the last bits of other rows: each link has a place."""
    secondary = make_secondary(bottom=bottom)
    rows = RoundPlan(round_number=1, rows=np.arange(4), active=(1,), purpose="test")
    sizes = []
    for layer in bottom.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[:-1]))
    secondary.represent(rows)
    assert any(size.numel() != 4 * LINKS for size in sizes)
    sizes.clear()
    secondary.contribution.noise = ExactDiscreteGaussian(1000.0)
    secondary.represent(rows)
    assert {size.numel() for size in sizes} == {4 * LINKS}
