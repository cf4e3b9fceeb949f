"""FedSim's Delta, worked out by hand."""

import numpy as np
import pytest

from research.fedsim.delta import estimated_improvement, scaled_similarities
from securevfl.core.errors import DataError
from securevfl.linkage.links import LinkTable

# Distances 0 to 4 become similarities 1, 0.75, 0 and 0.5, 0.25, none.
LINKS = LinkTable(
    indices=np.array([[5, 6, 7], [8, 9, -1]]),
    distances=np.array([[0.0, 1.0, 4.0], [2.0, 3.0, np.inf]]),
)


@pytest.mark.parametrize(
    ("over", "delta"),
    [
        # Row by row: a match adds 1 - s, any other link adds s.
        ("exact", ((0 + 0.75 + 0) + (0.5 + 0.25)) / 2),
        ("top1sim", ((0 + 0.75 + 0) + (0.5 + 0.25)) / 2),
        ("avgsim", ((0 + 0.25 + 1) + (0.5 + 0.75)) / 2),
    ],
)
def test_definition_1(over: str, delta: float) -> None:
    """[FedSim] Definition 1 on two rows; an absent link counts nothing."""
    assert estimated_improvement(LINKS, over=over) == pytest.approx(delta)


def test_similarities_run_from_1_to_0() -> None:
    """The nearest link of all has 1, the farthest 0, an absent one 0."""
    assert scaled_similarities(LINKS).tolist() == [[1.0, 0.75, 0.0], [0.5, 0.25, 0.0]]


def test_equally_far_links_lose_nothing_to_an_average() -> None:
    """All alike: avgsim uses what there is, top1sim loses the other links."""
    same = LinkTable(indices=np.arange(6).reshape(2, 3), distances=np.ones((2, 3)))
    assert estimated_improvement(same, over="avgsim") == 0
    assert estimated_improvement(same, over="top1sim") == 2


def test_what_cannot_be_estimated() -> None:
    """Without a link there is nothing to scale."""
    none = LinkTable(indices=np.full((1, 1), -1), distances=np.full((1, 1), np.inf))
    with pytest.raises(DataError, match="no links"):
        estimated_improvement(none, over="avgsim")
