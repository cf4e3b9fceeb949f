"""SplitAvg on shares comes to the masked sum, and no share shows a secondary's words."""

import pytest
import torch
from helpers.queue_star import QueueStar, run_parties
from helpers.ring_keys import random_pair_keys

from securevfl.mpc.codec import SumTo
from securevfl.mpc.crypten_bridge import CrypTenSumTo
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.on_shares import Seat, SharedSum


@pytest.mark.parametrize("active", [(1, 2), (1, 2, 3), (2, 5), (1, 2, 3, 5)])
def test_words_added_up_on_shares_come_to_the_masked_sum(active: tuple[int, ...]) -> None:
    """Of all secondaries, or of some."""
    world = (1, 2, 3, 5)
    star, keys = QueueStar(world), random_pair_keys(world)
    sums = {
        rank: SharedSum(
            star.wire(rank),
            PairwiseMasks(rank, keys[rank]),
            Seat(rank=rank, world=world, pair_keys=keys[rank], context=b"a test"),
        )
        for rank in world
    }
    words = {rank: torch.randint(-(2**62), 2**62, (50,)) for rank in active}
    run_parties(
        {
            rank: lambda rank=rank: sums[rank](words[rank].clone(), round_number=1, active=active)
            for rank in active
        }
    )
    zeros = torch.zeros(50, dtype=torch.int64)
    total = CrypTenSumTo(star.wire(0), None)(zeros, round_number=1, active=active)

    assert torch.equal(total, sum(words.values()))
    for rank in active:
        assert not set(star.seen[rank][0].tolist()) & set(words[rank].tolist())
    assert isinstance(sums[1], SumTo)
