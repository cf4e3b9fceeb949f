"""The gradient that parties get is the loss's own, through clip, average and every top model."""

import numpy as np
import pytest
import torch
from helpers.gradients import CASES, Network, default_dtype, relative_error
from helpers.secondaries import AnyRound, NoCharge
from torch import Tensor, nn

from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.release import SecondaryRelease
from securevfl.federation.rounds.secondary import Secondary, SecondaryData
from securevfl.federation.rounds.updates import DropoutStream, set_gradients
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import FixedLinks
from securevfl.models.optimisers import PacedOptimizer

RATE = 1.0


@pytest.mark.parametrize("bites", [True, False], ids=["clipped", "not-clipped"])
@pytest.mark.parametrize("secondaries", [1, 2, 4])
@pytest.mark.parametrize("label", CASES)
def test_autograd_agrees_with_finite_differences(label: str, secondaries: int, bites: bool) -> None:
    """In float64, along random directions of the secondaries' own weights."""
    assert relative_error(label, secondaries=secondaries, bites=bites, directions=3) < 1e-5


@pytest.mark.parametrize("secondaries", [1, 2, 4])
@pytest.mark.parametrize("label", [label for label, (_, _, frozen) in CASES.items() if not frozen])
def test_a_round_gives_the_gradients_of_one_graph(label: str, secondaries: int) -> None:
    """Of real secondaries, through whole units and one gradient for all: as in one network."""
    network = Network(label, secondaries=secondaries, clip_norm=50.0, dtype=torch.float32)
    wanted = torch.autograd.grad(network.loss(), network.parameters(), allow_unused=True)

    starts = [part.detach().clone() for part in network.parameters()]
    parties = {
        rank: _secondary(network, rank, bottom) for rank, bottom in enumerate(network.bottoms, 1)
    }
    exchange = SimulatedExchange(parties, network.aggregation.cut)
    rows = np.arange(len(network.inputs.targets), dtype=np.int64)
    plan = RoundPlan(round_number=1, rows=rows, active=tuple(parties), purpose="train")
    average = exchange.release(plan).requires_grad_()
    loss = network.squares(network.outputs(average))
    (gradient,) = set_gradients(loss, list(network.top.parameters()), average)
    exchange.return_gradient(plan, gradient)

    got: list[Tensor | None] = [
        (start - part.detach()) / RATE
        for start, part in zip(starts, network.parameters(), strict=True)
    ]
    of_top = list(network.top.parameters())
    got[len(got) - len(of_top) :] = [part.grad for part in of_top]
    scale = float(torch.cat([one.flatten() for one in wanted if one is not None]).norm())
    for mine, other in zip(got, wanted, strict=True):
        expected = torch.zeros(()) if other is None else other
        found = torch.zeros(()) if mine is None else mine
        # What crosses the cut is rounded to whole units.
        assert float((found - expected).norm()) < 1e-2 * scale


def _secondary(network: Network, rank: int, bottom: nn.Module) -> Secondary:
    """A secondary whose record number i K + j is the j-th link of row i."""
    features, keys, present = network.inputs.links[rank - 1]
    rows, links = present.shape
    indices = np.where(present.numpy(), np.arange(rows * links).reshape(rows, links), -1)
    table = LinkTable(indices=indices, distances=np.where(indices >= 0, 1.0, np.inf))
    with default_dtype(torch.float32):
        return Secondary(
            SecondaryData(
                name=f"bank-{rank}",
                features=features.reshape(rows * links, -1),
                keys=keys.reshape(rows * links, -1),
                links=FixedLinks(table=table),
                primary_rows=rows,
            ),
            bottom,
            SecondaryRelease(network.aggregation, noise=None, ledger=NoCharge()),
            validator=AnyRound(),
            dropout=DropoutStream(0, f"bank-{rank}", device=torch.device("cpu")),
            optimizer=PacedOptimizer(torch.optim.SGD(bottom.parameters()), learning_rate=RATE),
        )
