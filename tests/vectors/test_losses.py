"""Runs under fixed seeds lose what they lost before: nothing about training changed unnoticed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from make_losses import FILE, RUNS, simulated_losses

KEPT = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_that_were_kept(name: str) -> None:
    """Every round's loss and the test metric; the last bits differ from processor to processor."""
    *losses, metric = simulated_losses(name)
    *kept, kept_metric = KEPT["simulated"][name]
    assert losses == pytest.approx(kept, abs=2e-3)
    assert metric == pytest.approx(kept_metric, abs=0.05)


def test_the_file_was_written_by_one_and_by_several_processes() -> None:
    """Where noise is off, both kept the same losses, to the last bit."""
    assert len(KEPT["federated"]) >= 6
    for name, losses in KEPT["federated"].items():
        assert losses == KEPT["simulated"][name], name
