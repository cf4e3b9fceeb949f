"""An arbitrary primary that asks a kept model on and on: what one record adds to all of it.

Two worlds, with a record and without it, hear the same requests: given all answers so far, a
primary asks the same. Whatever these requests are, the sums before noise differ in N rows of a
record at most, and over the noise by no more than the one release that ledgers have booked.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from helpers.counted import BATCH, Answering, write_counted
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
from securevfl.core.errors import StorageError
from securevfl.data.tables import KeyTable
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.federation.rounds.cached_release import CountedRelease
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import RecordCounts

UNITS = ("secondary-record", "entity")
MOST = (1, 2, 5)


class AskingOnAndOn(RuleBasedStateMachine):
    """Asks for what it likes, of whom it likes, as often as it likes; parties crash and return."""

    @initialize(
        unit=st.sampled_from(UNITS),
        most=st.sampled_from(MOST),
        colluding=st.sampled_from((0, 0, 1)),
        record=st.integers(0, 7),
    )
    def begin(self, unit: str, most: int, colluding: int, record: int) -> None:
        """Begin both worlds."""
        self.folder = Path(mkdtemp(prefix="securevfl-asked-"))
        path = write_counted(self.folder, releases=most, unit=unit, colluding=colluding)
        self.most, self.unit, self.colluding = most, unit, colluding
        touched = ("bank-1", "bank-2") if unit == "entity" else ("bank-1",)
        gone = dict.fromkeys(touched, record)
        self.here = Answering(path, self.folder / "here")
        self.there = Answering(path, self.folder / "there", gone=gone)
        columns = [self.here.own[name].columns for name in touched]
        self.wanted = [
            {name: float(column[record]) for name, column in one.items()} for one in columns
        ]
        self.asking = False
        self.moved, self.rows_moved = 0.0, 0
        self.asked = 0
        self.spent: set[float] = set()

    def teardown(self) -> None:
        """Remove both worlds' files."""
        if hasattr(self, "folder"):
            self.here.restart()
            self.there.restart()
            shutil.rmtree(self.folder)

    @rule(
        near=st.lists(st.sampled_from((0.0, 1e-3, 0.1, 3.0)), min_size=1, max_size=6),
        which=st.integers(0, 1),
        again=st.sampled_from((0, 0, 24)),
        active=st.sampled_from(((1, 2), (1, 2), (1,), (2,))),
    )
    def request(self, near: list[float], which: int, again: int, active: tuple[int, ...]) -> None:
        """Ask for rows near to the record, or far; several may have one key."""
        if len(active) <= self.colluding:
            active = (1, 2)
        wanted = self.wanted[which % len(self.wanted)]
        keys = KeyTable(
            name="agency",
            columns={name: value + np.array(near) for name, value in wanted.items()},
        )
        for world in (self.here, self.there):
            world.begin(keys, active=active, again=again)
        self.asking, self.asked = True, len(near)
        self.left = set(range(len(near)))
        self.rounds = -(-len(near) // BATCH)

    @precondition(lambda self: self.asking and self.left and self.rounds)
    @rule(data=st.data())
    def round(self, data: Any) -> None:
        """Ask for some rows of the request, in any order."""
        rows = data.draw(
            st.lists(st.sampled_from(sorted(self.left)), min_size=1, max_size=BATCH, unique=True)
        )
        self.left -= set(rows)
        self.rounds -= 1
        change = self.here.answer(rows) - self.there.answer(rows)
        squares = change.square().sum(dim=1)
        plan = self.here.plan
        assert plan is not None
        honest = len(plan.secondaries) - self.colluding
        self.moved += float(squares.sum()) / (plan.noise_share_std**2 * honest)
        self.rows_moved += int((squares > 0).sum())

    @precondition(lambda self: self.asking)
    @rule(rows=st.lists(st.integers(-3, 9), min_size=1, max_size=4))
    def lie(self, rows: list[int]) -> None:
        """Ask for rows twice, for others, or for too many: refused, in both worlds alike."""
        refused = []
        for world in (self.here, self.there):
            try:
                world.answer(rows)
            except SecureVflError as error:
                refused.append(str(error))
            else:
                refused.append("")
        if refused == ["", ""]:
            # They were due; what came of them is not looked at, and counts all the same.
            self.left -= set(rows)
            self.rounds -= 1
        assert refused[0] == refused[1]
        if refused[0]:
            self.asking = False

    @precondition(lambda self: self.asking and self.left and self.rounds)
    @rule(row=st.integers(0, 5))
    def crash(self, row: int) -> None:
        """Fall between counting and booking: the count stays, and nothing has left."""
        row %= self.asked
        if row not in self.left:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ledger, "charge", _full_disk)
            for world in (self.here, self.there):
                with pytest.raises(StorageError):
                    world.answer([row])
        self.restart()

    @rule()
    def restart(self) -> None:
        """End all processes."""
        self.here.restart()
        self.there.restart()
        self.asking = False

    @invariant()
    def within_the_promise(self) -> None:
        """N rows a record, and the booked release over the noise."""
        if not hasattr(self, "moved"):
            return
        records = 2 if self.unit == "entity" else 1
        assert self.rows_moved <= records * self.most
        spent = [
            files.ledger.epsilon_spent
            for world in (self.here, self.there)
            for files in world.files.values()
            if files._ledger is not None
        ]
        if self.moved and max(spent, default=0):
            booked = gaussian_noise_multiplier(epsilon=max(spent), delta=1e-4) ** -2
            assert self.moved <= booked * (1 + 1e-6), (self.moved, booked)


