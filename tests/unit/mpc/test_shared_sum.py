"""SplitAvg on shares: equal to the masked sum, and rows or noise that are too long are named."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.computing import CONTEXT, DealerHere, members
from helpers.queue_star import QueueStar, run_parties
from helpers.ring_keys import random_pair_keys

from securevfl.core.errors import EncodingRangeError, ProtocolError
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.mpc import shared_sum
from securevfl.mpc.clip_limits import ClipLimits
from securevfl.mpc.crypten_bridge import CrypTenSumTo
from securevfl.mpc.dealt_tuples import TupleDealer
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.shared_sum import SharedSum
from securevfl.mpc.sum_to import SumTo

CLIP, SIGMA, ROWS, NUMBERS = 1 << 16, 3000.0, 24, 8
NAMES = {1: "shop", 2: "clinic", 3: "bank", 5: "school"}


def limits(world: tuple[int, ...], *, sigma: float = SIGMA, rows: int = ROWS) -> ClipLimits:
    return ClipLimits.of(
        clip_units=CLIP, noise_std_units=sigma, rows=rows, numbers=NUMBERS, parties=len(world)
    )


def parts_of(rank: int, *, sigma: float = SIGMA, rows: int = ROWS) -> torch.Tensor:
    """Rows as long as the clip allows, and noise."""
    direction = torch.randn(
        rows, NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    units = (direction / direction.norm(dim=1, keepdim=True) * CLIP).trunc().long()
    noise = torch.zeros_like(units)
    if sigma:
        noise = ExactDiscreteGaussian(sigma).sample(units.shape).long()
    return torch.stack([units, noise])


class World:
    """Secondaries that add up on shares, and the primary that gets the sum."""

    def __init__(self, world: tuple[int, ...]) -> None:
        self.world, self.star = world, QueueStar(world)
        self.dealer = DealerHere(TupleDealer(world, CONTEXT))
        keys = random_pair_keys(world)
        self.primary = CrypTenSumTo(self.star.wire(0), None)
        self.sums = {
            rank: SharedSum(
                CrypTenSumTo(self.star.wire(rank), PairwiseMasks(rank, keys[rank])),
                seat,
                names=NAMES,
                limits=self.limits,
            )
            for rank, seat in members(world, dealer=self.dealer).items()
        }

    def limits(self, *, rows: int) -> ClipLimits:
        assert rows == ROWS
        return self.within

    def checked(
        self,
        parts: dict[int, torch.Tensor],
        *,
        number: int = 1,
        active: tuple[int, ...] = (),
        **how: Any,
    ) -> dict[int, Any]:
        active = active or self.world
        self.within = limits(self.world, **how)

        def contribute(rank: int) -> Any:
            try:
                share = self.sums[rank].checked(parts[rank], round_number=number, active=active)
            except ProtocolError as error:
                return error
            return self.sums[rank](share, round_number=number + 1000, active=active)

        ended = run_parties({rank: lambda rank=rank: contribute(rank) for rank in active})
        if all(end is None for end in ended.values()):
            zeros = torch.zeros(parts[active[0]][0].numel(), dtype=torch.int64)
            ended[0] = self.primary(zeros, round_number=number + 1000, active=active)
        return ended


@pytest.mark.parametrize("world", [(1, 2), (1, 2, 3), (1, 2, 3, 5)])
def test_words_added_up_on_shares_come_to_the_masked_sum(world: tuple[int, ...]) -> None:
    those = World(world)
    words = {rank: torch.randint(-(2**62), 2**62, (50,)) for rank in world}
    run_parties(
        {
            rank: lambda rank=rank: those.sums[rank](
                words[rank].clone(), round_number=1, active=world
            )
            for rank in world
        }
    )
    zeros = torch.zeros(50, dtype=torch.int64)
    total = those.primary(zeros, round_number=1, active=world)

    assert torch.equal(total, sum(words.values()))
    for rank in world:
        assert not set(those.star.seen[rank][0].tolist()) & set(words[rank].tolist())
    assert isinstance(those.sums[1], SumTo)


@pytest.mark.parametrize("sigma", [0.0, SIGMA])
@pytest.mark.parametrize("world", [(1, 2), (1, 3, 5)])
def test_rows_within_the_clip_are_added_up(world: tuple[int, ...], sigma: float) -> None:
    """Of every active secondary, round after round; the sum is exact."""
    those = World(world)
    for number in (1, 2):
        parts = {rank: parts_of(rank, sigma=sigma) for rank in world}
        ended = those.checked(parts, number=number, sigma=sigma)
        assert torch.equal(ended[0], sum(parts.values()).sum(0).flatten()), ended
    # The first round asks for one thing after another, the next one for all at once.
    assert len(set(those.dealer.asked[:-1])) == 1
    assert those.dealer.asked[-1] == len(those.dealer.asked) - 1 > 5


def test_some_secondaries_may_be_active() -> None:
    those = World((1, 2, 3))
    parts = {rank: parts_of(rank) for rank in (2, 3)}
    ended = those.checked(parts, active=(2, 3))
    assert torch.equal(ended[0], sum(parts.values()).sum(0).flatten())


def ten_times(parts: torch.Tensor) -> torch.Tensor:
    parts[0] *= 10
    return parts


def one_row_a_little(parts: torch.Tensor) -> torch.Tensor:
    """A hundredth of the clip, in one row of all."""
    parts[0, 7] = (parts[0, 7].double() * 1.01).long()
    return parts


def hidden_in_noise(parts: torch.Tensor) -> torch.Tensor:
    """Ten times the clip, said to be noise."""
    parts[1, 3] += 10 * parts[0, 3]
    return parts


def a_square_that_wraps(parts: torch.Tensor) -> torch.Tensor:
    """The square of 2^32 is 0 in the ring."""
    parts[0, 5, 2] = 1 << 32
    return parts


def squares_that_add_up_to_nothing(parts: torch.Tensor) -> torch.Tensor:
    """Four numbers whose squares add up to 2^64; the rest of the row is 0."""
    parts[0, 5] = 0
    parts[0, 5, :4] = 1 << 31
    return parts


def noise_that_wraps(parts: torch.Tensor) -> torch.Tensor:
    parts[1, 0, 0] = -(1 << 62)
    return parts


LIES = [
    ten_times,
    one_row_a_little,
    hidden_in_noise,
    a_square_that_wraps,
    squares_that_add_up_to_nothing,
    noise_that_wraps,
]


@pytest.mark.parametrize("world", [(1, 2), (1, 2, 3)])
@pytest.mark.parametrize("lie", LIES)
def test_a_secondary_that_shares_too_much_is_named(lie: Any, world: tuple[int, ...]) -> None:
    those = World(world)
    parts = {rank: parts_of(rank) for rank in world}
    parts[2] = lie(parts[2])

    ended = those.checked(parts)

    for end in ended.values():
        assert "rows or noise of 'clinic' are longer than privacy.clip_norm" in str(end)
    assert all(seen == [] for seen in those.star.seen.values())


@pytest.mark.parametrize("lies", [False, True])
def test_a_table_in_one_go_is_projected_piece_by_piece(
    lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five pieces, in the last of which a square wraps; only projections find that."""
    monkeypatch.setattr(shared_sum, "_DRAWN_AT_ONCE", ROWS * NUMBERS // 5 + 1)
    those = World((1, 2))
    parts = {rank: parts_of(rank) for rank in (1, 2)}
    if lies:
        parts[2][0, -1, -1] = 1 << 32
    ended = those.checked(parts)
    if lies:
        assert "rows or noise of 'clinic' are longer" in str(ended[1])
    else:
        assert torch.equal(ended[0], sum(parts.values()).sum(0).flatten())


def test_two_that_share_too_much_are_both_named() -> None:
    those = World((1, 2, 3))
    parts = {1: ten_times(parts_of(1)), 2: parts_of(2), 3: ten_times(parts_of(3))}
    assert "of 'shop' and 'bank' are" in str(those.checked(parts)[2])


def test_nothing_but_the_outcome_is_opened_in_clear() -> None:
    """All that travels is uniform: no array has a number of the rows, or one twice."""
    those = World((1, 2))
    parts = {rank: parts_of(rank) for rank in (1, 2)}
    lines = those.sums[1]._seat.lines.lines
    those.checked(parts)

    words = np.concatenate([values.reshape(-1) for _, _, values in lines.seen])
    # The outcome is 0, which two shares that are opened at last are equal for.
    assert len(words) - 2 <= len(set(words.tolist()))
    assert len(words) > 1000
    assert not set(words.tolist()) & {*parts[1].flatten().tolist(), *parts[2].flatten().tolist()}


def test_blocks_shrink_until_no_square_can_wrap() -> None:
    """Many rows, and noise far above the clip; noise that is too large is refused."""
    wide = ClipLimits.of(
        clip_units=2**10, noise_std_units=2.0**17, rows=1024, numbers=512, parties=2
    )
    assert wide.block < 1024
    for bits in (wide.row_bits, wide.noise_bits):
        assert 2 * bits + math.log2(512) <= 63
    assert wide.noise_square > 2**34 * 512
    assert limits((1, 2, 3), rows=(1 << 27) // (6 * NUMBERS)).block > 1
    with pytest.raises(EncodingRangeError, match=r"lower training\.batch_size to 2796202"):
        limits((1, 2, 3), rows=(1 << 27) // (6 * NUMBERS) + 1)
    with pytest.raises(EncodingRangeError, match="would leave the ring"):
        ClipLimits.of(clip_units=1.0, noise_std_units=2.0**26, rows=64, numbers=512, parties=2)


@pytest.mark.statistical
def test_honest_noise_is_within_its_limits() -> None:
    """By [HKZ12] a row of 100,000 is over its limit with probability at most 2^-64."""
    noise = ExactDiscreteGaussian(SIGMA).sample(torch.Size((100_000, NUMBERS))).double()
    square = noise.square().sum(1)
    assert square.max() < limits((1, 2), rows=100_000).noise_square
    # And the limit is no wider than ten times the mean.
    assert limits((1, 2)).noise_square < 25 * square.mean()
