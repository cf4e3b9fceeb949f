"""Updates of dp-trained encoders as a stranger would test them: the right ones pass, altered fail.

A model whose row gradients are known is taught by real lessons. What is seen is the gradient that
the optimizer would get. All tests together alarm falsely with probability at most 1e-9.
"""

import math

import pytest
import torch
from scipy.stats import chi2, norm
from torch import Tensor, nn

from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.rounds.updates import (
    DropoutStream,
    GradientNoise,
    LinkedRecords,
    PrivateBackwardStep,
    RowGradients,
)

FALSE_ALARM = 2.5e-10
UPDATES, ROWS, WIDTH = 10, 8, 2000
CLIP, NOISE = 50.0, 1.0


pytestmark = pytest.mark.statistical


class Scaled(nn.Module):
    """Releases its weights, which are zero, times one feature of the row's only record."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        del keys
        return self.weight * features[:, :1, :1] * present[:, :1, None]


def sum_format_of(noise: GradientNoise, lengths: list[float]) -> Tensor:
    """Return what updates add up to, of rows whose gradients have these lengths along one axis."""
    bottom = Scaled()
    records = LinkedRecords(
        features=torch.ones(ROWS, 1, 1),
        keys=torch.zeros(ROWS, 1, 1),
        present=torch.ones(ROWS, 1, dtype=torch.bool),
    )
    wanted = torch.zeros(ROWS, 1, WIDTH)
    wanted[:, 0, 0] = torch.tensor(lengths) / ROWS
    found = []
    for _ in range(UPDATES):
        rows = RowGradients(
            bottom,
            records,
            forward=bottom,
            clip_norm=1.0,
            noise=noise,
            stream=DropoutStream(0, "bank", device=torch.device("cpu")),
        )
        lesson = PrivateBackwardStep(bottom, rows.total, noise=noise)
        lesson.gradients_from(wanted)
        assert bottom.weight.grad is not None
        found.append(bottom.weight.grad.double() * ROWS)
    return torch.stack(found)


def alarms(make: type[GradientNoise]) -> set[str]:
    """Return the tests that fail."""
    failed = set()
    quiet = sum_format_of(make(clip_norm=CLIP, noise_std=NOISE), [0.0] * ROWS) / NOISE
    squares, count = float(quiet.square().sum()), quiet.numel()
    if not chi2.ppf(FALSE_ALARM / 2, count) < squares < chi2.isf(FALSE_ALARM / 2, count):
        failed.add("size")
    # Sums of n products of neighbours, 6.96 sqrt(n) at most: by the bound of helpers.alarms, 7e-11
    # for both sides from 18,000 on.
    reach = norm.isf(FALSE_ALARM / 2) * 1.1
    for name, one, other in (
        ("own noise each update", quiet[:-1], quiet[1:]),
        ("own noise each coordinate", quiet[:, :-1], quiet[:, 1:]),
    ):
        if abs(float((one * other).sum())) > reach * math.sqrt(one.numel()):
            failed.add(name)
    # One row far too long, the others half the clip the other way: -2.5 clips in all.
    long = sum_format_of(make(clip_norm=CLIP, noise_std=NOISE), [1e4] + [-CLIP / 2] * (ROWS - 1))
    expected = CLIP - (ROWS - 1) * CLIP / 2
    if abs(float(long[:, 0].mean()) - expected) > reach * NOISE / math.sqrt(UPDATES) + 0.01:
        failed.add("each row clipped by itself")
    return failed


class TooLittle(GradientNoise):
    """Noise for the root of two rows where two rows add up."""

    def __init__(self, *, clip_norm: float, noise_std: float) -> None:
        super().__init__(clip_norm=clip_norm, noise_std=noise_std / math.sqrt(2))


class Reused(GradientNoise):
    """The same noise in every update: two updates' difference has none."""

    def add_noise(self, total: Tensor) -> Tensor:
        units = NOISE / self.granularity
        drawn = ExactDiscreteGaussian(units, insecure_seed=1).sample(total.shape)
        return ((total + drawn) * self.granularity).float()


class OneNumber(GradientNoise):
    """One number of noise for all coordinates."""

    def add_noise(self, total: Tensor) -> Tensor:
        return ((total + self._noise.sample((1,))) * self.granularity).float()


class NoNoise(GradientNoise):
    """The sum as it is."""

    def add_noise(self, total: Tensor) -> Tensor:
        return (total * self.granularity).float()


class Unclipped(GradientNoise):
    """Rows as long as they come."""

    def units(self, rows: Tensor) -> Tensor:
        return (rows.double() / self.granularity).trunc().sum(dim=0)


class ClippedTogether(GradientNoise):
    """The batch's sum is clipped, as in DP for batches, not its rows."""

    def units(self, rows: Tensor) -> Tensor:
        return super().units(rows.sum(dim=0, keepdim=True))


class ScaledByTheLongest(GradientNoise):
    """All rows are scaled by what the longest one needs."""

    def units(self, rows: Tensor) -> Tensor:
        return super().units(rows * (CLIP / rows.norm(dim=1).max().clamp_min(CLIP)))


def test_the_right_updates_pass() -> None:
    """Four tests at 2.5e-10 each."""
    assert alarms(GradientNoise) == set()


@pytest.mark.parametrize(
    ("altered", "test"),
    [
        (TooLittle, "size"),
        (NoNoise, "size"),
        (Reused, "own noise each update"),
        (OneNumber, "own noise each coordinate"),
        (Unclipped, "each row clipped by itself"),
        (ClippedTogether, "each row clipped by itself"),
        (ScaledByTheLongest, "each row clipped by itself"),
    ],
)
def test_altered_updates_fail(altered: type[GradientNoise], test: str) -> None:
    """Each alteration fails at least the test that is there for it."""
    assert test in alarms(altered)
