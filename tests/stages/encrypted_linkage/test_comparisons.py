"""A coordinator may have every pair compared once, and no more."""

import numpy as np
import pytest

from securevfl.core.errors import ProtocolError
from securevfl.stages.encrypted_linkage.blockwise import Comparisons


def asked(*blocks: tuple[list[int], int]) -> None:
    comparisons = Comparisons(5, 7)
    for chosen, others in blocks:
        comparisons.admit(
            [np.array(chosen, dtype=np.int64)], np.array([others]), sender="coordinator"
        )


def test_every_pair_once() -> None:
    """All at once, or in parts."""
    asked((list(range(5)), 7))
    asked(([0, 1], 3), ([2, 3, 4], 7), ([1], 4))


@pytest.mark.parametrize(
    "blocks",
    [
        [([0, 1], 7), ([1], 1)],
        [([0], 8)],
        [([0], 0)],
        [([0], -3)],
        [([0, 0], 2)],
        [([3], 4), ([3], 4)],
    ],
)
def test_more_than_that_is_refused(blocks: list[tuple[list[int], int]]) -> None:
    """Pairs again, more keys than the other has, none, or a key twice in one block."""
    with pytest.raises(ProtocolError, match="coordinator: asks to compare"):
        asked(*blocks)
