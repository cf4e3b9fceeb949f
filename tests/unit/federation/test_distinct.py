"""Each record once gives what each link by itself gives."""

import pytest
import torch

from securevfl.federation.secondary import represent_distinct
from securevfl.models.pair_settings import ManyLinksSettings
from securevfl.models.pairs import RecordBottom


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
