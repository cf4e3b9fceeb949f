"""ISO noise against the formula that names it: one deviation, set by the longest row.

Every comparison alarms falsely with probability at most 1e-11; all of them together with 2e-10.
"""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.alarms import Alarm, require_noise
from torch import Tensor

from research.fedhssl.methods import with_iso_noise

pytestmark = pytest.mark.statistical

SCALE = 0.4
SHAPES = [(400, 64), (50, 4, 16), (64, 8, 3, 3), (2000,)]


def uneven(shape: tuple[int, ...]) -> Tensor:
    """Return rows whose lengths lie between 0 and some multiple of the shortest."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.linspace(0.1, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=generator) * lengths


def published(values: Tensor) -> float:
    """Return Equation 7's deviation: lambda times the longest row over sqrt(m)."""
    rows = [row.flatten() for row in values]
    longest = max(math.sqrt(float(row.double().square().sum())) for row in rows)
    return SCALE * longest / math.sqrt(rows[0].numel())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_deviation_is_the_published_one(shape: tuple[int, ...]) -> None:
    values = uneven(shape)
    before = values.clone()
    noises = [with_iso_noise(values, SCALE) - values for _ in range(2)]
    assert torch.equal(values, before)
    for noise in noises:
        require_noise(noise, published(values))
    # Two calls share none of it: their difference has the variance of both.
    require_noise(noises[0] - noises[1], math.sqrt(2) * published(values))


def by_own_length(values: Tensor) -> Tensor:
    """Return noise of each row's own size."""
    lengths = values.norm(dim=1, keepdim=True)
    return SCALE * lengths / math.sqrt(values.shape[1]) * torch.randn_like(values)


def by_mean_length(values: Tensor) -> Tensor:
    """Return noise of the mean row's size."""
    return SCALE * values.norm(dim=1).mean() / math.sqrt(values.shape[1]) * torch.randn_like(values)


def undivided(values: Tensor) -> Tensor:
    """Return noise that is not spread over the m numbers of a row."""
    return SCALE * values.norm(dim=1).max() * torch.randn_like(values)


@pytest.mark.parametrize("wrong", [by_own_length, by_mean_length, undivided])
def test_other_norms_are_told_from_it(wrong: Callable[[Tensor], Tensor]) -> None:
    """The test above is sharp enough to tell the formula from its neighbours."""
    values = uneven(SHAPES[0])
    with pytest.raises(Alarm, match="size"):
        require_noise(wrong(values), published(values))


def test_a_seed_decides_nothing() -> None:
    values = uneven((20, 10))
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn.append(with_iso_noise(values, SCALE))
    # Equal by chance with probability below 1e-100.
    assert not torch.equal(*drawn)


def test_no_scale_is_no_noise() -> None:
    values = uneven((20, 10))
    assert with_iso_noise(values, 0.0) is values


def test_a_lone_number_is_a_row() -> None:
    """A parameter without axes, such as a temperature, is noised by its own size."""
    value = torch.tensor(2.0, dtype=torch.float64)
    noise = torch.stack([with_iso_noise(value, SCALE) - value for _ in range(1000)])
    require_noise(noise, 2 * SCALE)
