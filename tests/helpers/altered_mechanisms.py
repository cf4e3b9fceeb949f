"""Wrong mechanisms: each changes a secondary, or the exchange, after it was built as installed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from securevfl.dp.ring_noise import ExactDiscreteGaussian, RingNoise
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.secondary import Secondary


class SameForAllRows:
    """One row's noise for every row of a round."""

    def __init__(self, noise: RingNoise) -> None:
        self.noise = noise
        self.std_units = noise.std_units

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        return self.noise.sample((1, *shape[1:]), device).expand(tuple(shape)).clone()


class SameForAllCoordinates(SameForAllRows):
    """One number for every coordinate of a row."""

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        return self.noise.sample((shape[0], 1, 1), device).expand(tuple(shape)).clone()


class SameInEveryRound(SameForAllRows):
    """The first round's noise in every round."""

    first: Tensor | None = None

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        if self.first is None:
            self.first = self.noise.sample(shape, device)
        return self.first.clone()


class HalfOfTheRowsAgain(SameForAllRows):
    """The second half of a round's rows gets the noise of the first half."""

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        half = self.noise.sample((-(-shape[0] // 2), *shape[1:]), device)
        return torch.cat([half, half])[: shape[0]].clone()


class Uniform(SameForAllRows):
    """Uniform noise of the promised variance."""

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        width = self.std_units * 12**0.5
        return ((torch.rand(tuple(shape)) - 0.5) * width).round().to(torch.int32)


def wrapped(kind: Callable[[RingNoise], RingNoise]) -> Callable[[Secondary], None]:
    """Return an alteration that wraps the noise of every secondary."""

    def alter(secondary: Secondary) -> None:
        secondary.contribution.noise = kind(noise_of(secondary))

    return alter


def noise_of(secondary: Secondary) -> RingNoise:
    """Return a secondary's noise, which it must have."""
    noise = secondary.contribution.noise
    assert noise is not None
    return noise


def replace_clip(secondary: Secondary, clip: Callable[[Tensor], Tensor]) -> None:
    """Put another function in the place of a secondary's clip."""
    vars(secondary.contribution.aggregation)["clip"] = clip


def at_the_first(alter: Callable[[Secondary], None]) -> Callable[[Secondary], None]:
    """Return an alteration of one secondary only."""

    def alter_first(secondary: Secondary) -> None:
        if secondary.name == "secondary-1":
            alter(secondary)

    return alter_first


def scaled(factor: float) -> Callable[[Secondary], None]:
    """Return an alteration that scales every noise share."""

    def alter(secondary: Secondary) -> None:
        std = noise_of(secondary).std_units
        secondary.contribution.noise = ExactDiscreteGaussian(std * factor)

    return alter


def without_noise(secondary: Secondary) -> None:
    secondary.contribution.noise = None


def noise_at_the_first_only(secondary: Secondary) -> None:
    if secondary.name != "secondary-1":
        secondary.contribution.noise = None


def one_seed(secondary: Secondary) -> None:
    std = noise_of(secondary).std_units
    secondary.contribution.noise = ExactDiscreteGaussian(std, insecure_seed=1)


def no_clip(secondary: Secondary) -> None:
    replace_clip(secondary, lambda representation: representation)


def clip_of_the_batch(secondary: Secondary) -> None:
    limit = secondary.contribution.aggregation.clip_norm
    replace_clip(secondary, lambda x: x * (limit / x.norm().clamp_min(limit)) * (1 - 1e-6))


def clip_to_the_batch_mean(secondary: Secondary) -> None:
    """The batch as a whole gets the norm that its rows (or records) could have together."""
    limit = secondary.contribution.aggregation.clip_norm

    def clip(x: Tensor) -> Tensor:
        dim = 2 if secondary.contribution.aggregation.pooled else (1, 2)
        mean = torch.linalg.vector_norm(x, dim=dim, keepdim=True).square().mean().sqrt()
        return x * (limit / mean.clamp_min(limit))

    replace_clip(secondary, clip)


def clip_by_the_longest(secondary: Secondary) -> None:
    limit = secondary.contribution.aggregation.clip_norm

    def clip(x: Tensor) -> Tensor:
        dim = 2 if secondary.contribution.aggregation.pooled else (1, 2)
        longest = torch.linalg.vector_norm(x, dim=dim).max()
        return x * (limit / longest.clamp_min(limit)) * (1 - 1e-6)

    replace_clip(secondary, clip)


def clip_of_the_wrong_part(secondary: Secondary) -> None:
    """Pooled rows: the mean is clipped, not its records. Other rows: one position by itself."""
    limit = secondary.contribution.aggregation.clip_norm

    def clip(x: Tensor) -> Tensor:
        if not secondary.contribution.aggregation.pooled:
            norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
            return x * (limit / norm.clamp_min(limit))
        mean = x.mean(dim=1, keepdim=True)
        norm = torch.linalg.vector_norm(mean, dim=2, keepdim=True)
        return (mean * (limit / norm.clamp_min(limit))).expand_as(x) * (1 - 1e-6)

    replace_clip(secondary, clip)


class NoiseAfterTheDivision(SimulatedExchange):
    """An exchange that adds all parties' shares to the average instead of to its terms."""

    def __init__(self, exchange: SimulatedExchange) -> None:
        super().__init__(exchange.secondaries, exchange.cut)
        parties = exchange.secondaries.values()
        self.shares = [noise_of(party) for party in parties]
        for party in parties:
            without_noise(party)

    def average(self, plan: RoundPlan) -> Tensor:
        average = super().average(plan)
        noise = torch.stack([share.sample(average.shape) for share in self.shares]).sum(0)
        return average + noise * (self.cut.ring.granularity / self.cut.slots)
