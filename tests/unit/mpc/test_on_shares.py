"""CrypTen's own arithmetic over our lines, with a dealer's randomness: equal to plain text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.computing import CONTEXT, DealerHere, QueueLines, members, together

from securevfl.core.errors import ProtocolError
from securevfl.mpc.crypten_bridge import ArithmeticSharedTensor, crypten
from securevfl.mpc.dealt_tuples import TupleDealer, TupleRequest
from securevfl.mpc.on_shares import LineCommunicator, computing

WORLDS = [(0, 1), (1, 2), (0, 2, 3), (1, 2, 3, 5)]
X = torch.tensor([[1.5, -2.25, 3.0], [0.5, 4.0, -1.0]])
Y = torch.tensor([[2.0, 1.0, -0.5], [-3.0, 0.25, 8.0]])

PROGRAMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "sum": (lambda x, y: x + y, torch.add),
    "mul": (lambda x, y: x * y, torch.mul),
    "square": (lambda x, _y: x.square(), lambda x, _y: x * x),
    "matmul": (lambda x, y: x.matmul(y.t()), lambda x, y: x @ y.t()),
    "conv": (
        lambda x, y: x.view(1, 1, 6).conv1d(y.view(2, 1, 3), padding=1),
        lambda x, y: torch.conv1d(x.view(1, 1, 6), y.view(2, 1, 3), padding=1),
    ),
    "less": (lambda x, y: x < y, lambda x, y: (x < y).float()),
    "equal": (lambda x, y: x == y + 0.5, lambda x, y: (x == y + 0.5).float()),
    "relu": (lambda x, _y: x.relu(), lambda x, _y: x.relu()),
    "largest": (lambda x, _y: x.max(), lambda x, _y: x.max()),
    "reciprocal": (lambda x, _y: x.square().reciprocal(), lambda x, _y: 1 / x.square()),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_come_to_what_they_do_in_clear(name: str, world: tuple[int, ...]) -> None:
    on_shares, plain = PROGRAMS[name]

    def program(rank: int, _here: object) -> torch.Tensor:
        # A party that is not the source knows no more than the shape.
        x = crypten.cryptensor(X if rank == world[0] else torch.zeros(2, 3), src=0)
        y = crypten.cryptensor(Y if rank == world[1] else torch.zeros(2, 3), src=1)
        return on_shares(x, y).get_plain_text()

    results = together(members(world), program)

    for result in results.values():
        assert result.shape == plain(X, Y).shape
        assert torch.allclose(result.float(), plain(X, Y), atol=2e-3)


def test_numbers_just_above_a_negative_whole_one_are_read_right() -> None:
    """Where CrypTen's own decoder is wrong by 1."""
    near = torch.tensor([-7.99998, -8.0, -8.00002, -0.00002, 0.0, 2.5])
    results = together(
        members((0, 1)), lambda _r, _h: crypten.cryptensor(near, src=0).get_plain_text()
    )
    assert torch.allclose(results[0], near, atol=2e-5)


def test_a_result_is_for_one_party() -> None:
    def program(_rank: int, _here: object) -> Any:
        return (crypten.cryptensor(X, src=1) * 2).get_plain_text(dst=2)

    results = together(members((0, 1, 2)), program)

    assert torch.allclose(results.pop(2), 2 * X)
    assert set(results.values()) == {None}


def test_large_openings_are_added_up_in_parts() -> None:
    """Each adds up a part for all, and comes to the same."""
    wide = torch.arange(6000, dtype=torch.float32) / 64
    results = together(
        members((1, 2, 4)), lambda _r, _h: (crypten.cryptensor(wide, src=2) * 2).get_plain_text()
    )

    for result in results.values():
        assert torch.equal(result, 2 * wide)


def test_nothing_in_clear_travels() -> None:
    """No array on the lines has a number of the table, or twice the same number."""
    lines, table = QueueLines((0, 1, 2)), torch.arange(1.0, 65.0)

    def program(rank: int, _here: object) -> Any:
        x = crypten.cryptensor(table if rank == 1 else torch.zeros(64), src=1)
        return (x + crypten.cryptensor(torch.zeros(64), src=0)).get_plain_text(dst=2)

    together(members((0, 1, 2), lines=lines), program)

    words = np.concatenate([values.reshape(-1) for _, _, values in lines.seen])
    assert len(lines.seen) == 2
    assert not set((table * 2**16).long().tolist()) & set(words.tolist())
    assert len(set(words.tolist())) == len(words)


