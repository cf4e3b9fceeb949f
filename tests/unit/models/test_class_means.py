"""Directions of class means: they point at the class that a record is nearest to."""

import numpy as np

from securevfl.models.frozen import Directions, RecordShape, class_directions


def test_a_record_at_a_class_mean_points_at_that_class() -> None:
    means = np.array([[1.0, 0, 0], [-1, 1, 0], [0, -1, 0], [0, 0, 0]])
    counts = np.array([10.0, 10, 10, 30])
    found = class_directions(counts, means)
    released = (means[:-1] - found.centre) @ found.weights
    assert released.argmax(axis=1).tolist() == [0, 1, 2]


def test_directions_of_arranged_records_are_directions_of_features() -> None:
    rng = np.random.default_rng(3)
    shape = RecordShape(features=6, words=((4, 1), (2,)))
    features = rng.choice([-1.0, 1.0], size=(9, 6))
    arranged = shape.arrange(features)
    lengths = 0.8 * np.sqrt([2, 2, 1])
    np.testing.assert_allclose(arranged[:, 3:], (features[:, [4, 1, 2]] + 1) / 2 * lengths)
    directions = Directions(centre=rng.normal(size=6), weights=rng.normal(size=(6, 3)))
    restored = shape.restore(directions)
    np.testing.assert_allclose(
        (features - restored.centre) @ restored.weights,
        (arranged - directions.centre) @ directions.weights,
    )
