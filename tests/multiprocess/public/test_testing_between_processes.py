"""``sv.testing`` between processes: losses of a simulation, lying parties, and a time limit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.launched import processes_of

import securevfl as sv
from securevfl.core.errors import PartyFailedError

pytestmark = pytest.mark.multiprocess


def lose_half(message: sv.testing.Message) -> sv.testing.Message:
    """Send half of the masked words."""
    words = message.tensors["words"]
    return replace(message, tensors={"words": words[: len(words) // 2]})


def send_zeros(message: sv.testing.Message) -> sv.testing.Message:
    """Send a gradient that teaches nothing."""
    gradient = message.tensors["gradient"]
    return replace(message, tensors={"gradient": np.zeros_like(gradient)})


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation")
    return sv.testing.write_federation(folder, rows=60, training={"epochs": 1})


def test_losses_are_those_of_one_process_until_a_party_lies(federation: Path) -> None:
    """With gradients of zero the primary trains alone from the second round on."""
    run = sv.testing.run_between_processes(federation)
    assert run.losses == sv.testing.run_in_process(federation).losses
    lie = sv.testing.Lie(party="agency", message="GRADIENT", alter=send_zeros)
    lying = sv.testing.run_between_processes(federation, lies=[lie])
    assert lying.losses[0] == run.losses[0]
    assert lying.losses[1] != run.losses[1]


def test_a_lie_that_others_notice_ends_the_run(federation: Path, tmp_path: Path) -> None:
    lie = sv.testing.Lie(party="bank-2", message="SHARE", alter=lose_half)
    with pytest.raises(sv.SecureVflError, match="bank-2: SHARE of round 1: words must have shape"):
        sv.testing.run_between_processes(federation, tmp_path / "run", lies=[lie])
    assert processes_of(tmp_path / "run") == {}


def test_nothing_runs_for_longer_than_the_limit(federation: Path, tmp_path: Path) -> None:
    with pytest.raises(PartyFailedError, match=r"agency, bank-1, bank-2: did not end within 0\.1"):
        sv.testing.run_between_processes(federation, tmp_path / "run", limit_s=0.1)
    assert processes_of(tmp_path / "run") == {}
