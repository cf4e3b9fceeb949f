"""Ledgers that were damaged or restored from a copy: what may have been spent is not forgotten."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.counted import MODEL, Answering, write_counted

from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.book import Limit, recompute_figures, until_end
from securevfl.ledger.chain import read_chain
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import FILE, LedgerFile, book_restored, set_limit, summary_of

DELTA = 1e-4


def ask(path: Path, folder: Path, *, first: int = 0) -> tuple[float, float]:
    """Let a process ask for two rows; return what predictions and the table have spent."""
    world = Answering(path, folder)
    try:
        world.begin(world.keys.take(np.arange(first, first + 2)))
        world.answer([0, 1])
        ledger = world.ledger("bank-1")
        return ledger.epsilon_spent, ledger.total
    finally:
        world.restart()


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, Path, float]:
    """Return a federation file, its parties' folder, and what a first request has cost."""
    path = write_counted(tmp_path, releases=3)
    once, _ = ask(path, tmp_path / "parties", first=2)
    return path, tmp_path / "parties", once


def restore(folder: Path, backup: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)


def promise_of(folder: Path) -> list[GaussianRelease]:
    """Return the event that one full promise of the model is, from its ledger's plan."""
    file = LedgerFile(folder / "bank-1" / "ledger.jsonl", read_only=True)
    file.close()
    session = next(one for one in file.book.sessions if one.model == MODEL)
    return [
        GaussianRelease(noise_multiplier=session.plan.release_multiplier(session.noise_share_std))
    ]


def test_ledger_and_counts_of_one_backup_cost_one_promise_more(
    asked: tuple[Path, Path, float], tmp_path: Path
) -> None:
    """They agree, and every record has its releases again: the owner books them."""
    path, folder, once = asked
    shutil.copytree(folder, tmp_path / "backup")
    ask(path, folder)
    restore(folder, tmp_path / "backup")
    (booked,) = book_restored(folder / "bank-1" / "ledger.jsonl")
    spent, total = ask(path, folder)

    one = promise_of(folder)
    assert once == epsilon_of(one, delta=DELTA)
    assert (booked.epsilon, booked.lost) == (once, True)
    assert spent == total == epsilon_of(one * 2, delta=DELTA) > once


COUNTS: dict[str, Callable[[Path, Path], object]] = {
    "counts lost": lambda folder, _backup: (folder / FILE).unlink(),
    "counts older": lambda folder, backup: shutil.copy(backup / FILE, folder),
    "ledger older": lambda folder, backup: shutil.copy(backup / "ledger.jsonl", folder),
}


@pytest.mark.parametrize("how", COUNTS)
def test_counts_of_another_time_go_on_once_a_promise_is_booked(
    how: str, asked: tuple[Path, Path, float], tmp_path: Path
) -> None:
    """Refused by a line that names the command; afterwards they are compared as before."""
    path, folder, once = asked
    shutil.copytree(folder, tmp_path / "backup")
    ask(path, folder)
    COUNTS[how](folder / "bank-1", tmp_path / "backup" / "bank-1")
    with pytest.raises(PrivacyError, match=r"securevfl ledger restored TABLE"):
        ask(path, folder)

    book_restored(folder / "bank-1" / "ledger.jsonl")
    spent, _ = ask(path, folder)
    assert spent == epsilon_of(promise_of(folder) * 2, delta=DELTA) > once
    ask(path, folder)
    (folder / "bank-1" / FILE).unlink()
    with pytest.raises(PrivacyError, match="are not of the same time"):
        ask(path, folder)


def test_a_model_that_the_copy_does_not_know_stays_refused(
    asked: tuple[Path, Path, float], tmp_path: Path
) -> None:
    """Nothing was booked for it, so that its counts cannot begin anew."""
    path, folder, _ = asked
    own = folder / "bank-1"
    (own / "ledger.jsonl").unlink()
    begun(own / "ledger.jsonl", "a" * 32).close()
    assert len(book_restored(own / "ledger.jsonl")) == 2
    with pytest.raises(PrivacyError, match="are not of the same time"):
        ask(path, folder)


def plan_of(**privacy) -> ReleasePlan:
    settings = {} if privacy.keys() & {"noise_multiplier", "mechanism"} else {"epsilon": 4.0}
    return ReleasePlan(
        privacy=Privacy(**{"delta": DELTA, **settings, **privacy}),
        parties=2,
        min_active=2,
        rounds=10,
        rows_per_round=10,
        row_releases=100,
        releases_per_row=1,
        links=3,
    )


