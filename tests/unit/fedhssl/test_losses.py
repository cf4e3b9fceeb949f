"""The three losses against their formulas, and what averaging targets does to them."""

import numpy as np
import pytest
import torch
from torch import nn

from securevfl.mpc.codec import InProcessSum
from securevfl.stages.pretraining.learner import (
    NegativeQueue,
    Objective,
    byol_loss,
    moco_loss,
    simsiam_loss,
    unit,
)
from securevfl.stages.pretraining.parties import projection_cut, projection_words


def vectors(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_simsiam_and_byol_against_their_formulas() -> None:
    p, z = vectors(5, 8, 1), vectors(5, 8, 2)
    cosine = [
        float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))
        for a, b in zip(p.numpy(), z.numpy(), strict=True)
    ]
    assert float(simsiam_loss(p, unit(z))) == pytest.approx(-np.mean(cosine), abs=1e-6)
    squared = (unit(p) - unit(z)).square().sum(dim=1).mean()  # [FedHSSL] Equation 3, first line
    assert float(byol_loss(p, unit(z))) == pytest.approx(float(squared), abs=1e-6)


def test_moco_against_its_formula() -> None:
    p, z, q = vectors(4, 6, 1), unit(vectors(4, 6, 2)), unit(vectors(7, 6, 3))
    expected = []
    for row in range(4):
        query = p[row] / p[row].norm()
        positive = np.exp(float(query @ z[row]) / 0.5)
        negative = sum(np.exp(float(query @ other) / 0.5) for other in q)
        expected.append(-np.log(positive / (positive + negative)))
    got = float(moco_loss(p, z, negatives=q, temperature=0.5))
    assert got == pytest.approx(np.mean(expected), abs=1e-6)


@pytest.mark.parametrize("algorithm", ["simsiam", "byol"])
@pytest.mark.parametrize("secondaries", [1, 2, 5])
def test_average_teaches_what_the_plain_exchange_teaches(algorithm: str, secondaries: int) -> None:
    """Gradients of the primary's network, through the encoding that SplitAvg really uses."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))
    x = vectors(24, 10, 4)
    targets = [unit(vectors(24, 16, 10 + party)) for party in range(secondaries)]
    objective = Objective(algorithm, temperature=0.5, queue=None)  # type: ignore[arg-type]

    def gradients(of: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
        network.zero_grad()
        loss = objective(network(x), of)
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in network.parameters()])

    plain_loss, plain = gradients(targets)
    exact_loss, exact = gradients([torch.stack(targets).mean(dim=0)])
    assert exact_loss == pytest.approx(plain_loss, abs=1e-6)
    assert torch.allclose(exact, plain, rtol=1e-4, atol=1e-7)

    cut = projection_cut(16, parties=secondaries)
    total = InProcessSum()([projection_words(target, cut) for target in targets])
    mean = cut.decode(total, rows=24, active=["x"] * secondaries, round_number=1)
    # Truncation moves every coordinate of every term by less than one step.
    assert float((mean - torch.stack(targets).mean(dim=0)).abs().max()) <= cut.ring.granularity
    _, encoded = gradients([mean])
    # Linear in the target, whose relative error is the step over its coordinates (about 0.2).
    assert float((encoded - plain).norm() / plain.norm()) < 20 * cut.ring.granularity / 0.2


def test_mocos_average_is_another_loss() -> None:
    p, queue = vectors(16, 8, 1), NegativeQueue(32, 8, generator=torch.Generator().manual_seed(0))
    targets = [unit(vectors(16, 8, seed)) for seed in (2, 3)]
    objective = Objective("moco", temperature=0.5, queue=queue)
    plain = float(objective(p, targets))
    averaged = float(objective(p, [torch.stack(targets).mean(dim=0)]))
    # log-sum-exp is convex: the loss of the average lies strictly below.
    assert averaged < plain - 1e-3


def test_queue_drops_the_oldest_first() -> None:
    queue = NegativeQueue(4, 2, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    second = torch.tensor([[0.6, 0.8], [0.8, 0.6]])
    queue.push(first)
    queue.push(second)
    assert queue.vectors.tolist() == [*second[1:].tolist(), *first[1:].tolist(), second[0].tolist()]
    queue.push(torch.cat([first, second]))
    assert sorted(queue.vectors.tolist()) == sorted(torch.cat([first, second])[-4:].tolist())


def test_objective_keeps_its_own_kind_of_negatives() -> None:
    generator = torch.Generator().manual_seed(0)
    cross, local = (
        Objective("moco", temperature=0.5, queue=NegativeQueue(8, 4, generator=generator))
        for _ in range(2)
    )
    assert cross.queue is not None
    assert local.queue is not None
    before = local.queue.vectors.clone()
    cross.remember([unit(vectors(8, 4, 5))])
    assert torch.equal(local.queue.vectors, before)
