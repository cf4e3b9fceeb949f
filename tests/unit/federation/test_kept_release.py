"""What a frozen secondary answers to whom: once afresh, once more the same, and never otherwise."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.core.errors import PrivacyError
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.rounds.cached_release import CachedRelease
from securevfl.federation.run_plan import ROUNDS_AHEAD, RunFacts, plan_run
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sampling import FixedLinks
from securevfl.testing import write_federation

RUN = "1" * 32
FIRST, SECOND = np.arange(32), np.arange(32, 60)
WORDS = torch.arange(7)


class Session:
    """One session of a secondary, on the same two files and the same ledger."""

    def __init__(
        self, folder: Path, *, batch_size: int = 32, firsts: np.ndarray | None = None
    ) -> None:
        config = read_federation(
            write_federation(
                folder,
                rows=60,
                privacy=FROZEN,
                model={"release": "pooled"},
                training={"batch_size": batch_size},
            )
        )
        facts = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12, run=RUN)
        plan = plan_run(config, facts)
        self.ledger = Ledger(
            folder / "ledger.jsonl",
            party="bank-1",
            plan=plan.releases,
            noise_share_std=plan.noise_share_std,
            run=RUN,
        )
        files = StateFolder(folder / "kept", settings_digest="abc")
        files.run = RUN
        files.guard(self.ledger)
        indices = np.zeros((60, 4), dtype=np.int64)
        self.kept = CachedRelease(
            files,
            self.ledger,
            bottom=torch.nn.Linear(2, 2),
            links=FixedLinks(table=LinkTable(indices=indices, distances=np.zeros((60, 4)))),
            records={"features": torch.zeros(3, 2)},
            firsts=firsts,
            fit=None,
        )

    def __enter__(self) -> CachedRelease:
        return self.kept

    def __exit__(self, *_error: object) -> None:
        self.ledger.close()


def answer(kept: CachedRelease, rows: np.ndarray, number: int) -> None:
    assert kept.again(rows) is None
    kept.settle()
    kept.charge(round_number=number, rows=rows, purpose="release")
    kept.keep_answer(rows, WORDS + number)


def charges(folder: Path) -> int:
    return (folder / "ledger.jsonl").read_text().count('"charge"')


def test_the_last_answer_comes_again_in_every_later_session(tmp_path: Path) -> None:
    """The very words, as often as the run is cut, and nothing is charged for them."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
    for _ in range(3):
        with Session(tmp_path) as kept:
            again = kept.again(FIRST)
            assert again is not None
            assert torch.equal(again, WORDS + 1)
    with Session(tmp_path) as kept:
        answer(kept, SECOND, 1)
    assert charges(tmp_path) == 2


def test_within_a_session_no_row_comes_again(tmp_path: Path) -> None:
    """A primary that asks twice is refused, and what it may still need after a crash is kept."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
        with pytest.raises(PrivacyError, match=r"32 of the rows .* were released before"):
            kept.again(FIRST)
        with pytest.raises(PrivacyError, match=r"32 of the rows .* were released before"):
            kept.charge(round_number=2, rows=FIRST, purpose="release")
    with Session(tmp_path) as kept:
        again = kept.again(FIRST)
        assert again is not None
        assert torch.equal(again, WORDS + 1)
    assert charges(tmp_path) == 1


@pytest.mark.parametrize(
    "rows", [SECOND[:5], SECOND[::-1], np.r_[SECOND, 0], np.r_[SECOND[:-1], 0]]
)
def test_no_other_rows_come_again(rows: np.ndarray, tmp_path: Path) -> None:
    """Neither parts, other orders nor mixtures of the last ones."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
        answer(kept, SECOND, 2)
    with Session(tmp_path) as kept, pytest.raises(PrivacyError, match="released before"):
        kept.again(rows)
    assert charges(tmp_path) == 2