def _full_disk(*_args: Any, **_fields: Any) -> float:
    raise StorageError("no space left")


def _settings(examples: int, **more: Any) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=16,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


AskingOnAndOn.TestCase.settings = _settings(30, derandomize=True, phases=[Phase.generate])
TestAskingOnAndOn = AskingOnAndOn.TestCase


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thousands_of_games() -> None:
    """The same at length, and never the same games twice."""
    run_state_machine_as_test(
        AskingOnAndOn, settings=_settings(int(os.environ.get("SECUREVFL_GAMES", "3000")))
    )


def no_filter(patch: pytest.MonkeyPatch) -> None:
    """Let every record take part for ever."""
    admit = RecordCounts.admit

    def all_of_them(counts: RecordCounts, records: np.ndarray, *, most: int) -> Any:
        del most
        return admit(counts, records, most=10**9)

    patch.setattr(RecordCounts, "admit", all_of_them)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """Start again at zero whenever a process starts."""
    count = RecordCounts._count

    def nothing(counts: RecordCounts, entry: dict[str, Any], where: str) -> None:
        released = {"records": []} if entry["kind"] == "released" else {}
        count(counts, entry | released, where)

    patch.setattr(RecordCounts, "_count", nothing)


def by_request(patch: pytest.MonkeyPatch) -> None:
    """Filter what is linked, and not what is counted."""
    patch.setattr(CountedRelease, "link", lambda own, rows: own.links.link(rows))


@pytest.mark.slow
@pytest.mark.parametrize("hole", [no_filter, by_request, forgetful])
def test_a_hole_is_found(hole: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The games see it when what they are about is taken out."""
    with pytest.MonkeyPatch.context() as patch:
        hole(patch)
        with pytest.raises(AssertionError):
            run_state_machine_as_test(
                AskingOnAndOn,
                settings=_settings(300, derandomize=True, phases=[Phase.generate]),
            )


def test_a_record_is_released_until_it_has_had_its_releases(tmp_path: Path) -> None:
    """The first N rows have it, whatever they are; all later ones are what they are without it."""
    path = write_counted(tmp_path, releases=3)
    here = Answering(path, tmp_path / "here")
    there = Answering(path, tmp_path / "there", gone={"bank-1": 4})
    own = here.own["bank-1"].columns
    keys = KeyTable(name="agency", columns={name: own[name][[4]] for name in own})
    spent, moved = set(), []
    for number in range(50):
        for world in (here, there):
            world.begin(keys, again=24)
        difference = here.answer([0]) - there.answer([0])
        moved.append(bool(torch.any(difference)))
        spent.add(here.ledger("bank-1").epsilon_spent)
        if number in (1, 20):
            here.restart()
    assert moved == [True] * 3 + [False] * 47
    assert len(spent) == 1
    here.restart()
    there.restart()
