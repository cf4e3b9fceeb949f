"""Rows released once: every row in exactly one release, and every later use from the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.damage import damage
from torch import Tensor

from securevfl.core.errors import ConfigError, PrivacyError, ProtocolError
from securevfl.core.progress import ProgressEvent, RowsReleased, unheard
from securevfl.data.tables import consecutive_batches
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.exchanges import ReleasedRows, release_once
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.run_plan import RoundCounter, active_parties
from securevfl.mpc.codec import RingFormat

CUT = CutLayer(
    ring=RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2),
    slots=1,
    shape=(1, 2),
    clip_norm=1.0,
)


class Recorded(ReleasedRows):
    """Answers like a cache, and remembers what it was asked."""

    def __init__(self, rows: int) -> None:
        self.values = torch.arange(rows * 2, dtype=torch.float32).view(rows, 1, 2)
        super().__init__(
            self.values, ranks=(1, 2), rounds=RoundCounter(), device=torch.device("cpu")
        )
        self.plans: list[RoundPlan] = []

    def release(self, plan: RoundPlan) -> Tensor:
        self.plans.append(plan)
        return super().release(plan)


def store(folder: Path, rows: int, *, batch_size: int = 4) -> CachedRows:
    files = StateFolder(folder, settings_digest="abc")
    files.run = "1" * 32
    parts = consecutive_batches(np.arange(rows, dtype=np.int64), batch_size=batch_size)
    return CachedRows(files, parts, shape=CUT.shape)


def test_every_row_is_released_exactly_once(tmp_path: Path) -> None:
    """Batches cover the rows without overlap, each in a round of its own, by all secondaries."""
    exchange = Recorded(10)
    events: list[ProgressEvent] = []
    out = release_once(exchange, store(tmp_path, 10), observe=events.append)
    assert torch.equal(out, exchange.values)
    assert np.concatenate([plan.rows for plan in exchange.plans]).tolist() == list(range(10))
    assert [plan.round_number for plan in exchange.plans] == [1, 2, 3]
    assert {plan.active for plan in exchange.plans} == {(1, 2)}
    assert {plan.purpose for plan in exchange.plans} == {"release"}
    assert not any(plan.wants_gradient for plan in exchange.plans)
    assert events == [RowsReleased(done=done, of=3) for done in (1, 2, 3)]


def test_cache_answers_by_row_id() -> None:
    """Whatever the order and the purpose, a row's value is the one that was released."""
    cache = Recorded(6)
    plan = RoundPlan(
        round_number=9, rows=np.array([4, 0, 4], dtype=np.int64), active=(1,), purpose="train"
    )
    assert torch.equal(cache.release(plan), cache.values[[4, 0, 4]])
    cache.return_gradient(plan, torch.ones(3, 1, 2))
    cache.peers.tell(EpochMark(epoch=1, best=True))
    assert cache.ranks == (1, 2)
    assert cache.peers.ranks == ()


def test_no_rows(tmp_path: Path) -> None:
    """Nothing to release is an error, not an empty model."""
    with pytest.raises(ProtocolError, match="no rows"):
        release_once(Recorded(1), store(tmp_path, 0), observe=unheard)


class CutError(Exception):
    """The simulated crash."""


class CutBefore(Recorded):
    """A cut before the primary has the average of its last round."""

    def __init__(self, rows: int, *, rounds: int) -> None:
        super().__init__(rows)
        self.left = rounds

    def release(self, plan: RoundPlan) -> Tensor:
        average = super().release(plan)
        self.left -= 1
        if self.left < 0:
            raise CutError
        return average


def test_a_cut_pass_goes_on_behind_the_last_round_that_is_kept(tmp_path: Path) -> None:
    """Rounds that are on the disk are not asked for again, and owners alone can read them."""
    with pytest.raises(CutError):
        release_once(CutBefore(10, rounds=1), store(tmp_path, 10), observe=unheard)
    assert [path.name for path in (tmp_path / "released").iterdir()] == ["1.pt"]
    assert (tmp_path / "released" / "1.pt").stat().st_mode & 0o777 == 0o600
    again = Recorded(10)
    kept = store(tmp_path, 10)
    assert [part.tolist() for part in kept.asked_again(np.arange(8))] == [[4, 5, 6, 7]]
    out = release_once(again, kept, observe=unheard)
    assert [plan.rows.tolist() for plan in again.plans] == [[4, 5, 6, 7], [8, 9]]
    assert torch.equal(out, again.values)
    whole = Recorded(10)
    assert torch.equal(release_once(whole, store(tmp_path, 10), observe=unheard), out)
    assert whole.plans == []


@pytest.mark.parametrize("harm", ["truncated", "deleted", "flipped"])
@pytest.mark.parametrize("number", [1, 2])
def test_rows_that_were_lost_are_not_asked_for(tmp_path: Path, harm: str, number: int) -> None:
    """Only the last round's rows can be had again: what lies before it is refused, by name."""
    release_once(Recorded(10), store(tmp_path, 10), observe=unheard)
    damage(tmp_path / "released" / f"{number}.pt", harm)
    with pytest.raises(PrivacyError, match=rf"released/{number}\.pt: is missing or damaged.*copy"):
        store(tmp_path, 10).asked_again(np.arange(10))


def test_other_rows_than_the_table_has_are_refused(tmp_path: Path) -> None:
    """A table that grew, shrank or is cut into other batches is not the one that was released."""
    release_once(Recorded(10), store(tmp_path, 10), observe=unheard)
    for rows, batch_size in ((9, 4), (8, 4), (12, 4), (10, 5)):
        with pytest.raises(ConfigError, match=r"other rows were released.*restore the table"):
            store(tmp_path, rows, batch_size=batch_size)


@pytest.mark.parametrize(
    ("secondaries", "rate", "active"), [(4, 0.0, 4), (4, 0.5, 2), (4, 0.9, 1), (1, 0.99, 1)]
)
def test_active_parties(secondaries: int, rate: float, active: int) -> None:
    """(1 - r_d) k secondaries take part, and never none."""
    assert active_parties(range(secondaries), rate) == active