@pytest.mark.parametrize("numbers", [64, 6000])
@pytest.mark.parametrize("on_bits", [False, True])
def test_no_share_leaves_a_member_as_it_is(on_bits: bool, numbers: int) -> None:
    """CrypTen's own sharing hangs on seeds of 32 bits; each opening has pairwise streams on it."""
    lines, table = QueueLines((0, 1, 2)), torch.arange(float(numbers))
    kind = crypten.mpc.primitives.BinarySharedTensor if on_bits else ArithmeticSharedTensor

    def program(rank: int, _here: object) -> Any:
        x = table.long() if rank == 1 else torch.zeros(numbers, dtype=torch.int64)
        shared = kind(x, src=1, **({} if on_bits else {"precision": 0}))
        return shared.share.clone(), shared.reveal()

    results = together(members((0, 1, 2), lines=lines), program)

    shares = {word for share, _ in results.values() for word in share.tolist()}
    assert len(shares) == 3 * numbers
    # Of a large opening each member's part of the total goes round afterwards, which all may have.
    opened = set(table.long().tolist())
    travelled = {word for _, _, values in lines.seen for word in values.reshape(-1).tolist()}
    assert len(travelled - opened) >= 2 * numbers
    assert not shares & travelled
    for _, total in results.values():
        assert torch.equal(total, table.long())


def test_every_other_collective_keeps_its_meaning() -> None:
    def program(_rank: int, here: Any) -> Any:
        link, place = here, here.get_rank()
        own = torch.full((2,), place)
        sent = [torch.full((2,), 10 * to) for to in range(3)]
        link.barrier()
        if place == 0:
            link.send(torch.tensor([7.5]), 1)
        got = link.recv(torch.zeros(1), 0) if place == 1 else None
        return (
            link.broadcast(own.clone(), 2).tolist(),
            [one.tolist() for one in link.gather(own, 1) if one is not None],
            [one.tolist() for one in link.all_gather(own)],
            link.scatter(sent, 0).tolist(),
            tuple(link.broadcast_obj(torch.Size([3, 4]) if place == 1 else None, 1)),
            None if got is None else got.tolist(),
        )

    results = together(members((4, 5, 9)), program)

    everyone = [[0, 0], [1, 1], [2, 2]]
    assert [results[rank][0] for rank in (4, 5, 9)] == [[2, 2]] * 3
    assert [results[rank][1] for rank in (4, 5, 9)] == [[], everyone, []]
    assert [results[rank][2] for rank in (4, 5, 9)] == [everyone] * 3
    assert [results[rank][3] for rank in (4, 5, 9)] == [[0, 0], [10, 10], [20, 20]]
    assert [results[rank][4] for rank in (4, 5, 9)] == [(3, 4)] * 3
    assert [results[rank][5] for rank in (4, 5, 9)] == [None, [7.5], None]


def test_what_would_pickle_or_run_ahead_is_refused() -> None:
    member = members((0, 1))[0]
    link = LineCommunicator(member)
    one = torch.zeros(1, dtype=torch.int64)

    for asked in (
        lambda: link.send_obj({}, 1),
        lambda: link.recv_obj(1),
        lambda: link.broadcast_obj({"any": "thing"}, 0),
        lambda: link.isend(one, 1),
        lambda: link.irecv(one, 1),
        lambda: link.recv(one),
        lambda: link.all_reduce(one, async_op=True),
        lambda: link.all_reduce(one, op=torch.distributed.ReduceOp.MAX),
    ):
        with pytest.raises(ProtocolError, match="not offered here"):
            asked()
    with pytest.raises(ProtocolError, match="must be shares"):
        link.all_reduce(torch.zeros(2))
    with pytest.raises(ProtocolError, match="cannot be sent"):
        link.send(torch.zeros(2, dtype=torch.complex64), 1)
    assert member.lines.lines.seen == []


@pytest.mark.parametrize("world", [(1, 0), (1, 1), (2, 3)])
def test_a_world_is_some_ranks_with_this_one_among_them(world: tuple[int, ...]) -> None:
    member = members((0, 1))[0]
    with (
        pytest.raises(ProtocolError, match="cannot compute among"),
        computing(type(member)(**{**vars(member), "world": world})),
    ):
        pass


