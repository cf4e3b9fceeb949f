"""A secondary's answers and lessons: nothing unasked, and exactly its part of the gradient."""

import copy

import numpy as np
import pytest
import torch
from helpers.secondaries import (
    FEATURES,
    LINKS,
    ROWS,
    WIDTH,
    NoCharge,
    answer,
    limits,
    make_secondary,
)
from torch import Tensor, nn

from securevfl.core.errors import (
    BudgetExceededError,
    EncodingRangeError,
    PrivacyError,
    ProtocolError,
)
from securevfl.dp.clipping import clip_rows
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.rounds.updates import set_gradients
from securevfl.federation.run_plan import Purpose
from securevfl.federation.session.request_validator import RequestValidator


def plan(
    rows: list[int] | None = None,
    *,
    number: int = 1,
    purpose: Purpose = "train",
    active: tuple[int, ...] = (1, 2),
) -> RoundPlan:
    ids = np.array(range(ROWS) if rows is None else rows, dtype=np.int64)
    return RoundPlan(round_number=number, rows=ids, active=active, purpose=purpose)


def represent(secondary: Secondary, bottom: nn.Module) -> Tensor:
    """Return the clipped representations of all rows, on the autograd graph."""
    index = torch.from_numpy(secondary.data.links.link(np.arange(ROWS)).indices)
    present = index >= 0
    index = index.clamp_min(0)
    return clip_rows(
        bottom(secondary.data.features[index], secondary.data.keys[index], present),
        secondary.contribution.aggregation.clip_norm,
    )


@pytest.mark.parametrize("active", [(1, 2, 3), (1, 3), (2,)])
def test_update_equals_that_of_one_autograd_graph(active: tuple[int, ...]) -> None:
    """Real secondaries behind the ring learn what one graph through the plain average teaches."""
    parties = {rank: make_secondary(seed=rank, clip_norm=2.0) for rank in (1, 2, 3)}
    twins = {rank: copy.deepcopy(party.bottom) for rank, party in parties.items()}
    exchange = SimulatedExchange(parties, parties[1].contribution.aggregation.cut)
    torch.manual_seed(9)
    top = nn.Sequential(nn.Flatten(), nn.Linear(LINKS * WIDTH, 1), nn.Tanh())
    twin_top = copy.deepcopy(top)
    average = exchange.release(plan(active=active)).requires_grad_()
    (gradient,) = set_gradients(top(average).square().sum(), list(top.parameters()), average)
    exchange.return_gradient(plan(active=active), gradient)
    mean = torch.stack([represent(parties[rank], twins[rank]) for rank in active]).mean(0)
    twin_top(mean).square().sum().backward()
    # The ring rounds the average by at most 2^-16 an element, and nothing else differs.
    for rank, party in parties.items():
        for ours, twin in zip(party.bottom.parameters(), twins[rank].parameters(), strict=True):
            if rank not in active:
                assert torch.equal(ours, twin)
                continue
            assert twin.grad is not None
            assert float(twin.grad.abs().max()) > 1e-3
            assert torch.allclose(ours, twin - 0.5 * twin.grad, atol=2e-3)
    for ours, twin in zip(top.parameters(), twin_top.parameters(), strict=True):
        assert ours.grad is not None
        assert twin.grad is not None
        assert torch.allclose(ours.grad, twin.grad, atol=2e-3)


def test_lesson_without_a_release_is_refused() -> None:
    """A gradient must belong to the round that was just answered, and comes once."""
    secondary = make_secondary()
    gradient = torch.ones(ROWS, LINKS, WIDTH)
    with pytest.raises(ProtocolError, match="without a release"):
        secondary.learn(plan(), gradient)
    answer(secondary, plan())
    with pytest.raises(ProtocolError, match="round 2: a gradient came without"):
        secondary.learn(plan(number=2), gradient)
    secondary.learn(plan(), gradient)
    with pytest.raises(ProtocolError, match="without a release"):
        secondary.learn(plan(), gradient)


@pytest.mark.parametrize("purpose", ["validation", "test", "release"])
def test_nothing_is_learned_from_evaluation(purpose: Purpose) -> None:
    """A gradient for a round that was no training round is refused."""
    secondary = make_secondary()
    answer(secondary, plan(purpose=purpose))
    with pytest.raises(ProtocolError, match="without a release"):
        secondary.learn(plan(purpose=purpose), torch.ones(ROWS, LINKS, WIDTH))


def test_gradient_that_is_not_finite_is_refused() -> None:
    """NaN from the primary does not reach the weights."""
    secondary = make_secondary()
    before = secondary.weights()
    answer(secondary, plan())
    gradient = torch.full((ROWS, LINKS, WIDTH), torch.nan)
    with pytest.raises(PrivacyError, match="the gradient is not finite"):
        secondary.learn(plan(), gradient)
    assert all(torch.equal(before[name], value) for name, value in secondary.weights().items())


