"""Links of at most some distance."""

import numpy as np

from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.sampling import eligible_pairs


def test_pairs_and_links_within_a_distance_are_the_same() -> None:
    """Dropping long pairs, then linking, is linking, then dropping long links."""
    random = np.random.default_rng(3)
    metric = EuclideanKeys(
        primary=random.uniform(size=(20, 2)), records=random.uniform(size=(9, 2))
    )
    pairs, rows = eligible_pairs(metric, cap=6), np.arange(20)
    limit = float(np.median(pairs.distances))
    short, long = pairs.within(limit).links(rows, 9), pairs.links(rows, 9).within(limit)

    assert 0 < short.present.sum() < len(pairs.records)
    np.testing.assert_array_equal(short.indices, long.indices)
    np.testing.assert_array_equal(short.distances, long.distances)
    assert not pairs.links(rows, 9).within(0.0).present.any()
