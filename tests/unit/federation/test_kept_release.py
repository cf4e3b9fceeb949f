"""What a frozen secondary answers to whom: once afresh, once more the same, and never otherwise."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN, write_federation

from securevfl.config.reading import read_federation
from securevfl.core.errors import PrivacyError
from securevfl.federation.kept_release import KeptRelease
from securevfl.federation.ledger import Ledger
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.federation.state_files import StateFolder
from securevfl.linkage.links import LinkTable
from securevfl.linkage.sources import FixedLinks

RUN = "1" * 32
FIRST, SECOND = np.arange(32), np.arange(32, 60)
WORDS = torch.arange(7)


class Session:
    """One session of a secondary, on the same two files and the same ledger."""

    def __init__(self, folder: Path) -> None:
        config = read_federation(
            write_federation(folder, rows=60, privacy=FROZEN, model={"release": "pooled"})
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
        self.kept = KeptRelease(
            files,
            self.ledger,
            bottom=torch.nn.Linear(2, 2),
            links=FixedLinks(table=LinkTable(indices=indices, distances=np.zeros((60, 4)))),
            records={"features": torch.zeros(3, 2)},
            fit=None,
        )

    def __enter__(self) -> KeptRelease:
        return self.kept

    def __exit__(self, *_error: object) -> None:
        self.ledger.close()


def answer(kept: KeptRelease, rows: np.ndarray, number: int) -> None:
    assert kept.again(rows) is None
    kept.settle()
    kept.charge(round_number=number, rows=rows, purpose="release")
    kept.answered(rows, WORDS + number)


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
    "rows", [FIRST, SECOND[:5], SECOND[::-1], np.r_[SECOND, 0], np.r_[SECOND[:-1], 0]]
)
def test_no_other_rows_come_again(rows: np.ndarray, tmp_path: Path) -> None:
    """Neither earlier rounds, nor parts, other orders or mixtures of the last one."""
    with Session(tmp_path) as kept:
        answer(kept, FIRST, 1)
        answer(kept, SECOND, 2)
    with Session(tmp_path) as kept, pytest.raises(PrivacyError, match="released before"):
        kept.again(rows)
    assert charges(tmp_path) == 2


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
