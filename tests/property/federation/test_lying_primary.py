"""An arbitrary primary against a real secondary: nothing leaves that the plan does not have."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from helpers.lying_primary import (
    BATCH,
    ROWS,
    Played,
    average,
    done,
    gradient_for,
    promises,
    true_cost,
    world,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from securevfl import SecureVflError
from securevfl.dp.events import Release
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.messages import EpochMark, Gradient, Mean, RoundPlan
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.run_plan import new_run
from securevfl.federation.session.request_validator import RequestValidator
from securevfl.ledger import ledger as ledger_module

# dp-accounting's grid of 1e-3 rounds up; the ledger's is finer.
_GRID = 1.02
PURPOSES = ("release", "train", "validation", "test")


BY_ENCODER = [
    [one for one in promises() if one.encoder == encoder]
    for encoder in ("dp-trained", "trained", "frozen")
]


class LyingPrimary(RuleBasedStateMachine):
    """Says what it likes: valid, reordered, repeated, oversized, and in session after session."""

    @initialize(promise=st.one_of(*(st.sampled_from(some) for some in BY_ENCODER)))
    def begin(self, promise) -> None:
        """Hand the file round, and begin a first session."""
        self.folder = Path(mkdtemp(prefix="securevfl-game-"))
        self.game = Played(promise, self.folder)
        self.game.join(replace(world(promise).facts, run=new_run()), resume=False)

    def teardown(self) -> None:
        """Add up what left, by other means than the ledger's."""
        if not hasattr(self, "game"):
            return
        game = self.game
        self.check()
        # What a closed ledger has booked it still knows.
        spent = game.ledger.total
        cost = true_cost(game)
        game.leave()
        shutil.rmtree(self.folder)
        assert spent * _GRID + 1e-2 >= cost, (spent, cost, game.left)

    @precondition(lambda self: self.game.alive)
    @rule(steps=st.integers(1, 30))
    def go_on(self, steps: int) -> None:
        """Do what an honest primary does next, also after the last epoch."""
        for _ in range(steps):
            if self.game.alive:
                self.step()

    def step(self) -> None:
        """Take one step of the script."""
        step = next(self.game.script)
        if step.round is not None:
            self.heard(self.game.ask, step.round, *step.messages)
        else:
            self.heard(self.game.say, *self._with_positions(step.messages))

    def _with_positions(self, messages):
        """Fill a mean with the shapes that the secondary has."""
        if len(messages) == 2:
            own = dict(self.game.secondary.bottom.get_submodule("positions").named_parameters())
            values = {name: np.zeros(tuple(one.shape), np.float32) for name, one in own.items()}
            number = messages[0].round_number
            return (messages[0], Mean(round_number=number, values=values).to_message())
        return messages

    def heard(self, verb, *args) -> None:
        """Say something; if it was refused, nothing of the model may have changed."""
        before = self.game.fingerprint()
        positions, left = self.game.positions, len(self.game.left)
        if verb(*args) is not None:
            after = self.game.fingerprint()
            assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
            assert self.game.positions == positions
            # What a bad gradient follows had left before, and was charged.
            assert len(self.game.left) <= left + 1

    @precondition(lambda self: self.game.alive)
    @rule(kind=st.sampled_from(("whole part", "all", "twice", "earlier", "outside", "one")))
    def lie_about_rows(self, kind: str) -> None:
        """Announce the round that is due, with other rows."""
        self.announce(lambda due: replace(due, rows=self._rows(kind, due.rows)))

    @precondition(lambda self: self.game.alive)
    @rule(purpose=st.sampled_from(PURPOSES), kind=st.sampled_from(("due", "all", "whole part")))
    def lie_about_the_purpose(self, purpose, kind: str) -> None:
        """Announce the round that is due, or more, for something else."""
        self.announce(lambda due: replace(due, purpose=purpose, rows=self._rows(kind, due.rows)))

    @precondition(lambda self: self.game.alive)
    @rule(active=st.sampled_from(((1,), (2,), (2, 1), (1, 2, 3), (1, 1), ())))
    def lie_about_the_parties(self, active: tuple[int, ...]) -> None:
        """Announce the round that is due, with other parties."""
        self.announce(lambda due: replace(due, active=active))

    @precondition(lambda self: self.game.alive)
    @rule(number=st.sampled_from((0, 1, 2, 5, 10**6)))
    def lie_about_the_number(self, number: int) -> None:
        """Announce the round that is due, under another number."""
        self.announce(lambda due: replace(due, round_number=number))

    @precondition(lambda self: self.game.alive)
    @rule(taught=st.booleans())
    def announce_twice(self, taught: bool) -> None:
        """Announce the round that is due, and once more under a new number."""
        said: list[RoundPlan] = []
        self.announce(lambda due: said.append(due) or due)
        if said and self.game.alive:
            again = replace(said[0], round_number=said[0].round_number + 1)
            then = (gradient_for(self.game.plan, again),) if taught else ()
            self.heard(self.game.ask, again, *then)

    def announce(self, lie: Callable[[RoundPlan], RoundPlan]) -> None:
        """Go on to the next round that is due, and announce what a lie makes of it."""
        step = next(self.game.script)
        while step.round is None:
            self.heard(self.game.say, *self._with_positions(step.messages))
            if not self.game.alive:
                return
            step = next(self.game.script)
        wanted = lie(step.round)
        then = (gradient_for(self.game.plan, wanted),) if wanted.purpose == "train" else ()
        self.heard(self.game.ask, wanted, *then)

    def _rows(self, kind: str, due: np.ndarray) -> np.ndarray:
        """Return other rows than those that are due."""
        match kind:
            case "whole part":
                return np.arange(due.min(), min(due.min() + 2 * BATCH, ROWS))
            case "all":
                return np.arange(ROWS)
            case "twice":
                return np.repeat(due[:2], 2)
            case "earlier":
                return due % BATCH
            case "outside":
                return due + ROWS
            case "one":
                return due[:1]
            case _:
                return due

    @precondition(lambda self: self.game.alive)
    @rule(number=st.integers(0, 60))
    def ask_for_positions(self, number: int) -> None:
        """Ask for positional weights at any time."""
        self.heard(self.game.say, *self._with_positions(average(number).messages))

    @precondition(lambda self: self.game.alive)
    @rule(epoch=st.integers(1, 4), restore=st.booleans())
    def end_an_epoch(self, epoch: int, restore: bool) -> None:
        """End an epoch, or training, at any time."""
        mark = EpochMark(epoch=epoch, best=not restore, restore_best=restore)
        self.heard(self.game.say, mark.to_message())

    @precondition(lambda self: self.game.alive)
    @rule(value=st.sampled_from([np.nan, np.inf, 0.0, 1e30]), wrong=st.integers(0, 2))
    def spoil_a_gradient(self, value: float, wrong: int) -> None:
        """Follow a round with a gradient of another round or shape, or no numbers."""
        step = next(self.game.script)
        if step.round is None or step.round.purpose != "train":
            return
        wanted = step.round
        sent = gradient_for(self.game.plan, wanted, value=value)
        if wrong == 1:
            sent = gradient_for(self.game.plan, replace(wanted, round_number=99), value=0.1)
        elif wrong == 2:
            sent = Gradient(
                round_number=wanted.round_number, gradient=np.ones((3, 1, 1), np.float32)
            ).to_message()
        self.heard(self.game.ask, wanted, sent)

    @precondition(lambda self: self.game.alive)
    @rule()
    def end_the_run(self) -> None:
        """Say that it is over, at any time."""
        self.heard(self.game.say, done())

    @rule(
        resume=st.booleans(),
        run=st.sampled_from(("own", "own", "own", "new", "first")),
        epoch=st.integers(0, 3),
        other=st.sampled_from((0, 0, 0, 6, -6)),
    )
    def meet_again(self, resume: bool, run: str, epoch: int, other: int) -> None:
        """Begin another session, with the same numbers or with others under the same name.

        Whether it is a resumed one is the party's own choice; what it is called, the primary's.
        """
        facts = world(self.game.promise).facts
        runs = self.game.runs
        called = {"own": runs[-1] if resume else new_run(), "new": new_run(), "first": runs[0]}
        told = replace(
            facts,
            run=called[run],
            resume_epoch=epoch if resume else 0,
            train_rows=facts.train_rows - other,
            validation_rows=facts.validation_rows + other,
        )
        if other == -6:
            told = replace(told, validation_rows=facts.validation_rows, test_rows=2)
        try:
            self.game.join(told, resume=resume)
        except SecureVflError:
            self.game.leave()

    @invariant()
    def check(self) -> None:
        """Nothing leaves uncharged, and nothing is charged beyond the budget."""
        if not hasattr(self, "game") or not self.game.alive:
            return
        game = self.game
        assert len(game.own) <= game.ledger.rounds
        assert sum(len(left.rows) for left in game.own) <= game.ledger.row_releases
        limit = game.plan.config.privacy.epsilon
        if limit is not None:
            assert game.ledger.epsilon_spent <= limit
        if game.promise.encoder == "trained":
            assert game.positions == 0


