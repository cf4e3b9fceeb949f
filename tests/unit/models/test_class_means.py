"""Directions of class means: they point at the class that a record is nearest to."""

import numpy as np

from securevfl.models.frozen import MOST_NUMBERS, PROJECTED, class_directions, public_projection


def test_a_record_at_a_class_mean_points_at_that_class() -> None:
    means = np.array([[1.0, 0, 0], [-1, 1, 0], [0, -1, 0], [0, 0, 0]])
    counts = np.array([10.0, 10, 10, 30])
    found = class_directions(counts, means)
    released = (means[:-1] - found.centre) @ found.weights
    assert released.argmax(axis=1).tolist() == [0, 1, 2]


def test_wide_records_are_projected_alike_by_everybody_who_knows_the_seed() -> None:
    """And narrow ones stay as they are; directions are orthonormal, so lengths do not grow."""
    assert np.array_equal(public_projection(MOST_NUMBERS, seed=1), np.eye(MOST_NUMBERS))
    wide = public_projection(200, seed=1)
    assert wide.shape == (200, PROJECTED)
    np.testing.assert_allclose(wide.T @ wide, np.eye(PROJECTED), atol=1e-12)
    assert np.array_equal(wide, public_projection(200, seed=1))
    assert not np.array_equal(wide, public_projection(200, seed=2))
