"""What a GPU replays is what it would be launched for."""

import pytest
import torch
from helpers.labelled_cuda import labelled_cuda
from torch import nn

from securevfl.core.devices import Precision
from securevfl.federation.rounds.updates import set_gradients
from securevfl.models.cuda_graphs import MOST, Network
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig

ROWS, LINKS = 6, 3


def bottom(*, dropout: float) -> FeTBottom:
    config = FeTConfig(
        neighbours=LINKS, hidden=8, heads=2, fourier_features=8, fourier_width=8, dropout=dropout
    )
    torch.manual_seed(0)
    return FeTBottom(config, num_features=2, key_dim=2)


def inputs(device: str, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    features, keys = torch.randn(rows, LINKS, 2), torch.randn(rows, LINKS, 2)
    present = torch.ones(rows, LINKS, dtype=torch.bool)
    return features.to(device), keys.to(device), present.to(device)


def learn(model: nn.Module, precision: Precision, device: str) -> list[float]:
    """Return the losses of some steps, by batches of two sizes in turns."""
    network, losses = Network(model, precision), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        loss = (network(*inputs(device, ROWS - step % 2)) - 1).square().mean()
        set_gradients(loss, list(model.parameters()))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("precision", "within"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_a_gpu_learns_by_replays_what_a_cpu_learns(precision: Precision, within: float) -> None:
    """Each replay reads the weights of its own step, in either precision."""
    here = learn(bottom(dropout=0.0), "float32", "cpu")
    there = learn(bottom(dropout=0.0).to("cuda"), precision, "cuda")
    assert here[-1] < 0.8 * here[0]
    assert there == pytest.approx(here, rel=within)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_drop_other_units_each_time_and_the_same_from_one_state() -> None:
    network, given = Network(bottom(dropout=0.5).to("cuda"), "float32"), inputs("cuda")
    torch.cuda.manual_seed(3)
    first, second = (network(*given).clone() for _ in range(2))
    torch.cuda.manual_seed(3)
    assert torch.equal(network(*given), first)
    assert not torch.equal(second, first)


def test_only_so_many_shapes_are_captured() -> None:
    """Further ones are launched kernel by kernel, and compute the same."""
    model = bottom(dropout=0.0)
    with labelled_cuda():
        network = Network(model.to("cuda"), "float32")
        for rows in range(1, MOST + 3):
            out = network(*inputs("cuda", rows))
            assert out.shape == (rows, LINKS, 8)
    (replays,) = network._replays.values()
    assert len(replays._captured) == MOST
