import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import ring_reference as reference
from helpers.ring_keys import random_pair_keys
from torch import Tensor

from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.mpc.masks import PairwiseMasks

RANKS = (1, 2, 3, 4)
# Not a multiple of the 32768 words that are masked at a time, nor of an AES block.
COUNT = 32768 + 16384 + 5


def masks_of(ranks: tuple[int, ...] = RANKS) -> dict[int, PairwiseMasks]:
    keys = random_pair_keys(ranks)
    return {rank: PairwiseMasks(rank, keys[rank]) for rank in ranks}


def mask(party: PairwiseMasks, round_number: int, *, active: tuple[int, ...] = RANKS) -> Tensor:
    words = torch.zeros(COUNT, dtype=torch.int64)
    party.apply(words, round_number=round_number, active=active)
    return words


@pytest.mark.parametrize("active", [(1, 2), (2, 4), (1, 3, 4), RANKS])
def test_masks_cancel_in_the_sum_over_the_active(active: tuple[int, ...]) -> None:
    """Party dropout included: only those who contribute mask with one another."""
    parties = masks_of()

    total = sum(mask(parties[rank], 5, active=active) for rank in active)

    assert torch.equal(total, torch.zeros(COUNT, dtype=torch.int64))


def test_masks_do_not_cancel_in_any_smaller_sum() -> None:
    """Negative control: leaving one active party out leaves no zero."""
    parties = masks_of()
    masks = {rank: mask(parties[rank], 5) for rank in RANKS}

    for missing in RANKS:
        rest = sum(masks[rank] for rank in RANKS if rank != missing)
        assert int((rest == 0).sum()) == 0


def test_masks_are_those_of_the_readable_twin() -> None:
    """Counter mode written out block by block gives the same words."""
    keys = random_pair_keys(RANKS)
    for rank in RANKS:
        words = torch.zeros(99, dtype=torch.int64)
        PairwiseMasks(rank, keys[rank]).apply(words, round_number=7, active=RANKS)

        twin = reference.mask(99, rank=rank, pair_keys=keys[rank], round_number=7, active=RANKS)
        assert words.tolist() == reference.as_signed(twin)


def test_a_prepared_mask_is_the_one_that_would_be_made() -> None:
    """Preparing changes when the work is done, and nothing else."""
    keys = random_pair_keys(RANKS)
    prepared, direct = PairwiseMasks(1, keys[1]), PairwiseMasks(1, keys[1])
    prepared.prepare(3, COUNT, RANKS)

    assert torch.equal(mask(prepared, 3), mask(direct, 3))
    prepared.close()


def test_rounds_have_unrelated_masks() -> None:
    """No word of one round's mask comes back at its place, or anywhere, in the next."""
    party = masks_of()[1]
    first, second = mask(party, 1), mask(party, 2)

    assert not set(first.tolist()) & set(second.tolist())


def test_a_round_is_used_once() -> None:
    """A second contribution under one mask would give the difference away."""
    party = masks_of()[1]
    mask(party, 1)

    with pytest.raises(ProtocolError, match="round 1: its mask was used before; a retry must be"):
        mask(party, 1)
    with pytest.raises(ProtocolError, match="round 1: its mask was used before"):
        party.prepare(1, COUNT, RANKS)


def test_what_is_remembered_of_rounds_does_not_grow() -> None:
    """Rounds rise within a session, so the last one says which are used."""
    party = masks_of()[1]

    def remembered() -> int:
        return sum(len(one) for one in vars(party).values() if isinstance(one, dict | list | set))

    mask(party, 1)
    after_one = remembered()
    for number in range(2, 40):
        mask(party, number)
    assert remembered() == after_one
    with pytest.raises(ProtocolError, match="round 17: its mask was used before"):
        mask(party, 17)
    mask(party, 100)
    with pytest.raises(ProtocolError, match="round 99: its mask was used before"):
        mask(party, 99)


def test_an_active_set_does_not_make_a_round_new() -> None:
    """The same round with fewer parties would reuse the keys of those that stay."""
    party = masks_of()[1]
    mask(party, 1)

    with pytest.raises(ProtocolError, match="used before"):
        mask(party, 1, active=(1, 2))