LyingPrimary.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    # A failing game is told as it was found: making it smaller takes minutes.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestLyingPrimary = LyingPrimary.TestCase


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_games() -> None:
    """The same at length, and never the same games twice."""
    run_state_machine_as_test(
        LyingPrimary,
        settings=settings(
            max_examples=int(os.environ.get("SECUREVFL_GAMES", "10000")),
            stateful_step_count=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def rounds_without_end(patch: pytest.MonkeyPatch) -> None:
    """Take out what ends a dp-trained encoder's rounds: the plan, twice, and an honest price."""
    for name in ("validate_round", "validate_average", "validate_epoch", "validate_done"):
        patch.setattr(RequestValidator, name, lambda *_args: None)
    patch.setattr(ledger_module, "require_planned", lambda *_args, **_fields: None)
    release = ReleasePlan.release

    def cheap(plan: ReleasePlan, tau: float, *, rounds: int, **fields: Any) -> Release:
        return release(plan, tau, rounds=min(rounds, plan.rounds), **fields)

    patch.setattr(ReleasePlan, "release", cheap)


def rounds_of_any_size(patch: pytest.MonkeyPatch) -> None:
    """Take out what holds a round to the rows that its noise was made for."""
    patch.setattr(RequestValidator, "_require_size", lambda *_args, **_fields: None)
    patch.setattr(RequestValidator, "_require_pass", lambda *_args, **_fields: None)
    patch.setattr(ledger_module, "require_size", lambda *_args, **_fields: None)


def positions_at_any_time(patch: pytest.MonkeyPatch) -> None:
    """Take out what keeps positional weights at home."""
    patch.setattr(RequestValidator, "validate_average", lambda *_args: None)


def rows_again(patch: pytest.MonkeyPatch) -> None:
    """Take out what keeps a frozen run from releasing a row afresh, with fresh noise."""
    patch.setattr(CachedRelease, "again", lambda *_args: None)
    patch.setattr(
        CachedRelease, "charge", lambda kept, *, rows, **_fields: (kept.epsilon_spent, len(rows))[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "hole", [rounds_without_end, rounds_of_any_size, positions_at_any_time, rows_again]
)
def test_a_hole_is_found(hole: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The games see it when what they are about is taken out."""
    games = settings(
        max_examples=1000,
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.MonkeyPatch.context() as patch:
        hole(patch)
        with pytest.raises(AssertionError):
            run_state_machine_as_test(LyingPrimary, settings=games)