def begun(path: Path | None, run: str, *, model: str = "", rounds: int = 1, **privacy) -> Ledger:
    """Open a run, or a request to a model, and charge its first rounds."""
    plan = plan_of(**privacy)
    ledger = Ledger(
        path,
        party="bank",
        plan=plan,
        noise_share_std=plan.noise_share_std(),
        run=run,
        federation="test",
        model=model,
    )
    try:
        for number in range(1, rounds + 1):
            charge(ledger, number)
    except BaseException:
        ledger.close()
        raise
    return ledger


def charge(ledger: Ledger, number: int) -> None:
    """Charge a round of ten rows of its own."""
    rows = np.arange(10 * number, 10 * number + 10)
    ledger.charge(round_number=number, rows=rows, purpose="train")


def meet(ledger: Ledger, point: str, run: str) -> None:
    """Write that parties have countersigned a point."""
    occasion = {"federation": "test", "digest": "d", "run": run, "time": "now"}
    line = {"kind": "countersigned", **occasion, "meeting": "m", "point": point, "statements": []}
    ledger.file.append(line)


def test_what_is_open_follows_from_the_lines(tmp_path: Path) -> None:
    """Training unless its end is signed, predictions of every model; of a refused run nothing."""
    path = tmp_path / "ledger.jsonl"
    for run, points in {"ended": ["start", "end"], "cut": ["start"], "refused": []}.items():
        ledger = begun(path, run, rounds=run != "refused")
        for point in points:
            meet(ledger, point, run)
        ledger.close()
    begun(path, "request", model="ended").close()
    begun(path, "request 2", model="ended").close()
    begun(path, "of an older model", model="other").close()
    file = LedgerFile(path)
    file.close()
    found = file.book.open_promises()
    assert [one["run"] for one in found if not one["model"]] == ["cut"]
    assert [one["model"] for one in found if one["model"]] == ["ended", "cut", "other"]
    # What may be under way is open, though nothing of it is booked yet.
    begun(path, "last", rounds=0).close()
    file = LedgerFile(path)
    file.close()
    assert {"run": "last", "model": ""} in file.book.open_promises()


def test_a_promise_is_booked_in_full_and_twice_if_it_is_asked_for_twice(tmp_path: Path) -> None:
    """A run's is all that it planned, and that of predictions what they may spend."""
    path, plan = tmp_path / "ledger.jsonl", plan_of()
    begun(path, "a").close()
    book_restored(path)
    one = plan.release(plan.noise_share_std(), rounds=1, row_releases=10, passes=1)
    whole = plan.release(plan.noise_share_std(), rounds=10, row_releases=100)
    asked = GaussianRelease(noise_multiplier=gaussian_noise_multiplier(epsilon=4.0, delta=DELTA))
    (unit,) = summary_of(path).units
    assert unit.epsilon == pytest.approx(epsilon_of([one, whole, asked], delta=DELTA))
    book_restored(path)
    (unit,) = summary_of(path).units
    both = [one, whole, whole, asked, asked]
    assert unit.epsilon == pytest.approx(epsilon_of(both, delta=DELTA))


@pytest.mark.parametrize(
    ("privacy", "model"), [({"mechanism": "none"}, ""), ({"noise_multiplier": 3.0}, "m")]
)
def test_what_nothing_bounds_is_booked_without_bound(
    privacy: dict, model: str, tmp_path: Path
) -> None:
    """Without noise, or of predictions that no epsilon limits, though little was booked of them."""
    path = tmp_path / "ledger.jsonl"
    begun(path, "a", model=model, **privacy).close()
    book_restored(path)
    assert summary_of(path).units[0].epsilon is None


def test_a_booked_promise_takes_from_limits_and_budgets(tmp_path: Path) -> None:
    """A run under way is over its epsilon, and the owner's limit refuses others."""
    path = tmp_path / "ledger.jsonl"
    set_limit(path, Limit(unit="secondary-record", epsilon=7.0, delta=DELTA))
    begun(path, "a", rounds=5).close()
    book_restored(path)
    with pytest.raises(BudgetExceededError, match=r"over privacy.epsilon = 4"):
        begun(path, "a")
    with pytest.raises(BudgetExceededError, match=r"over the limit of its owner, 7"):
        begun(path, "b", rounds=10)


def test_a_run_that_ended_keeps_its_figures(tmp_path: Path) -> None:
    """What is booked later is in no earlier run's."""
    path = tmp_path / "ledger.jsonl"
    ledger = begun(path, "a", rounds=10)
    meet(ledger, "end", "a")
    spent = ledger.epsilon_spent
    ledger.close()
    book_restored(path)
    found = recompute_figures(until_end(read_chain(path)[1], "a"), "a")
    assert found["epsilon"] == found["total_epsilon"] == spent


