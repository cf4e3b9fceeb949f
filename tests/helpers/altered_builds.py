"""Wrong parts, each to stand where a built secondary takes its noise or its samples from."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.dp.class_sums import Moments, noised_moments
from securevfl.dp.ring_noise import ExactDiscreteGaussian, NoiseBuffer, RingNoise
from securevfl.federation.rounds.updates import GradientNoise
from securevfl.linkage.sampling import PoissonSampler

_SEED: Final = 3


def half_of_moments(
    records: npt.NDArray[np.float32], *, radius: float, noise_multiplier: float | None
) -> Moments:
    """Moments behind half the noise that was charged."""
    half = noise_multiplier and noise_multiplier / 2
    return noised_moments(records, radius=radius, noise_multiplier=half)


class LessOfUpdates(GradientNoise):
    """Updates behind two thirds of the noise that was charged."""

    def __init__(self, *, clip_norm: float, noise_std: float) -> None:
        super().__init__(clip_norm=clip_norm, noise_std=noise_std / 1.5)


class LessOfReleases(ExactDiscreteGaussian):
    """Releases behind four fifths of the noise that was charged."""

    def __init__(self, std_units: float) -> None:
        super().__init__(0.8 * std_units)


class PublicNoise(ExactDiscreteGaussian):
    """Noise that whoever knows the seed can subtract."""

    def __init__(self, std_units: float) -> None:
        super().__init__(std_units, insecure_seed=_SEED)


class NinthBlockTwice(NoiseBuffer):
    """Hands out every ninth block twice."""

    def __init__(self, noise: RingNoise) -> None:
        super().__init__(noise)
        self._count = 0
        self._last = torch.zeros(0)

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        self._count += 1
        if self._count % 10 or self._last.shape != tuple(shape):
            self._last = super().sample(shape, device)
        return self._last.clone()


class OneSample(PoissonSampler):
    """One sample, charged as fresh whenever it is asked for."""

    _first: npt.NDArray[np.bool_] | None = None

    def draw(self) -> npt.NDArray[np.bool_]:
        if self._first is None:
            self._first = super().draw()
        return self._first


class PublicSample(PoissonSampler):
    """Samples that whoever knows the seed can draw too."""

    def __init__(self, num_records: int, rate: float, **settings: Any) -> None:
        super().__init__(num_records, rate, **{**settings, "insecure_seed": _SEED})


class LargerSample(PoissonSampler):
    """Samples at twice the rate that was charged."""

    def __init__(self, num_records: int, rate: float) -> None:
        super().__init__(num_records, min(1.0, 2 * rate))
