"""SplitAvg as autograd sees it: a plain average, and for each secondary one term of it."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.rounds.network_primary import split_average
from securevfl.federation.run_plan import Purpose, RoundCounter
from securevfl.federation.session.peers import PeersHere

ROWS = 5


class PlainExchange(Exchange):
    """Averages bottom models exactly, and gives each its part of the gradient."""

    def __init__(self, bottoms: Mapping[int, nn.Module], inputs: Mapping[int, Tensor]) -> None:
        self.bottoms = bottoms
        self.inputs = inputs
        self.terms: dict[int, Tensor] = {}
        self.returned: list[Tensor] = []
        super().__init__(RoundCounter(), PeersHere({}), tuple(bottoms))

    def release(self, plan: RoundPlan) -> Tensor:
        rows = torch.as_tensor(plan.rows)
        with torch.enable_grad():
            self.terms = {r: self.bottoms[r](self.inputs[r][rows]) for r in plan.active}
        return torch.stack([term.detach() for term in self.terms.values()]).mean(0)

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, Tensor]]:
        return ((plan, self.release(plan)) for plan in plans)

    def return_gradient(self, plan: RoundPlan, gradient: Tensor) -> None:
        self.returned.append(gradient)
        for term in self.terms.values():
            term.backward(gradient / len(plan.active))


def models(count: int) -> tuple[dict[int, nn.Module], dict[int, Tensor], nn.Module]:
    torch.manual_seed(4)
    bottoms = {
        rank: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Unflatten(1, (2, 2)))
        for rank in range(1, count + 1)
    }
    inputs = {rank: torch.randn(20, 3) for rank in bottoms}
    return bottoms, inputs, nn.Sequential(nn.Flatten(), nn.Linear(4, 1))


def plan(active: tuple[int, ...], purpose: Purpose) -> RoundPlan:
    rows = np.arange(ROWS, dtype=np.int64)
    return RoundPlan(round_number=1, rows=rows, active=active, purpose=purpose)


@pytest.mark.parametrize("active", [(1, 2, 3), (1, 3), (2,)])
def test_gradients_equal_those_of_one_graph(active: tuple[int, ...]) -> None:
    """Of the aggregate, of the top and of every secondary, as if all sat in one autograd graph."""
    bottoms, inputs, top = models(3)
    exchange = PlainExchange(bottoms, inputs)
    top(split_average(exchange, plan(active, "train"))).square().sum().backward()
    split = {name: p.grad.clone() for name, p in top.named_parameters() if p.grad is not None}
    learned = {
        r: [p.grad.clone() for p in bottoms[r].parameters() if p.grad is not None] for r in active
    }
    for module in (top, *bottoms.values()):
        module.zero_grad()

    aggregate = torch.stack([bottoms[r](inputs[r][:ROWS]) for r in active]).mean(0)
    aggregate.retain_grad()
    top(aggregate).square().sum().backward()
    assert aggregate.grad is not None
    assert torch.allclose(exchange.returned[0], aggregate.grad, rtol=1e-6, atol=1e-8)
    for name, parameter in top.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(split[name], parameter.grad, rtol=1e-6, atol=1e-8)
    for rank in active:
        assert learned[rank]
        for got, parameter in zip(learned[rank], bottoms[rank].parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(got, parameter.grad, rtol=1e-6, atol=1e-8)
    for rank in set(bottoms) - set(active):
        assert all(parameter.grad is None for parameter in bottoms[rank].parameters())


def test_one_gradient_a_round() -> None:
    """However often the top uses the aggregate, one tensor of its shape goes back."""
    bottoms, inputs, top = models(2)
    exchange = PlainExchange(bottoms, inputs)
    aggregate = split_average(exchange, plan((1, 2), "train"))
    (top(aggregate).sum() + aggregate.square().sum()).backward()
    assert len(exchange.returned) == 1
    assert exchange.returned[0].shape == aggregate.shape


@pytest.mark.parametrize("purpose", ["release", "validation", "test"])
def test_evaluation_returns_no_gradient(purpose: Purpose) -> None:
    """Rows that are only looked at teach no secondary anything."""
    bottoms, inputs, top = models(2)
    exchange = PlainExchange(bottoms, inputs)
    aggregate = split_average(exchange, plan((1, 2), purpose))
    top(aggregate).sum().backward()
    assert not aggregate.requires_grad
    assert exchange.returned == []