def product(rank: int, _here: object) -> torch.Tensor:
    x = crypten.cryptensor(X if rank == 0 else torch.zeros(2, 3), src=0)
    return (x * crypten.cryptensor(Y if rank == 1 else torch.zeros(2, 3), src=1)).get_plain_text()


def test_a_dealer_that_repeats_is_refused() -> None:
    """Neither seeds nor corrections are made twice under one number."""
    dealer = DealerHere(TupleDealer((0, 1), CONTEXT))
    those = members((0, 1), dealer=dealer)
    together(those, product)
    again = TupleRequest(number=0, kind="square", sizes=((2, 3),))

    with pytest.raises(ProtocolError, match="was dealt before"):
        dealer.dealer.corrections([again])
    with pytest.raises(ProtocolError, match="of 0 was dealt before"):
        together({0: those[0]}, product)


def test_a_correction_under_another_number_is_refused() -> None:
    dealer = DealerHere(TupleDealer((0, 1), CONTEXT))
    dealer.waiting.append((7, np.zeros(6, np.int64)))
    with pytest.raises(ProtocolError, match="numbers of 7 came, not 6 of 0"):
        together({0: members((0, 1), dealer=dealer)[0]}, product)


def test_a_dealer_that_lies_makes_noise() -> None:
    dealer = DealerHere(TupleDealer((0, 1), CONTEXT), changed=lambda words: words + (1 << 40))
    results = together(members((0, 1), dealer=dealer), product)
    assert not torch.allclose(results[0], X * Y, atol=1.0)


def test_members_of_two_contexts_or_seeds_compute_noise() -> None:
    """Another session, program or dealer: no stream of the two cancels."""
    those = members((0, 1))
    those[1] = type(those[1])(**{**vars(those[1]), "context": b"another"})
    results = together(those, product)
    assert not torch.allclose(results[0], X * Y, atol=1.0)


def test_unequal_programs_are_refused() -> None:
    """A step of another kind or size is not what is due."""

    def program(rank: int, here: Any) -> Any:
        x = crypten.cryptensor(torch.zeros(4 + rank), src=0)
        return x.get_plain_text()

    with pytest.raises(ProtocolError, match="came"):
        together(members((0, 1)), program)


def test_a_replayed_or_swapped_array_is_refused() -> None:
    """Lines are in order; what belongs to another step is not taken."""
    kept: list[np.ndarray] = []
    lines = QueueLines((0, 1))
    those = members((0, 1), lines=lines)
    together(those, product)
    kept = [values for sender, _, values in lines.seen if sender == 1]
    lines._queues[1, 0].put((1, kept[0]))

    with pytest.raises(ProtocolError, match="of step 1 came"):
        together({0: those[0]}, product, number=1)


def test_a_changed_array_changes_the_result_alone() -> None:
    """Arithmetic is for members that follow it: what a member alters is not noticed."""
    lines = QueueLines((0, 1), changed=lambda _s, _r, _step, values: values + 1)
    results = together(
        members((0, 1), lines=lines), lambda _r, _h: crypten.cryptensor(X, src=0).get_plain_text()
    )
    assert not torch.equal(results[0], X)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "square", "sizes": ((1,), (1,))},
        {"kind": "triple", "sizes": ((1,), (1,)), "operation": "save"},
        {"kind": "square", "sizes": ((-1,),)},
        {"kind": "square", "sizes": ((1 << 28,),)},
        {"kind": "triple", "sizes": ((1,), (1,)), "operation": "mul", "options": '{"out": 1}'},
        {"kind": "square", "sizes": ((1,),), "number": -1},
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="impossible way"):
        TupleRequest(**{"number": 0, **wrong})


def test_requests_of_products_that_do_not_exist_are_refused() -> None:
    dealer = TupleDealer((0, 1), CONTEXT)
    request = TupleRequest(number=0, kind="triple", sizes=((2, 3), (2, 3)), operation="matmul")
    with pytest.raises(ProtocolError, match="before it was begun"):
        dealer.corrections([request])
    with pytest.raises(ProtocolError, match="asked for parties"):
        dealer.begin((0, 7), 0)
    dealer.begin((0, 1), 0)
    with pytest.raises(ProtocolError, match="no triple is like"):
        dealer.corrections([request])
    huge = TupleRequest(
        number=1, kind="triple", sizes=((1 << 20, 1), (1, 1 << 20)), operation="matmul"
    )
    with pytest.raises(ProtocolError, match="too much"):
        dealer.corrections([huge])
