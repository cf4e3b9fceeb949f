"""Steps from pooled trees to a release (``research/frontier/waterfall.py``): links, full length."""

import runpy
from typing import Any

import numpy as np
import pytest
from helpers.scripts import SCRIPTS

from securevfl.data.tables import PartyTable


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return runpy.run_path(str(SCRIPTS / "frontier" / "waterfall.py"))


def places(keys: list[float], entities: list[int]) -> PartyTable:
    return PartyTable(
        name="one",
        key_names=("at",),
        keys=np.array(keys)[:, None],
        feature_names=("x",),
        features=np.zeros((len(keys), 1), dtype=np.float32),
        entities=np.array(entities),
    )


def test_a_row_has_its_match_or_the_nearest_of_the_records_that_chose_it(
    script: dict[str, Any],
) -> None:
    own, other = places([0.0, 10.0, 20.0], [5, 6, 7]), places([9.0, 1.0, 10.5], [7, 5, 8])
    assert script["matched"](own, other, true=True).tolist() == [1, -1, 0]
    assert script["matched"](own, other, true=False).tolist() == [1, 2, -1]


def test_every_vector_has_the_same_length_and_one_score_keeps_its_order(
    script: dict[str, Any],
) -> None:
    scores = np.random.default_rng(0).normal(size=(50, 1))
    angles = script["at_full_length"](scores)
    assert np.allclose(np.linalg.norm(angles, axis=1), 1)
    assert (np.diff(angles[np.argsort(scores[:, 0]), 0]) >= 0).all()
    several = script["at_full_length"](np.random.default_rng(1).normal(size=(50, 3)))
    assert np.allclose(np.linalg.norm(several, axis=1), 1)