def test_a_ledger_of_nothing_lacks_nothing(tmp_path: Path) -> None:
    """A limit alone is no promise; a ledger that is not there cannot be booked in."""
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ConfigError, match="is not there; put the newest copy of it there"):
        book_restored(path)
    set_limit(path, Limit(unit="entity", epsilon=1.0, delta=DELTA))
    before = path.read_bytes()
    assert book_restored(path) == []
    assert path.read_bytes() == before


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def without_the_last_line(path: Path) -> None:
    os.truncate(path, path.read_bytes()[:-1].rfind(b"\n") + 1)


def zeroed_at_the_end(path: Path) -> None:
    size = path.stat().st_size
    halved(path)
    os.truncate(path, size)


def edited(path: Path) -> None:
    """Alter the last line, of which nothing later knows."""
    content = bytearray(path.read_bytes())
    at = content.rfind(b'"salt"') + 12
    content[at] = ord("0") if content[at] != ord("0") else ord("1")
    with path.open("r+b") as file:
        file.write(content)


DAMAGES = {
    "cut": without_the_last_line,
    "halved": halved,
    "zeroed": zeroed_at_the_end,
    "edited": edited,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_what_a_run_has_found_the_next_one_asks_for(how: str, tmp_path: Path) -> None:
    """Till the lines are back; a copy that lacks them too is taken once they are booked."""
    path, old, new = (tmp_path / name for name in ("ledger.jsonl", "old", "new"))
    ledger = begun(path, "a")
    shutil.copy(path, old)
    charge(ledger, 2)
    shutil.copy(path, new)
    DAMAGES[how](path)
    with pytest.raises(PrivacyError, match="while this run was using it"):
        charge(ledger, 3)
    for _ in range(2):
        with pytest.raises(PrivacyError):
            begun(path, "b")
        with pytest.raises(PrivacyError):
            set_limit(path, Limit(unit="entity", epsilon=1.0, delta=DELTA))

    shutil.copy(new, path)
    assert book_restored(path) == [], "nothing is missing, and a run has noted that"
    begun(path, "b").close()
    ledger = begun(path, "c")
    DAMAGES[how](path)
    with pytest.raises(PrivacyError, match="while this run was using it"):
        charge(ledger, 2)
    shutil.copy(old, path)
    with pytest.raises(PrivacyError, match=r"lacks lines that a run has written.*ledger restored"):
        begun(path, "d")
    before = summary_of_noted(path)
    book_restored(path)
    begun(path, "d").close()
    assert (summary_of(path).units[0].epsilon or math.inf) > before


def summary_of_noted(path: Path) -> float:
    """Return what a copy says was spent, looked at apart from the note beside its place."""
    apart = path.with_name("apart.jsonl")
    shutil.copy(path, apart)
    return summary_of(apart).units[0].epsilon or math.inf


def test_a_resumed_run_notes_what_its_checkpoint_knows(tmp_path: Path) -> None:
    """A fresh run is refused like the resumed one, until what is missing is booked."""
    path = tmp_path / "ledger.jsonl"
    ledger = begun(path, "a")
    head = ledger.head
    ledger.close()
    without_the_last_line(path)
    resumed = begun(path, "a", rounds=0)
    with pytest.raises(PrivacyError, match=r"lacks releases.*securevfl ledger restored TABLE"):
        resumed.require_history(head)
    resumed.close()
    with pytest.raises(PrivacyError, match="lacks lines that a run has written"):
        begun(path, "b")

    book_restored(path)
    resumed = begun(path, "a", rounds=0)
    resumed.require_history(head)
    resumed.close()
    # The next cut is found again.
    with pytest.raises(BudgetExceededError):
        begun(path, "a")


def test_a_note_that_cannot_be_read_or_removed_is_one_line(tmp_path: Path) -> None:
    """It may have named any head; the file is let go, so that it can be restored."""
    path = tmp_path / "ledger.jsonl"
    begun(path, "a").close()
    note = tmp_path / "ledger.jsonl.head"
    note.mkdir()
    with pytest.raises(PrivacyError, match="lacks lines that a run has written"):
        begun(path, "b")
    with pytest.raises(ConfigError, match=r"is booked; remove .*ledger\.jsonl\.head by hand"):
        book_restored(path)
    note.rmdir()
    begun(path, "b").close()
