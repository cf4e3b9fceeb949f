"""The short form of ``make chaos``: a few runs whose parties are killed, and its own checks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.chaos.checks import differences, ledger_faults, left_behind
from helpers.chaos.kinds import ledgers_of, write_kind
from helpers.undisturbed import undisturbed
from helpers.warm import printed
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.multiprocess

TOOL = Path(__file__).resolve().parents[3] / "tools" / "chaos.py"
# Three of the first four cycles are of these kinds; in the last of them the primary is killed when
# all others are through, in the middle of a file.
ASKED = ("--seed", "0", "--cycles", "4", "--kinds", "trained", "frozen", "frozen-noise")
CYCLES = 3


def test_killed_runs_end_as_undisturbed_ones(tmp_path: Path) -> None:
    """Without noise and with it, resumed and waited for, killed where the seed says."""
    folders = ("--folder", tmp_path / "runs", "--record", tmp_path / "chaos.jsonl")
    told = json.loads(printed(TOOL, *ASKED, "--json", *folders))
    assert told["failed"] == 0
    assert len(told["cycles"]) == CYCLES
    assert sum(cycle["hits"] for cycle in told["cycles"]) >= CYCLES - 1


def test_a_budget_has_room_for_an_end_after_a_loss(tmp_path: Path) -> None:
    """A party is killed in the last epoch that the budget covers, and another once all is tested.

    In another run the first one is killed again before its test rows leave: the budget has no room
    for them a third time, and the run ends with its model and without test figures.
    """
    lost = ["bank-1", "SHARE", 12]
    runs = [
        [lost, ["bank-2", "write parties/bank-2/model/weights.safetensors", 1]],
        [lost, ["bank-1", "SHARE", 1]],
    ]
    text = printed("helpers.chaos.at_points", tmp_path / "runs", "dp-trained", json.dumps(runs))
    outcomes = [json.loads(line) for line in text.splitlines()]
    for outcome in outcomes:
        assert outcome["faults"] == []
        assert outcome["hits"] == 2
        assert [one["code"] for one in outcome["launches"]] == [0]
    assert [outcome["tested"] for outcome in outcomes] == [True, False]


def small_run(folder: Path) -> Path:
    """Make a run folder, and notes of what left its parties, in one process."""
    path = write_kind(folder, "trained-noise", on_loss="stop")
    undisturbed(path, folder / "run")
    for name, ledger in ledgers_of(folder).items():
        shutil.copy(folder / "run" / "parties" / name / "ledger.jsonl", ledger)
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with noise, and beside its tables the ledgers."""
    return small_run(tmp_path_factory.mktemp("whole"))


def test_a_release_that_was_not_charged_is_found(tmp_path: Path, whole: Path) -> None:
    """A ledger without one of its lines, be it the last or another; and too small a budget."""
    folder = tmp_path / "run"
    shutil.copytree(whole.parent, folder)
    ledgers = ledgers_of(folder)
    lines = ledgers["bank-1"].read_text().splitlines(keepends=True)
    charges = [line for line in lines if '"kind": "charge"' in line]
    left = [
        {"what": "SHARE", "session": "one", "round": json.loads(one)["round"]} for one in charges
    ]

    def faults(budget: float = 20.0, *, once: bool = False) -> list[str]:
        notes = {"bank-1": left}
        found = ledger_faults(folder / "run", ledgers, notes, once=once, budget=budget)
        return [fault for fault in found if "bank-1: " in fault]

    assert len(charges) > 2
    assert faults() == []
    assert any("has spent epsilon" in fault for fault in faults(budget=1.0))
    left.append({**left[-1], "session": "another"})
    number = left[-1]["round"]
    assert faults() == [f"bank-1: round {number} left 2 times and was charged 1 times"]
    assert faults(once=True) == []
    left.pop()

    ledgers["bank-1"].write_text("".join(lines[: lines.index(charges[-1])]))
    assert faults() == [f"bank-1: round {number} left 1 times and was charged 0 times"]
    ledgers["bank-1"].write_text("".join(line for line in lines if line != charges[1]))
    assert any("altered" in fault or "chain" in fault for fault in faults()), faults()


def test_one_weight_that_differs_is_found(tmp_path: Path, whole: Path) -> None:
    """So is a prediction, a figure, a file that nobody should have left, and a key."""
    folder = tmp_path / "run"
    shutil.copytree(whole.parent, folder)
    run = folder / "run"
    assert [*differences(run, whole), *left_behind(folder, whole.parent)] == []
    weights = run / "parties" / "bank-2" / "model" / "weights.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(9.0))
    save_file(tensors, weights)
    predictions = run / "predictions.csv"
    predictions.write_text(predictions.read_text().replace("0.", "1.", 1))
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, "best_epoch": 0}))
    (run / "parties" / "bank-1" / ".epoch-1.pt.0f").write_text("-----BEGIN PRIVATE KEY-----")
    found = [*differences(run, whole), *left_behind(folder, whole.parent)]
    parts = ("weights.safetensors", "predictions.csv", "best_epoch", "left behind", "private key")
    assert len(found) == len(parts)
    for fault, part in zip(found, parts, strict=True):
        assert part in fault
