"""Steps from pooled trees to a release (``research/frontier/waterfall.py``): links, full length."""

import numpy as np

from research.frontier.waterfall import at_full_length, matched
from securevfl.data.tables import PartyTable


def places(keys: list[float], entities: list[int]) -> PartyTable:
    return PartyTable(
        name="one",
        key_names=("at",),
        keys=np.array(keys)[:, None],
        feature_names=("x",),
        features=np.zeros((len(keys), 1), dtype=np.float32),
        entities=np.array(entities),
    )


def test_a_row_has_its_match_or_the_nearest_of_the_records_that_chose_it() -> None:
    own, other = places([0.0, 10.0, 20.0], [5, 6, 7]), places([9.0, 1.0, 10.5], [7, 5, 8])
    assert matched(own, other, true=True).tolist() == [1, -1, 0]
    assert matched(own, other, true=False).tolist() == [1, 2, -1]


def test_every_vector_has_the_same_length_and_one_score_keeps_its_order() -> None:
    scores = np.random.default_rng(0).normal(size=(50, 1))
    angles = at_full_length(scores)
    assert np.allclose(np.linalg.norm(angles, axis=1), 1)
    assert (np.diff(angles[np.argsort(scores[:, 0]), 0]) >= 0).all()
    several = at_full_length(np.random.default_rng(1).normal(size=(50, 3)))
    assert np.allclose(np.linalg.norm(several, axis=1), 1)
