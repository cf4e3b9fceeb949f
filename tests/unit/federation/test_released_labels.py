"""The ledger's line for labels: charged once, read again, and never mixed with records' epsilon."""

import json
from pathlib import Path

import numpy as np
import pytest

from securevfl.core.errors import PrivacyError
from securevfl.dp import Privacy
from securevfl.dp.labels import LabelRelease, labels_together
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.released_labels import charge_labels
from securevfl.ledger.ledger import Ledger
from securevfl.ledger.ledger_file import summary_of

DRAWN = LabelRelease(mechanism="randomised", epsilon=2.0, delta=0.0, parties=3, digest="a" * 64)
SUMS = LabelRelease(mechanism="shares", epsilon=1.0, delta=1e-5, parties=3)


def ledger_at(path: Path, run: str = "1" * 32) -> Ledger:
    plan = ReleasePlan(
        privacy=Privacy(epsilon=4.0),
        parties=3,
        min_active=3,
        rounds=2,
        rows_per_round=10,
        row_releases=20,
        releases_per_row=1,
        links=3,
    )
    return Ledger(path, party="clinic", plan=plan, noise_share_std=plan.noise_share_std(), run=run)


def test_drawn_labels_are_charged_once_a_run(tmp_path: Path) -> None:
    """The same ones in a resumed run cost nothing; others, and those of another run, do."""
    path = tmp_path / "ledger.jsonl"
    first = ledger_at(path)
    assert charge_labels(first, DRAWN)
    assert not charge_labels(first, DRAWN)
    first.close()
    resumed = ledger_at(path)
    assert not charge_labels(resumed, DRAWN)
    other = LabelRelease(mechanism="randomised", epsilon=2.0, delta=0.0, parties=3, digest="b" * 64)
    assert charge_labels(resumed, other)
    resumed.close()
    another = ledger_at(path, run="2" * 32)
    assert charge_labels(another, DRAWN)
    another.close()

    spent = summary_of(path).labels
    assert spent is not None
    assert (spent.runs, spent.epsilon, spent.together, spent.delta) == (2, 6.0, 6.0, 0.0)


def test_sums_are_charged_whenever_they_are_made(tmp_path: Path) -> None:
    """They have noise of their own each time."""
    path = tmp_path / "ledger.jsonl"
    ledger = ledger_at(path)
    assert charge_labels(ledger, SUMS)
    assert charge_labels(ledger, SUMS)
    ledger.close()
    spent = summary_of(path).labels
    assert spent is not None
    assert spent.epsilon == pytest.approx(labels_together(1.0, 1e-5, 2))
    assert spent.together == pytest.approx(labels_together(1.0, 1e-5, 6))
    line = json.loads(path.read_text().splitlines()[-1])
    assert {name: line[name] for name in ("kind", "mechanism", "epsilon", "delta", "parties")} == {
        "kind": "labels",
        "mechanism": "shares",
        "epsilon": 1.0,
        "delta": 1e-5,
        "parties": 3,
    }
    assert line["together"] == pytest.approx(labels_together(1.0, 1e-5, 3))


def test_labels_are_no_part_of_what_records_have_spent(tmp_path: Path) -> None:
    """Two promises: neither counts in the other's epsilon."""
    path = tmp_path / "ledger.jsonl"
    ledger = ledger_at(path)
    charge_labels(ledger, DRAWN)
    assert ledger.epsilon_spent == 0.0
    with_labels = ledger.charge(round_number=1, rows=np.arange(10), purpose="train")
    ledger.close()
    alone = ledger_at(tmp_path / "other.jsonl")
    assert alone.charge(round_number=1, rows=np.arange(10), purpose="train") == with_labels
    alone.close()
    assert summary_of(tmp_path / "other.jsonl").labels is None


def test_nothing_is_told_after_the_ledger_is_closed(tmp_path: Path) -> None:
    """A charge that cannot be written is not made."""
    ledger = ledger_at(tmp_path / "ledger.jsonl")
    ledger.close()
    with pytest.raises(PrivacyError, match="is closed"):
        charge_labels(ledger, DRAWN)
    assert not ledger.budget_sessions[-1].labels