def test_a_prepared_round_that_was_given_up_counts_as_used() -> None:
    """Preparing again, or with another size, is refused; and so is the round afterwards."""
    party = masks_of()[1]
    party.prepare(1, COUNT - 1, RANKS)

    with pytest.raises(ProtocolError, match="used before"):
        party.prepare(1, COUNT, RANKS)
    with pytest.raises(ProtocolError, match="prepared for 49156 words"):
        mask(party, 1)
    with pytest.raises(ProtocolError, match="used before"):
        mask(party, 1)
    party.close()


def test_only_one_of_many_threads_gets_a_round() -> None:
    """The claim is atomic: sixteen threads, one winner a round."""
    party = masks_of()[1]

    def attempt(_: int) -> bool:
        try:
            party.apply(torch.zeros(8, dtype=torch.int64), round_number=1, active=RANKS)
        except ProtocolError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(attempt, range(64))) == 1


def test_a_refused_round_leaves_the_words_as_they_were() -> None:
    """Nothing is half masked."""
    party = masks_of()[1]
    mask(party, 1)
    words = torch.arange(10)

    with pytest.raises(ProtocolError):
        party.apply(words, round_number=1, active=RANKS)
    assert torch.equal(words, torch.arange(10))


def test_a_forked_copy_cannot_mask() -> None:
    """It would not know which rounds the original uses."""
    party = masks_of()[1]
    # Made before the fork: of torch's threads a child has none, and it would wait for them.
    words = torch.zeros(COUNT, dtype=torch.int64)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            party.apply(words, round_number=1, active=RANKS)
        except ProtocolError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("active", [(2, 3), (1, 5), (1, 2, 2), ()])
def test_an_active_set_without_common_keys_is_refused(active: tuple[int, ...]) -> None:
    """This party must be in it, once, and know every other."""
    with pytest.raises(ProtocolError, match="it shares keys with"):
        mask(masks_of()[1], 1, active=active)


@pytest.mark.parametrize("round_number", [-1, 2**63])
def test_a_round_outside_the_counter_is_refused(round_number: int) -> None:
    """The counter block has room for 63 bits of round."""
    with pytest.raises(ProtocolError, match="a round number must lie in"):
        mask(masks_of()[1], round_number)


def test_impossible_keys_are_refused() -> None:
    """Short keys, a key for oneself, the primary as a peer, and a key used for two pairs."""
    with pytest.raises(ConfigError, match="32 bytes"):
        PairwiseMasks(1, {2: bytes(16)})
    with pytest.raises(ConfigError, match="cannot mask"):
        PairwiseMasks(1, {1: bytes(32)})
    with pytest.raises(ConfigError, match="cannot mask"):
        PairwiseMasks(1, {0: bytes(32)})
    with pytest.raises(ConfigError, match="share one key"):
        PairwiseMasks(1, {2: bytes(32), 3: bytes(32)})


def test_keys_are_gone_after_close_and_never_printed() -> None:
    """A closed object cannot mask, and the text shows ranks only."""
    party = masks_of()[1]

    assert repr(party) == "PairwiseMasks(rank=1, peers=[2, 3, 4])"
    party.close()
    with pytest.raises(ProtocolError, match="shares keys with"):
        mask(party, 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([b"plan"], [b"other plan"]),
        ([b"plan", b"gradient"], [b"plan"]),
        ([b"plan", b"gradient"], [b"gradient", b"plan"]),
    ],
    ids=["another message", "one more", "another order"],
)
@pytest.mark.parametrize("degree", [None, 2])
def test_masks_of_parties_that_were_told_different_things_do_not_cancel(
    first: list[bytes], second: list[bytes], degree: int | None
) -> None:
    """Of four parties one heard something else: no sum with it has a word that is not noise."""
    keys = random_pair_keys(RANKS)
    parties = {rank: PairwiseMasks(rank, keys[rank], degree=degree) for rank in RANKS}
    for rank, party in parties.items():
        for text in second if rank == 2 else first:
            party.bind(hashlib.sha256(text).digest(), RANKS)

    total = sum(mask(party, 3) for party in parties.values())

    assert int((total == 0).sum()) == 0


def test_what_is_said_to_some_binds_these_alone() -> None:
    """A message to ranks 1 and 2 leaves the masks that they share with others as they are."""
    parties = masks_of()
    for rank in (1, 2):
        parties[rank].bind(hashlib.sha256(b"to two").digest(), (1, 2))

    total = sum(mask(parties[rank], 3) for rank in RANKS)

    assert torch.equal(total, torch.zeros(COUNT, dtype=torch.int64))
