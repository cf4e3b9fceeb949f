from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import ring_reference as reference
from helpers.queue_star import QueueStar, run_parties
from helpers.ring_keys import random_pair_keys

from securevfl.core.errors import ProtocolError
from securevfl.federation.over_star import PrimaryWire, SecondaryWire
from securevfl.mpc.codec import InProcessSum, RingFormat, SumTo, WordWire, decode_sum, encode
from securevfl.mpc.crypten_bridge import CrypTenSumTo, StarCommunicator
from securevfl.mpc.masks import PairwiseMasks
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

FMT = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=4)
ELEMENTS = 1001


def parties_of(
    star: QueueStar, ranks: tuple[int, ...], *, degree: int | None = None
) -> dict[int, CrypTenSumTo]:
    keys = random_pair_keys(ranks)
    parties = {0: CrypTenSumTo(star.wire(0), None)}
    for rank in ranks:
        masks = PairwiseMasks(rank, keys[rank], degree=degree)
        parties[rank] = CrypTenSumTo(star.wire(rank), masks)
    return parties


def random_units(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    bound = FMT.bound_units
    return torch.randint(-bound, bound + 1, (ELEMENTS,), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("degree", [None, 2])
@pytest.mark.parametrize("active", [(1,), (1, 2), (2, 4), (1, 2, 3, 4)])
def test_twin_simulator_and_crypten_agree_exactly(
    active: tuple[int, ...], degree: int | None
) -> None:
    """The same units, three ways: plain integers, one process, and CrypTen over a star."""
    star = QueueStar((1, 2, 3, 4))
    parties = parties_of(star, (1, 2, 3, 4), degree=degree)
    units = {rank: random_units(rank) for rank in active}
    words = {rank: encode(units[rank], FMT) for rank in active}
    words[0] = torch.zeros(FMT.words(ELEMENTS), dtype=torch.int64)

    simulated = InProcessSum()([words[rank] for rank in active])
    results = run_parties(
        {
            rank: partial(parties[rank], words[rank].clone(), round_number=1, active=active)
            for rank in (0, *active)
        }
    )

    twin = reference.add([reference.encode(units[rank].tolist(), FMT) for rank in active])
    assert simulated.tolist() == reference.as_signed(twin)
    assert torch.equal(results[0], simulated)
    decoded = decode_sum(results[0], FMT, elements=ELEMENTS, parties_active=len(active))
    assert decoded.tolist() == reference.decode_sum(
        twin, FMT, elements=ELEMENTS, parties_active=len(active)
    )


def test_the_primary_may_add_words_of_its_own() -> None:
    """As in the mean of all parties' weights."""
    star = QueueStar((1, 2))
    parties = parties_of(star, (1, 2))
    words = {rank: torch.full((4,), 10**rank) for rank in (0, 1, 2)}

    results = run_parties(
        {r: partial(parties[r], words[r], round_number=1, active=(1, 2)) for r in (0, 1, 2)}
    )

    assert results[0].tolist() == [111] * 4


def test_a_reveal_copies_no_words() -> None:
    """A share is sent from where it lies, and the primary's own becomes the total."""
    words = {rank: torch.full((4,), 10**rank) for rank in (0, 1)}
    sent = []

    class Wire:
        def __init__(self, *, masked: bool) -> None:
            self.masked = masked

        def carry(self, _round_number: int, share: torch.Tensor, _ranks: object) -> None:
            if self.masked:
                sent.append(share.data_ptr())
            else:
                share += 10

    CrypTenSumTo(Wire(masked=True), PairwiseMasks(1, {}))(words[1], round_number=1, active=(1,))
    total = CrypTenSumTo(Wire(masked=False), None)(words[0], round_number=1, active=(1,))

    assert sent == [words[1].data_ptr()]
    assert total is not None
    assert (total.data_ptr(), total.tolist()) == (words[0].data_ptr(), [11] * 4)


def test_nothing_comes_back_to_a_secondary() -> None:
    """Only the primary gets the sum, and no other buffer holds a part of it.

    CrypTen's own reveal over gloo leaves 1/n of the plaintext sum with every party.
    """
    star = QueueStar((1, 2, 3))
    parties = parties_of(star, (1, 2, 3))
    units = {rank: random_units(rank) for rank in (1, 2, 3)}
    words = {rank: encode(units[rank], FMT) for rank in (1, 2, 3)}
    words[0] = torch.zeros(FMT.words(ELEMENTS), dtype=torch.int64)
    plain = {rank: words[rank].clone() for rank in words}

    results = run_parties(
        {r: partial(parties[r], words[r], round_number=1, active=(1, 2, 3)) for r in range(4)}
    )

    total = set(results[0].tolist())
    for rank in (1, 2, 3):
        assert results[rank] is None
        assert not total & set(words[rank].tolist())
        assert not set(plain[rank].tolist()) & set(words[rank].tolist())
        assert torch.equal(star.seen[rank][0], words[rank])


def test_what_travels_is_not_what_was_encoded() -> None:
    """Every word on the wire is masked; with one secondary alone there is no mask."""
    star = QueueStar((1, 2))
    parties = parties_of(star, (1, 2))
    for round_number, active in ((1, (1, 2)), (2, (1,))):
        words = encode(random_units(1), FMT)
        parties[1](words.clone(), round_number=round_number, active=active)

        travelled = star.seen[1][-1]
        assert bool((travelled == words).any()) == (active == (1,))


def test_a_reused_round_sends_nothing() -> None:
    """The mask refuses before the wire is touched."""
    star = QueueStar((1, 2))
    party = parties_of(star, (1, 2))[1]
    party(torch.zeros(4, dtype=torch.int64), round_number=1, active=(1, 2))

    with pytest.raises(ProtocolError, match="used before"):
        party(torch.ones(4, dtype=torch.int64), round_number=1, active=(1, 2))
    assert len(star.seen[1]) == 1


def test_no_other_collective_works() -> None:
    """Every way by which CrypTen could show data to another party than the primary is refused."""
    star = QueueStar((1,))
    communicator = StarCommunicator(star.wire(1), rank=1, round_number=1, active=(1,))
    share = torch.zeros(2, dtype=torch.int64)

    for name in (
        "send", "recv", "scatter", "all_reduce", "gather", "all_gather", "broadcast", "barrier",
        "send_obj", "recv_obj", "broadcast_obj",
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match="does not offer"):
            getattr(communicator, name)(share, 0)
    batch = {"dst": 0, "batched": True}
    for wrong in ({"dst": 1}, {"batched": False}, {"async_op": True}, {"op": "max"}):
        with pytest.raises(ProtocolError, match="does not offer"):
            communicator.reduce([share], **(batch | wrong))
    with pytest.raises(ProtocolError, match="does not offer"):
        communicator.reduce([share, share], **batch)
    assert star.seen[1] == []


def test_crypten_is_never_initialised() -> None:
    """Neither CrypTen's generators nor torch.distributed are set up by a reveal."""
    import crypten

    star = QueueStar((1,))
    parties_of(star, (1,))[1](torch.zeros(2, dtype=torch.int64), round_number=1, active=(1,))

    assert not dist.is_initialized()
    assert not crypten.is_initialized()
    assert all(not generators for generators in crypten.generators.values())


def test_crypten_finds_no_communicator_outside_a_reveal() -> None:
    """Ours is visible inside a reveal of ours only."""
    import crypten.communicator

    with pytest.raises(RuntimeError, match="not initialized"):
        crypten.communicator.get()


def test_words_leave_a_secondary_under_masks_alone() -> None:
    """A secondary without masks is refused, and so is a primary with some."""
    star, keys = QueueStar((1, 2)), random_pair_keys((1, 2))
    transport = object.__new__(SecondaryTransport)
    words = torch.ones(4, dtype=torch.int64)

    with pytest.raises(ProtocolError, match="under masks alone"):
        CrypTenSumTo(SecondaryWire(transport), None)
    primary = PrimaryWire(object.__new__(PrimaryTransport), {}, 1.0)
    with pytest.raises(ProtocolError, match="the primary masks none"):
        CrypTenSumTo(primary, PairwiseMasks(1, keys[1]))
    CrypTenSumTo(star.wire(2), PairwiseMasks(2, keys[2]))(words, round_number=1, active=(1, 2))
    assert not (star.seen[2][0] == torch.ones(4)).any()


def test_a_mask_is_prepared_for_one_round_where_there_is_one() -> None:
    """What was prepared is used up; the primary, which masks nothing, prepares nothing."""
    star = QueueStar((1, 2))
    parties = parties_of(star, (1, 2))
    for rank in (0, 1):
        parties[rank].prepare(4, round_number=1, active=(1, 2))

    with pytest.raises(ProtocolError, match="round 1: its mask was used before"):
        parties[1].prepare(4, round_number=1, active=(1, 2))
    parties[0].prepare(4, round_number=1, active=(1, 2))


def test_the_parts_keep_their_protocols() -> None:
    """What the federation builds on are protocols, and these are implementations."""
    star = QueueStar((1, 2))
    parties = parties_of(star, (1, 2))

    assert isinstance(parties[1], SumTo)
    assert isinstance(star.wire(1), WordWire)


def test_sums_of_unequal_or_no_words_are_refused() -> None:
    """The simulator notices what a wire would."""
    with pytest.raises(ProtocolError, match=r"\[2, 3\] words"):
        InProcessSum()([torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(ProtocolError, match=r"\[\] words"):
        InProcessSum()([])
