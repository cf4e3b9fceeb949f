import math

import pytest
import torch

from securevfl.core.errors import ConfigError
from securevfl.dp.clipping import clip_records, clip_rows


def exact_norm(vector: torch.Tensor) -> float:
    """Norm of the float values as they are, without rounding of the sum."""
    return math.sqrt(math.fsum(float(v) ** 2 for v in vector.reshape(-1)))


def test_long_rows_land_just_below_the_clip_norm() -> None:
    """After clipping, the exact norm over (L, H) is at most C and within 1e-5 of it."""
    x = torch.randn(20, 7, 13, generator=torch.Generator().manual_seed(1)) * 5

    clipped = clip_rows(x, 0.7)

    norms = [exact_norm(row) for row in clipped]
    assert max(norms) <= 0.7
    assert min(norms) >= 0.7 * (1 - 1e-5)


def test_short_rows_are_returned_bit_for_bit() -> None:
    """A row well inside the ball is not touched."""
    x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(2)) * 0.01

    assert torch.equal(clip_rows(x, 1.0), x)


def test_direction_is_kept_and_rows_do_not_mix() -> None:
    """Clipping one row scales that row alone."""
    x = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]])

    clipped = clip_rows(x, 1.0)

    assert torch.allclose(clipped[0, 0], torch.tensor([0.6, 0.8]), atol=1e-5)
    assert torch.equal(clipped[1], x[1])


def test_records_are_clipped_one_by_one() -> None:
    """Each record's vector is bounded by C, so their mean is too."""
    x = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(3)) * 9

    clipped = clip_records(x, 0.25)

    norms = [exact_norm(record) for row in clipped for record in row]
    assert max(norms) <= 0.25
    assert min(norms) >= 0.25 * (1 - 1e-5)
    assert max(exact_norm(row) for row in clipped.mean(dim=1)) <= 0.25


def test_the_gradient_is_that_of_the_formula() -> None:
    """Autograd through the clip agrees with finite differences, inside and outside the ball."""
    x = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x[0] *= 0.01
    x.requires_grad_()

    assert torch.autograd.gradcheck(lambda value: clip_rows(value, 0.5), (x,))


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    """A missing link's zero row must not turn the weights into NaN."""
    x = torch.zeros(2, 3, 4, requires_grad=True)

    clip_rows(x, 1.0).sum().backward()

    assert torch.equal(x.grad, torch.ones(2, 3, 4))


@pytest.mark.parametrize("value", [1e30, 3e38, 1e-38])
def test_extreme_values_stay_within_the_bound(value: float) -> None:
    """Squares that overflow or vanish in float32 do not break the bound."""
    clipped = clip_rows(torch.full((1, 50, 100), value), 1.0)

    assert exact_norm(clipped) <= 1.0
    assert torch.isfinite(clipped).all()


def test_a_long_row_keeps_the_bound_after_float32_rounding() -> None:
    """Half a million coordinates, where a float32 norm would err by more than the margin."""
    x = torch.rand(1, 500, 1000, generator=torch.Generator().manual_seed(5)) + 0.5

    assert float(clip_rows(x, 1.0).double().norm()) <= 1.0


def test_nan_is_not_hidden() -> None:
    """A NaN comes out as NaN, so that the codec refuses it."""
    x = torch.ones(1, 2, 2)
    x[0, 0, 0] = math.nan

    assert torch.isnan(clip_rows(x, 1.0)).any()


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_clip_norm_is_refused(clip_norm: float) -> None:
    """The message names the argument."""
    with pytest.raises(ConfigError, match="clip_norm must be finite and > 0"):
        clip_rows(torch.ones(1, 1, 1), clip_norm)


def test_half_precision_is_widened() -> None:
    """Factors near 1 round away in half precision, and lengths would exceed C."""
    rows = 100 * torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    clipped = clip_rows(rows.half(), 1.0)
    assert clipped.dtype == torch.float32
    assert torch.equal(clipped, clip_rows(rows.half().float(), 1.0))
