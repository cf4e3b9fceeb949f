"""DP-SGD's step: what one record can change of the sum, exhaustively, and the noise upon it."""

import math

import pytest
import torch
from helpers.alarms import require_noise

from securevfl.dp.private_sgd import NoisedGradientSum


def test_no_record_moves_the_sum_by_more_than_the_clip_norm() -> None:
    """Every record of small samples is taken away, in float64 multiples of the unit: exact."""
    mechanism = NoisedGradientSum(clip_norm=0.1, noise_multiplier=None)
    generator = torch.Generator().manual_seed(4)
    for scale in (1e-3, 0.1, 10.0, 1e6):
        gradients = scale * torch.randn(6, 9, generator=generator, dtype=torch.float64)
        whole = mechanism(gradients)
        for gone in range(6):
            rest = torch.cat([gradients[:gone], gradients[gone + 1 :]])
            assert float((whole - mechanism(rest)).norm()) <= 0.1


def test_short_gradients_pass_and_long_ones_keep_their_direction() -> None:
    """To the rounding of a unit, 2^-16 a coordinate."""
    mechanism = NoisedGradientSum(clip_norm=1.0, noise_multiplier=None)
    short, long = torch.tensor([[0.3, -0.4]]), torch.tensor([[30.0, -40.0]])

    torch.testing.assert_close(mechanism(short), short[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(mechanism(long), 2 * short[0], atol=2e-5, rtol=0)


@pytest.mark.statistical
def test_noise_has_the_promised_deviation_whatever_the_sample() -> None:
    """4,000 coordinates, of records and of none; each comparison fails by chance once in 1e9."""
    mechanism = NoisedGradientSum(clip_norm=0.1, noise_multiplier=3.0)
    for gradients in (torch.zeros(5, 4000), torch.zeros(0, 4000)):
        require_noise(mechanism(gradients), 0.1 * 3.0)


def test_gradients_that_are_not_finite_count_as_zero() -> None:
    """As if their records were not there: an error would say that they are."""
    mechanism = NoisedGradientSum(clip_norm=1.0, noise_multiplier=None)
    for value in (math.nan, math.inf, -math.inf):
        total = mechanism(torch.tensor([[0.5, 0.25], [0.0, value], [value, 1e30]]))
        assert torch.equal(total, torch.tensor([0.5, 0.25]))
