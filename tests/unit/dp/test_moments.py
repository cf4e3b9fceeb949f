"""Count, mean and covariance behind noise: what one record can change, and how much noise."""

import math

import numpy as np
import pytest
import torch
from helpers.alarms import FALSE_ALARM, require_noise
from scipy.stats import chi2

from securevfl.core.errors import PrivacyError
from securevfl.dp.class_sums import integer_records, largest_length, noised_moments, symmetric_noise


def lengths_of(change: np.ndarray) -> float:
    """Return the length of a symmetric matrix with what is off its diagonal counted sqrt(2)."""
    return float(np.linalg.norm(change))


@pytest.mark.parametrize("bits", [4, 7, 12])
@pytest.mark.parametrize("features", [1, 2, 3, 17])
def test_no_record_changes_the_sums_by_more_than_the_bound(bits: int, features: int) -> None:
    """Exhaustively: every record of every small table is taken away, in the integers summed."""
    draw = np.random.default_rng(1000 * bits + features)
    radius = math.sqrt(features)
    corners = np.array(np.meshgrid(*[[-1.0, 0.3, 1.0]] * min(features, 3))).reshape(-1, 1)
    tables = [
        draw.uniform(-1, 1, (7, features)),
        draw.normal(size=(7, features)) * 100,  # far outside the ball
        np.resize(corners, (9, features)),
        np.zeros((3, features)),
    ]
    for table in tables:
        units = integer_records(table.astype(np.float32), radius=radius, bits=bits)
        assert np.array_equal(units, np.round(units))
        whole = units.T @ units
        for gone in range(len(table)):
            rest = np.delete(units, gone, axis=0)
            change = lengths_of(whole - rest.T @ rest)
            assert change <= largest_length(radius=radius, bits=bits)
    # And the bound is nearly reached: a looser one would be noise for nothing.
    full = integer_records(np.ones((1, features), np.float32), radius=radius, bits=bits)
    reached = lengths_of(full.T @ full) / largest_length(radius=radius, bits=bits)
    assert reached > 0.75 if bits < 12 else reached > 0.999


def test_without_noise_they_are_the_moments() -> None:
    """To the rounding of a unit, 2^-12."""
    table = np.random.default_rng(3).uniform(-1, 1, (500, 5)).astype(np.float32)
    moments = noised_moments(table, radius=math.sqrt(5), noise_multiplier=None)

    assert moments.count == 500
    np.testing.assert_allclose(moments.mean, table.mean(axis=0), atol=3e-4)
    np.testing.assert_allclose(moments.covariance, np.cov(table.T, bias=True), atol=1e-3)
    assert moments.spread == 0


@pytest.mark.statistical
def test_noise_has_the_deviations_that_the_accounting_assumes() -> None:
    """All entries of 30 matrices of 40 x 40: each comparison fails by chance once in 1e11."""
    matrices = [symmetric_noise(40, std=1000.0) for _ in range(30)]
    diagonal = np.concatenate([np.diag(matrix) for matrix in matrices])
    upper = np.concatenate([matrix[np.triu_indices(40, 1)] for matrix in matrices])

    assert all(np.array_equal(matrix, matrix.T) for matrix in matrices)
    for values, std in ((diagonal, 1000.0), (upper, 1000.0 / math.sqrt(2))):
        require_noise(torch.from_numpy(values), std)


@pytest.mark.statistical
def test_noise_is_scaled_to_the_bound() -> None:
    """The noised count of an empty table spreads as z times the bound says: 400 draws, 1e-11."""
    empty = np.zeros((1000, 3), np.float32)
    counts = [
        noised_moments(empty, radius=2.0, noise_multiplier=5.0).count - 1000 for _ in range(400)
    ]
    # S_00 counts (R/2)^2 a record; the bound is 5/4 R^2: 5 a record's worth at z = 1.
    chi_square = float(np.square(counts).sum()) / 25.0**2
    least, most = chi2.ppf(FALSE_ALARM / 2, 400), chi2.isf(FALSE_ALARM / 2, 400)
    assert least - 8 < chi_square < most + 8  # rounding of R/2 and of the sum


def test_noise_that_drowns_every_record_is_refused() -> None:
    """No unit is coarse enough to draw it, and nothing could be fitted to the rest."""
    with pytest.raises(PrivacyError, match=r"raise the share"):
        noised_moments(np.zeros((5, 100), np.float32), radius=10.0, noise_multiplier=1e5)


def test_values_that_are_not_finite_are_refused() -> None:
    """NaN would pass any comparison that is not written for it."""
    with pytest.raises(PrivacyError, match="not finite"):
        noised_moments(np.array([[math.nan, 0.0]], np.float32), radius=1.0, noise_multiplier=1.0)
