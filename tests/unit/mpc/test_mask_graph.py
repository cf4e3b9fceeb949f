"""Sparse masks: sums stay exact, and the number of colluders that they withstand is the stated one.

That two 64-bit words agree by chance is left at 2^-64 for each of the words compared.
"""

import itertools
import os
from collections.abc import Mapping, Sequence

import pytest
import torch
from helpers.ring_keys import random_pair_keys
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.mpc.masks import PairwiseMasks, connectivity, neighbours

# With gaps, as the active ones of a round have.
RANKS = (1, 2, 4, 5, 7, 8, 9, 12, 13)
DEGREES = (2, 4, 6, None)
COUNT = 40


def mask(
    rank: int, keys: Mapping[int, bytes], active: Sequence[int], *, degree: int | None = 4
) -> Tensor:
    words = torch.zeros(COUNT, dtype=torch.int64)
    PairwiseMasks(rank, keys, degree=degree).apply(words, round_number=3, active=active)
    return words


def part_of(one: int, left: Sequence[int], active: Sequence[int], degree: int | None) -> set[int]:
    """Return whom masks connect with ``one`` when only ``left`` keep theirs secret."""
    found, fresh = {one}, [one]
    while fresh:
        near = set(neighbours(fresh.pop(), active, degree)) & set(left) - found
        found |= near
        fresh += near
    return found


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("parties", range(3, 10))
def test_the_threshold_is_that_of_every_colluding_subset(parties: int, degree: int | None) -> None:
    """No fewer colluders cut anybody off, and some set of that size does: by trying all sets."""
    active = RANKS[:parties]
    cutting = [
        colluders
        for size in range(parties)
        for colluders in itertools.combinations(active, size)
        if len(left := [rank for rank in active if rank not in colluders]) == 1
        or len(part_of(left[0], left, active, degree)) < len(left)
    ]

    assert min(map(len, cutting)) == connectivity(parties, degree)


@pytest.mark.parametrize("degree", [2, 4, 8, 20])
def test_masks_cancel_in_the_sum_over_the_active(degree: int) -> None:
    """Whoever is absent: the ring is made anew of those that are there."""
    keys = random_pair_keys(RANKS)
    for active in (RANKS, RANKS[::2], RANKS[3:], RANKS[:2]):
        masks = [mask(rank, keys[rank], active, degree=degree) for rank in active]

        assert torch.equal(sum(masks), torch.zeros(COUNT, dtype=torch.int64))
        assert all(bool((one != 0).all()) for one in masks)


def test_only_all_of_ones_neighbours_see_its_term() -> None:
    """The limit is met exactly: with one neighbour's key missing nothing is left in clear."""
    keys = random_pair_keys(RANKS)
    near = neighbours(7, RANKS, 4)
    made = mask(7, keys[7], RANKS)

    def guess(known: Sequence[int]) -> Tensor:
        tried = {peer: key if peer in known else os.urandom(32) for peer, key in keys[7].items()}
        return mask(7, tried, RANKS)

    assert near == (4, 5, 8, 9)
    assert torch.equal(guess(near), made)
    for missing in near:
        assert bool((guess([rank for rank in RANKS if rank != missing]) != made).all())


def test_a_primary_that_tells_two_sets_gets_masks_that_cancel_nowhere() -> None:
    """Else it could choose neighbours: here 1 and 2 would be left with 4, which helps it.

    Told alike, the two have a mask in common that cancels; told of other sets they have none, and
    their words stay uniform whatever 4 adds.
    """
    keys = random_pair_keys((1, 2, 3, 4, 5))

    def shared_part(rank: int, peer: int, told: Sequence[int]) -> Tensor:
        other = {**keys[rank], peer: bytes(range(32))}
        return mask(rank, keys[rank], told, degree=2) - mask(rank, other, told, degree=2)

    honest = (1, 2, 3, 4)
    lie = (1, 2, 4, 5)
    for told in (honest, lie):
        assert neighbours(1, told, 2)[0] == 2
        assert neighbours(2, told, 2)[0] == 1
    assert bool((shared_part(1, 2, honest) + shared_part(2, 1, honest) == 0).all())
    assert bool((shared_part(1, 2, honest) + shared_part(2, 1, lie) != 0).all())


def test_a_mask_prepared_for_another_set_is_refused() -> None:
    """Its key depends on all who are active, not on the neighbours alone."""
    party = PairwiseMasks(1, random_pair_keys((1, 2, 3, 4, 5))[1], degree=2)
    party.prepare(1, COUNT, (1, 2, 3, 5))

    with pytest.raises(ProtocolError, match=r"of the ranks \[1, 2, 3, 5\], but .* \[1, 2, 4, 5\]"):
        party.apply(torch.zeros(COUNT, dtype=torch.int64), round_number=1, active=(1, 2, 4, 5))
    party.close()
