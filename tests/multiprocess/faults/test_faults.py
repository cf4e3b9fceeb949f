"""A short form of ``make faults``: one fault of each sort, where no other test has it."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.warm import Program

pytestmark = pytest.mark.multiprocess

TOOL = Path(__file__).resolve().parents[3] / "tools" / "faults.py"
# Of these a user would read something else, or wait for nothing, if it broke.
CELLS = (
    "memory/secondary/round/wait",
    "read-only/primary/checkpoint/wait",
    "half-open/dealer/linkage/wait",
    "line-truncated/secondary/round/wait",
    "second/secondary/round/wait",
    "version/secondary/handshake/stop",
    "sends-oversized/primary/round/stop",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Let them fall, two at a time, in a process that does not begin again for a clock."""
    folder = tmp_path_factory.mktemp("faults")
    with patch.dict(os.environ, LD_PRELOAD=""):
        tool = Program(
            *(TOOL, "--cell", *CELLS, "--json"),
            *("--folder", folder / "runs", "--record", folder / "faults.jsonl"),
        )
    code, said = tool.ended()
    assert code in (0, 1), said
    found: Mapping[str, Any] = json.loads(tool.printed)
    return found


def test_whoever_meets_a_fault_is_named_and_nothing_is_lost(told: Mapping[str, Any]) -> None:
    """All notice in time and read one line that names who it is; ledgers and models are right."""
    assert told["findings"] == []
    assert {"/".join(_place(cell)) for cell in told["cells"]} == set(CELLS)
    assert all(cell["ledger"] and cell["right"] for cell in told["cells"])
    waited = [cell for cell in told["cells"] if cell["on_loss"] == "wait"]
    assert [cell["resumed"] for cell in waited] == [0] * len(waited)


@pytest.mark.parametrize(
    ("fault", "party", "text"),
    [
        ("read-only", "bank-1", "agency: StorageError: it cannot write to its own disk; waiting"),
        ("half-open", "bank-1", "dealer: gave no sign of life for 3 s; waiting"),
        ("line-truncated", "agency", "bank-1: its connection broke: bytes were altered on the way"),
        ("second", "second bank-1", "a party of this name has joined already"),
        ("version", "agency", "bank-1: speaks protocol 2, this party 1; install the same version"),
        ("sends-oversized", "bank-2", "agency: sent PLAN of 1099511627776 bytes"),
    ],
)
def test_what_they_read(told: Mapping[str, Any], fault: str, party: str, text: str) -> None:
    """The cause, too, is the true one."""
    assert text in _cell(told, fault)["lines"][party]


def test_they_read_of_used_up_memory_unless_a_library_crashed(told: Mapping[str, Any]) -> None:
    """On its last page oneDNN writes to where it was given nothing, and a signal ends the party."""
    cell = _cell(told, "memory")
    crashed = "bank-1: its connection closed: the process ended or the network broke; waiting"
    texts = {
        2: "bank-1: OutOfMemoryError: it has run out of memory; waiting",
        -signal.SIGSEGV: crashed,
        -signal.SIGABRT: crashed,
    }
    assert texts[cell["codes"]["bank-1"]] in cell["lines"]["bank-2"]


def _cell(told: Mapping[str, Any], fault: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(cell for cell in told["cells"] if cell["fault"] == fault)
    return found


def _place(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return cell["fault"], cell["role"], cell["phase"], cell["on_loss"]