def test_an_answer_that_names_rows_otherwise_is_none(tmp_path: Path) -> None:
    """Whoever may write the folder can make the hashes right; fuzzing found such a file."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
        state = {"place": 0, "rows": torch.from_numpy(FIRST[None]), "words": WORDS}
        kept._write("answers/1.pt", state)
    with Session(tmp_path) as kept, pytest.raises(PrivacyError, match="released before"):
        kept.again(FIRST)


PARTS = np.split(np.arange(60), 12)


def answered_all(folder: Path) -> None:
    with Session(folder, batch_size=5) as kept:
        for number, part in enumerate(PARTS, 1):
            answer(kept, part, number)


@pytest.mark.parametrize("lost", [1, 3, ROUNDS_AHEAD])
def test_answers_of_all_rounds_that_may_be_under_way_come_again(lost: int, tmp_path: Path) -> None:
    """In their order, however many of them the primary has lost; none is charged again."""
    answered_all(tmp_path)
    for _ in range(2):
        with Session(tmp_path, batch_size=5) as kept:
            for number in range(len(PARTS) - lost + 1, len(PARTS) + 1):
                again = kept.again(PARTS[number - 1])
                assert again is not None
                assert torch.equal(again, WORDS + number)
    assert charges(tmp_path) == len(PARTS)


def test_an_answer_of_before_comes_never_again(tmp_path: Path) -> None:
    """Whoever asks for it has lost what it had kept, or lies."""
    answered_all(tmp_path)
    with (
        Session(tmp_path, batch_size=5) as kept,
        pytest.raises(PrivacyError, match="released before"),
    ):
        kept.again(PARTS[-ROUNDS_AHEAD - 1])
    assert charges(tmp_path) == len(PARTS)


@pytest.mark.parametrize("cut", ["noted", "booked"])
def test_a_crash_within_a_round_takes_no_answer_of_those_before(cut: str, tmp_path: Path) -> None:
    """Cut over and over in the same round: the seven before it are still there, in their words."""
    before = PARTS[: ROUNDS_AHEAD - 1]
    with Session(tmp_path, batch_size=5) as kept:
        for number, part in enumerate(before, 1):
            answer(kept, part, number)
    for _ in range(3):
        with Session(tmp_path, batch_size=5) as kept, pytest.MonkeyPatch.context() as patch:
            for number, part in enumerate(before, 1):
                again = kept.again(part)
                assert again is not None
                assert torch.equal(again, WORDS + number)
            assert kept.again(PARTS[len(before)]) is None
            kept.settle()
            if cut == "noted":
                patch.setattr(Ledger, "charge", lambda *_, **__: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    kept.charge(round_number=8, rows=PARTS[len(before)], purpose="release")
            else:
                kept.charge(round_number=8, rows=PARTS[len(before)], purpose="release")
    with Session(tmp_path, batch_size=5) as kept:
        for part in before:
            assert kept.again(part) is not None
        answer(kept, PARTS[len(before)], 8)
    assert charges(tmp_path) == ROUNDS_AHEAD


def test_the_last_answer_comes_first_or_not_at_all(tmp_path: Path) -> None:
    """Once another round was asked for, the primary has what came before."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
    with Session(tmp_path) as kept:
        answer(kept, SECOND, 1)
        with pytest.raises(PrivacyError, match="released before"):
            kept.again(FIRST)


def test_what_was_booked_and_not_answered_is_answered_once(tmp_path: Path) -> None:
    """It is paid for and nothing of it was sent; an answer once kept is the answer for good."""
    with Session(tmp_path) as kept:
        kept.settle()
        kept.charge(round_number=1, rows=FIRST, purpose="release")
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
    with Session(tmp_path) as kept:
        again = kept.again(FIRST)
        assert again is not None
        assert torch.equal(again, WORDS + 1)
    assert charges(tmp_path) == 1


def test_a_ledger_without_the_last_charge_is_refused(tmp_path: Path) -> None:
    """An older copy of the ledger would let a row be paid for, and noised, a second time."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
        before = (tmp_path / "ledger.jsonl").read_bytes()
        answer(kept, SECOND, 2)
    (tmp_path / "ledger.jsonl").write_bytes(before)
    with pytest.raises(PrivacyError, match="lacks releases that the checkpoint knows of"):
        Session(tmp_path)


def test_draws_follow_from_the_release_in_every_session(tmp_path: Path) -> None:
    """Its secret and the rows of a key are the first session's, whatever keys are sent later."""
    firsts = np.arange(60) // 2 * 2
    with Session(tmp_path, firsts=firsts) as kept:
        with pytest.raises(PrivacyError, match="before it was fixed"):
            _ = kept.take_secret()
        kept.settle()
        first = kept.take_secret()
    with Session(tmp_path, firsts=np.arange(60)) as kept:
        kept.settle()
        assert kept.take_secret() == first
        assert kept.first_rows(np.array([3, 4])).tolist() == [2, 4]


def test_models_share_no_draws_though_a_secret_is_copied(tmp_path: Path) -> None:
    """Another encoder beside the same bytes gives others, and the ledger refuses other bytes."""
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
        with Session(folder) as kept:
            kept.settle()
    with Session(folders[0]) as kept, Session(folders[1]) as other:
        for each in (kept, other):
            each.settle()
        mine, theirs = (each._read("release.pt") for each in (kept, other))
        assert mine is not None
        assert theirs is not None
        secret = kept.take_secret()
        theirs["keys"] = mine["keys"]
        theirs["digest"] = other._digest(theirs)
        other._write("release.pt", theirs)
        # A ledger that knows nothing yet would take it, with draws of its own.
        other.ledger._own.release = None
        for session in other.ledger._sessions:
            session.release = None
        other.settle()
        assert other.take_secret() != secret
    with Session(folders[1]) as other:
        state = other._read("release.pt")
        assert state is not None
        state["keys"]["secret"] = torch.zeros(32, dtype=torch.uint8)
        state["digest"] = other._digest(state)
        other._write("release.pt", state)
        with pytest.raises(PrivacyError, match="by other links"):
            other.settle()
