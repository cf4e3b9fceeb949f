"""What leaves a secondary: booked first, never twice, and bounded in exact integers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from securevfl.core.errors import BudgetExceededError, EncodingRangeError, PrivacyError
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutLayer, MeanOfPooledRecords, MeanOfRows
from securevfl.federation.rounds.release import Released, SecondaryRelease, require_finite
from securevfl.federation.run_plan import Purpose
from securevfl.mpc.codec import RingFormat

CLIP = 1.0


class Book:
    """Books in memory, and tells the order of what happens."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.charged: list[tuple[int, int, str]] = []

    def charge(self, *, round_number: int, rows: np.ndarray, purpose: str) -> float:
        if len(self.charged) >= self.limit:
            raise BudgetExceededError("the budget is spent")
        self.charged.append((round_number, len(rows), purpose))
        return float(len(self.charged))


class ConstantNoise:
    """The same units everywhere, and a note of every draw."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.shapes: list[tuple[int, ...]] = []

    @property
    def std_units(self) -> float:
        return 0.0

    def sample(self, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        self.shapes.append(tuple(shape))
        return torch.full(tuple(shape), self.units, dtype=torch.int32, device=device)


def contribution(*, pooled: bool = False, slots: int = 1, noise=None, book=None):
    kind = MeanOfPooledRecords if pooled else MeanOfRows
    ring = RingFormat.choose(clip_norm=CLIP * slots, noise_share_std=0.0, parties=2)
    shape = (1 if pooled else slots, 4)
    cut = CutLayer(ring=ring, slots=slots if pooled else 1, shape=shape, clip_norm=CLIP)
    return SecondaryRelease(kind(cut), noise=noise, ledger=book or Book())


def release(part: SecondaryRelease, plan: RoundPlan) -> Released:
    return part.release(plan, lambda _: torch.zeros(len(plan.rows), 1, 4), learns=False)


def plan(rows: list[int], *, number: int = 1, purpose: Purpose = "release") -> RoundPlan:
    return RoundPlan(
        round_number=number, rows=np.array(rows, dtype=np.int64), active=(1, 2), purpose=purpose
    )


def test_what_the_budget_forbids_is_not_computed() -> None:
    """The charge comes first, and every release of a row is booked again."""
    book = Book(limit=2)
    many = contribution(book=book)
    for number in (1, 2):
        release(many, plan([0, 1], number=number, purpose="train"))
    with pytest.raises(BudgetExceededError):
        many.release(plan([2], number=3), lambda _: pytest.fail("computed"), learns=False)
    assert book.charged == [(1, 2, "train"), (2, 2, "train")]


@pytest.mark.parametrize("worst", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("pooled", [False, True])
def test_what_is_not_finite_counts_as_zero_behind_noise(pooled: bool, worst: float) -> None:
    """One record that overflows stops no run that promises something: nobody is told of it."""
    whole = torch.full((2, 3, 4), 0.1)
    bad = whole.clone()
    bad[1, 2, 0] = worst
    plain = contribution(pooled=pooled, slots=3, noise=ConstantNoise(0))
    clean = whole.clone()
    if pooled:
        clean[1, 2] = 0.0
    else:
        clean[1] = 0.0
    released = plain.release(plan([0, 1]), lambda _: bad, learns=False)
    expected = plain.release(plan([0, 1], number=2), lambda _: clean, learns=False)
    assert torch.equal(released.words, expected.words)
    assert plain.not_finite == 1
    with pytest.raises(EncodingRangeError, match=r"is nan.*training has diverged"):
        contribution(pooled=pooled, slots=3).release(plan([0, 1]), lambda _: bad, learns=False)


@pytest.mark.parametrize("pooled", [False, True])
def test_noise_is_added_once_to_what_is_sent(pooled: bool) -> None:
    """One draw of exactly the sent shape, added as whole units."""
    noise = ConstantNoise(5)
    representation = torch.full((2, 3, 4), 0.01)
    plain = contribution(pooled=pooled, slots=3)
    noisy = contribution(pooled=pooled, slots=3, noise=noise)
    clipped = plain.aggregation.clip(representation)
    units = plain.units(clipped)
    assert torch.equal(noisy.units(clipped), units + 5)
    assert noise.shapes == [tuple(units.shape)] == [(2, 1 if pooled else 3, 4)]


def test_unclipped_rows_never_leave() -> None:
    """The bound is checked in integers, whoever forgets to clip."""
    with pytest.raises(EncodingRangeError, match="clip"):
        contribution(noise=ConstantNoise(0)).units(torch.full((1, 1, 4), 0.9))
    with pytest.raises(EncodingRangeError, match="clip"):
        contribution(pooled=True, slots=4, noise=ConstantNoise(0)).units(torch.full((1, 4, 4), 0.9))


# Directions and lengths around every border: inside, on the clip norm, beyond it, and zero.
VECTORS = [(0.0, 0.0)] + [
    (length * math.cos(angle), length * math.sin(angle))
    for length in (0.3, 1.0, 7.7)
    for angle in np.linspace(0, 2 * math.pi, 9)[:-1] + 0.1
]
SLOTS = 3


def test_one_record_moves_a_pooled_row_by_twice_the_clip_norm_at_most() -> None:
    """Exhaustively: all rows of three records out of 25, and every record instead of the third.

    The bound holds for the integers that are sent, not only for reals before rounding.
    """
    pool = contribution(pooled=True, slots=SLOTS)
    others = torch.tensor(list(itertools.combinations_with_replacement(VECTORS, SLOTS - 1)))
    last = torch.tensor(VECTORS)
    rows = torch.cat(
        [
            others.repeat_interleave(len(last), 0),
            last.repeat(len(others), 1)[:, None],
        ],
        dim=1,
    )
    units = pool.units(pool.aggregation.clip(rows)).view(len(others), len(last), 2).to(torch.int64)
    change = units[:, :, None] - units[:, None, :]
    worst = float(change.double().norm(dim=-1).max())
    limit = 2 * CLIP * 2**pool.aggregation.cut.ring.precision_bits
    assert worst <= limit
    assert worst > 0.999 * limit  # two opposite records reach it: the bound is not vacuous


def test_order_of_slots_does_not_matter() -> None:
    """A pooled row is a sum, so a change of ranks alone changes nothing."""
    pool = contribution(pooled=True, slots=SLOTS)
    row = torch.tensor([VECTORS[3], VECTORS[12], VECTORS[20]])[None]
    units = [
        pool.units(pool.aggregation.clip(row[:, list(p)]))
        for p in itertools.permutations(range(SLOTS))
    ]
    assert all(torch.equal(units[0], other) for other in units)


def test_term_is_what_the_primary_averages() -> None:
    """The term on the autograd graph and the decoded units agree to rounding."""
    for pooled in (False, True):
        part = contribution(pooled=pooled, slots=SLOTS)
        clipped = part.aggregation.clip(
            torch.randn(4, SLOTS, 2, generator=torch.Generator().manual_seed(0))
        )
        sent = (
            part.units(clipped) * part.aggregation.cut.ring.granularity / (SLOTS if pooled else 1)
        )
        assert torch.allclose(
            sent, part.aggregation.term(clipped), atol=part.aggregation.cut.ring.granularity
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_run_that_diverged_stops(value: float) -> None:
    """The round and the tensor are named, and what to change."""
    tensor = torch.zeros(3)
    require_finite("the loss", tensor, round_number=7)
    tensor[1] = value
    with pytest.raises(PrivacyError, match=r"round 7: the loss is not finite.*learning_rate"):
        require_finite("the loss", tensor, round_number=7)
