"""Rounds that depend on nothing are announced ahead: so many, in order, and never more."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lying_primary import PARTIES, RUN, Played, Promise, world
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.waits import Wait
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.messages import RoundPlan, Share
from securevfl.federation.over_star import PeersOverStar
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.exchanges import RoundExchange, release_once
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.run_plan import ROUNDS_AHEAD
from securevfl.ledger.ledger import Ledger
from securevfl.mpc.codec import RingFormat
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport

CUT = CutLayer(
    ring=RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2),
    slots=1,
    shape=(1, 2),
    clip_norm=1.0,
)
WAIT = Wait(primary_s=1.0, for_primary_s=2.0)
ROUNDS = 3 * ROUNDS_AHEAD


class Star(PrimaryTransport):
    """The primary's end, before two secondaries that say at once what a row's number makes."""

    def __init__(self) -> None:  # no socket is opened
        self.plans: dict[int, RoundPlan] = {}
        self.events: list[tuple[str, int]] = []

    def broadcast(
        self, names: Sequence[str], message: Message, *, owned: bool = False, deadline_s: float
    ) -> None:
        """Note an announced round."""
        del names, owned, deadline_s
        plan = RoundPlan.from_message(message)
        self.plans[plan.round_number] = plan
        self.events.append(("announced", plan.round_number))

    def receive_each(
        self, names: Sequence[str], kind: Any, *, round_number: int | None, deadline_s: float
    ) -> Iterator[Message]:
        """Yield every secondary's words of a round."""
        del kind, deadline_s
        assert round_number is not None
        rows = torch.from_numpy(self.plans[round_number].rows).int()
        for _ in names:
            units = torch.stack([rows, -rows], dim=1)[:, None]
            words = CUT.encode(units).numpy()
            yield Share(round_number=round_number, words=words).to_message()


class Book(Ledger):
    """A ledger that notes when it is charged."""

    def __init__(self, events: list[tuple[str, int]]) -> None:  # no file is opened
        self.events = events

    def charge(self, *, round_number: int, rows: np.ndarray, purpose: str) -> float:
        """Note it."""
        del rows, purpose
        self.events.append(("charged", round_number))
        return 0.0


def exchange(star: Star, *, ledger: Ledger | None = None) -> RoundExchange:
    peers = PeersOverStar(star, {1: "a", 2: "b"}, wait=WAIT)
    return RoundExchange(peers, CUT, device=torch.device("cpu"), ledger=ledger)


def one_by_one(parts: Sequence[np.ndarray]) -> Tensor:
    over = exchange(Star())
    plans = (
        RoundPlan(round_number=number, rows=rows, active=(1, 2), purpose="release")
        for number, rows in enumerate(parts, 1)
    )
    return torch.cat([over.release(plan) for plan in plans])


def test_rounds_are_announced_ahead_and_no_further(tmp_path: Path) -> None:
    """Each is charged before it is announced, and the eighth before it is on the disk by then.

    What comes back is what one round at a time brings.
    """
    star = Star()
    files = StateFolder(tmp_path, settings_digest="abc")
    files.run = RUN
    parts = np.split(np.arange(2 * ROUNDS), ROUNDS)
    kept = CachedRows(files, parts, shape=CUT.shape)
    keep = kept.keep

    def noted(number: int, aggregate: Tensor) -> None:
        keep(number, aggregate)
        star.events.append(("kept", number + 1))

    kept.keep = noted  # type: ignore[method-assign]
    charged = exchange(star, ledger=Book(star.events))
    found = release_once(charged, kept, observe=lambda _: None)

    assert torch.equal(found, one_by_one(parts))
    at = {event: place for place, event in enumerate(star.events)}
    assert len(at) == 3 * ROUNDS
    for number in range(1, ROUNDS + 1):
        assert at["charged", number] < at["announced", number] < at["kept", number]
        if number > ROUNDS_AHEAD:
            assert at["kept", number - ROUNDS_AHEAD] < at["charged", number]
    # The first is waited for when all that may be are under way.
    assert at["announced", ROUNDS_AHEAD] < at["kept", 1]


@pytest.mark.parametrize(("names", "who"), [({1: "a"}, "'a'"), ({1: "a", 2: "b"}, "some second")])
def test_a_row_that_is_longer_than_clips_allow_names_its_round(
    names: dict[int, str], who: str
) -> None:
    """And the secondary, where there is only one."""
    peers = PeersOverStar(Star(), names, wait=WAIT)
    over = RoundExchange(peers, replace(CUT, clip_norm=2.0**-16), device=torch.device("cpu"))
    rows = np.arange(4)
    over.release(RoundPlan(round_number=1, rows=rows[:1], active=tuple(names), purpose="release"))
    with pytest.raises(ProtocolError, match=f"^round 2: {who}.* sent a longer vector than"):
        over.release(RoundPlan(round_number=2, rows=rows, active=tuple(names), purpose="release"))


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Played]:
    played = Played(Promise(encoder="frozen", links=1), tmp_path)
    facts = world(played.promise).facts
    played.join(facts, resume=False)
    yield played
    played.leave()


def announced(count: int) -> list[Message]:
    active = tuple(range(1, PARTIES + 1))
    return [
        RoundPlan(
            round_number=row + 1, rows=np.array([row]), active=active, purpose="release"
        ).to_message()
        for row in range(count)
    ]


def test_a_primary_that_announces_further_ahead_is_refused(game: Played) -> None:
    """Before anything of it is used: nothing is charged, and nothing leaves."""
    refused = game.say(*announced(ROUNDS_AHEAD + 1))
    assert isinstance(refused, ProtocolError)
    assert f"it may announce {ROUNDS_AHEAD} rounds ahead" in str(refused)
    assert game.left == []
    assert game.ledger.row_releases == 0


def test_as_many_rounds_as_may_be_under_way_are_heard(game: Played) -> None:
    """They are answered in their order, up to what one pass allows."""
    passes = game.plan.releases.rounds
    assert passes <= ROUNDS_AHEAD
    assert game.say(*announced(passes)) is None
    assert game.ledger.row_releases == passes
