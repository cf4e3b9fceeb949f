"""Rows released once: every row in exactly one release, and every later use from the cache."""

import numpy as np
import pytest
import torch
from helpers.secondaries import make_secondary
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.federation.cut import Cut
from securevfl.federation.exchange_in_process import SimulatedExchange
from securevfl.federation.exchange_of_released_rows import ReleasedRows, release_once
from securevfl.federation.rounds import EpochMark, RoundPlan, active_parties
from securevfl.mpc.ring_format import RingFormat

CUT = Cut(
    ring=RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2), slots=1, shape=(1, 2)
)


class Recorded(ReleasedRows):
    """Answers like a cache, and remembers what it was asked."""

    def __init__(self, rows: int) -> None:
        self.values = torch.arange(rows * 2, dtype=torch.float32).view(rows, 1, 2)
        secondaries = SimulatedExchange(
            {1: make_secondary(), 2: make_secondary()}, CUT, end_epoch=lambda _mark: None
        )
        super().__init__(self.values, secondaries, device=torch.device("cpu"))
        self.plans: list[RoundPlan] = []

    def release(self, plan: RoundPlan) -> Tensor:
        self.plans.append(plan)
        return super().release(plan)


def test_every_row_is_released_exactly_once() -> None:
    """Batches cover the rows without overlap, each in a round of its own, by all secondaries."""
    exchange = Recorded(10)
    events: list[dict] = []
    out = release_once(
        exchange,
        np.arange(10, dtype=np.int64),
        batch_size=4,
        observe=lambda event: events.append(dict(event)),
    )
    assert torch.equal(out, exchange.values)
    assert np.concatenate([plan.rows for plan in exchange.plans]).tolist() == list(range(10))
    assert [plan.round_number for plan in exchange.plans] == [1, 2, 3]
    assert {plan.active for plan in exchange.plans} == {(1, 2)}
    assert {plan.purpose for plan in exchange.plans} == {"release"}
    assert not any(plan.wants_gradient for plan in exchange.plans)
    assert [event["done"] for event in events] == [1, 2, 3]


def test_cache_answers_by_row_id() -> None:
    """Whatever the order and the purpose, a row's value is the one that was released."""
    cache = Recorded(6)
    plan = RoundPlan(
        round_number=9, rows=np.array([4, 0, 4], dtype=np.int64), active=(1,), purpose="train"
    )
    assert torch.equal(cache.release(plan), cache.values[[4, 0, 4]])
    cache.return_gradient(plan, torch.ones(3, 1, 2))
    cache.end_epoch(EpochMark(epoch=1, best=True))
    assert cache.ranks == (1, 2)
    with pytest.raises(ProtocolError, match="frozen"):
        cache.average_positions({})


def test_no_rows() -> None:
    """Nothing to release is an error, not an empty model."""
    with pytest.raises(ProtocolError, match="no rows"):
        release_once(
            Recorded(1),
            np.empty(0, dtype=np.int64),
            batch_size=4,
            observe=lambda _event: None,
        )


@pytest.mark.parametrize(
    ("secondaries", "rate", "active"), [(4, 0.0, 4), (4, 0.5, 2), (4, 0.9, 1), (1, 0.99, 1)]
)
def test_active_parties(secondaries: int, rate: float, active: int) -> None:
    """(1 - r_d) k secondaries take part, and never none."""
    assert active_parties(range(secondaries), rate) == active