def test_a_round_that_is_not_due_books_and_computes_nothing() -> None:
    """The session's plan is asked before the ledger, the model and the sum."""

    class Forbidden(NoCharge):
        def charge(self, *, round_number: int, rows: np.ndarray, purpose: str) -> float:
            raise AssertionError("booked")

    secondary = make_secondary(ledger=Forbidden(), validator=RequestValidator(limits()))
    with pytest.raises(ProtocolError, match="rows outside"):
        answer(secondary, plan([0, ROWS]))


def test_forbidden_release_computes_nothing() -> None:
    """The budget is asked before the model runs; what it forbids is not even computed."""

    class Spent(NoCharge):
        def charge(self, *, round_number: int, rows: np.ndarray, purpose: str) -> float:
            raise BudgetExceededError("spent")

    secondary = make_secondary(ledger=Spent())
    secondary.bottom.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(BudgetExceededError):
        answer(secondary, plan())
    with pytest.raises(ProtocolError, match="without a release"):
        secondary.learn(plan(), torch.ones(ROWS, LINKS, WIDTH))


def test_weights_that_diverged_send_nothing() -> None:
    """NaN weights end the run instead of being clipped into something that looks sound."""
    secondary = make_secondary()
    with torch.no_grad():
        next(secondary.bottom.parameters()).fill_(torch.nan)
    with pytest.raises(EncodingRangeError, match=r"is nan.*training has diverged"):
        answer(secondary, plan())


def test_frozen_secondary_never_learns() -> None:
    """Without an optimizer a gradient changes nothing."""
    secondary = make_secondary(frozen=True)
    before = secondary.weights()
    answer(secondary, plan([0, 1], purpose="release"))
    secondary.learn(plan([0, 1]), torch.ones(2, LINKS, WIDTH))
    assert all(torch.equal(before[name], value) for name, value in secondary.weights().items())


def test_dropout_only_in_training() -> None:
    """Two evaluations give the same words; two training rounds do not."""
    secondary = make_secondary(dropout=0.5)
    looks = [answer(secondary, plan(number=n, purpose="test")) for n in (1, 2)]
    assert torch.equal(looks[0], looks[1])
    lessons = [answer(secondary, plan(number=n)) for n in (3, 4)]
    assert not torch.equal(lessons[0], lessons[1])


def test_state_goes_on_with_the_same_draws() -> None:
    """A restored secondary answers the next training round with the same dropped units."""
    one, other = make_secondary(dropout=0.5), make_secondary(dropout=0.5)
    answer(one, plan())
    other.resume(1, one.state())
    assert torch.equal(answer(one, plan(number=2)), answer(other, plan(number=2)))


class Careless(nn.Module):
    """Looks at empty slots too, and at other rows where one record is a certain one."""

    recordwise = False

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.positions = nn.Linear(FEATURES, WIDTH)
        self.mixes = mixes

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        out: Tensor = self.positions(features)
        rare = (features[..., 0] == 7.0).any() & self.mixes
        return torch.where(rare, out.mean(dim=0, keepdim=True), out)


def answered_rows(secondary: Secondary) -> Tensor:
    """Return what a secondary answers, row by row: a word may hold numbers of several rows."""
    cut = secondary.contribution.aggregation.cut
    return cut.decode(
        answer(secondary, plan(purpose="test")), rows=ROWS, active=("a",), round_number=1
    ).flatten(1)


def test_no_record_stands_in_an_empty_slot() -> None:
    """A model that reads slots without a record would give record 0 to rows that lack it."""
    secondary = make_secondary(frozen=True, bottom=Careless(mixes=False))
    links = secondary.data.links.link(np.arange(ROWS)).indices
    without = (links != 0).all(axis=1)
    before = answered_rows(secondary)
    secondary.data.features[0] += 1.0
    after = answered_rows(secondary)

    assert (links[without] == -1).any()
    assert torch.equal(before[without], after[without])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("recordwise", [False, True])
def test_rows_of_somebody_elses_model_cannot_mix(
    recordwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for one record in a million, which no trial would find: it sees one row alone."""
    monkeypatch.setattr(Careless, "recordwise", recordwise)
    moved = {}
    for row_by_row in (False, True):
        secondary = make_secondary(frozen=True, bottom=Careless(mixes=True), row_by_row=row_by_row)
        links = secondary.data.links.link(np.arange(ROWS)).indices
        before = answered_rows(secondary)
        record = links[0, 0]
        secondary.data.features[record, 0] = 7.0
        after = answered_rows(secondary)
        changed = (before != after).any(dim=1).numpy()
        moved[row_by_row] = bool((changed & (links != record).all(axis=1)).any())
        assert changed.any()

    assert moved == {False: True, True: False}
