"""Frozen runs between processes, a party of which is killed within the releases; and strangers."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import altered_party
from helpers.federations import FROZEN
from helpers.undisturbed import undisturbed
from helpers.warm import Program

from securevfl.federation.checkpoint import read_state
from securevfl.federation.run_plan import ROUNDS_AHEAD
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2")
# More rounds than may be under way at once.
ROWS, BATCH, ROUNDS = 60, 5, 12
NOISY = {**FROZEN, "links_per_record": 1}
PLAIN = {"mechanism": "none", "encoder": "frozen", "links_per_record": 1}


def federation(folder: Path, privacy: Mapping[str, Any], port: int) -> Path:
    path = write_federation(
        folder,
        rows=ROWS,
        model={"release": "pooled", "top": "additive", "hidden": 4},
        encoder={"method": "principal"},
        training={"epochs": 1, "batch_size": BATCH},
        privacy=dict(privacy),
    )
    source = tomllib.loads(path.read_text())
    pinned = provision(NAMES, folder / "ids")
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def ended(
    path: Path,
    outs: Mapping[str, Path],
    *,
    altered: Mapping[str, str] | None = None,
    resume: tuple[str, ...] = (),
) -> dict[str, tuple[int, str]]:
    """Run the three parties; return how each ended: its exit code, and the last line it said."""
    processes = {}
    try:
        for name in NAMES:
            processes[name] = Program(
                Path(altered_party.__file__),
                *((altered or {}).get(name, "none"), "party", path, "--name", name),
                *("--identity", path.parent / "ids" / name, "--out", outs[name]),
                *(["--resume"] if name in resume else []),
            )
        found = {}
        for name, process in processes.items():
            code, said = process.ended()
            assert "Traceback" not in said, f"{name}: {said}"
            found[name] = (code, said.strip().splitlines()[-1] if said else "")
    finally:
        for process in processes.values():
            process.kill()
    return found


def codes(found: Mapping[str, tuple[int, str]]) -> dict[str, int]:
    return {name: code for name, (code, _) in found.items()}


def released(out: Path) -> torch.Tensor:
    folder = out / "parties" / "agency" / "released"
    parts = [read_state(folder / f"{number}.pt")["state"] for number in range(1, ROUNDS + 1)]
    return torch.cat([part["aggregate"] for part in parts])


def charged(ledger: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "charge"]


POINTS = {
    "the primary, with an average that it has not kept": ("agency", "CachedRows.keep:2:before"),
    "a secondary, charged, before its answer": ("bank-1", "CachedRelease.keep_answer:4:before"),
    "a secondary, before its answer is sent": ("bank-2", "CachedRelease.keep_answer:4:after"),
}


@pytest.mark.parametrize(
    "point",
    [
        point if "answer and its sending" in point else pytest.param(point, marks=pytest.mark.slow)
        for point in sorted(POINTS)
    ],
)
def test_a_killed_party_costs_no_second_release(point: str, tmp_path: Path, port: int) -> None:
    """Without noise the resumed run is the uncut one, bit for bit."""
    killed, place = POINTS[point]
    path = federation(tmp_path, PLAIN, port)
    outs = dict.fromkeys(NAMES, tmp_path / "run")
    found = ended(path, outs, altered={killed: f"kill:{place}"})
    assert codes(found) == {name: -9 if name == killed else 3 for name in NAMES}
    for name in set(NAMES) - {killed}:
        assert killed in found[name][1]

    found = ended(path, outs, resume=NAMES)
    assert codes(found) == dict.fromkeys(NAMES, 0), found
    whole = undisturbed(path, tmp_path / "whole")
    assert torch.equal(released(tmp_path / "run"), released(tmp_path / "whole"))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for figure in ("train", "validation", "test", "epochs", "best_epoch"):
        assert metrics[figure] == whole.metrics[figure]


def test_a_killed_primary_spends_no_more_than_an_uncut_run(tmp_path: Path, port: int) -> None:
    """With noise: every row is booked once by everybody, and epsilon is that of one release."""
    path = federation(tmp_path, NOISY, port)
    outs = dict.fromkeys(NAMES, tmp_path / "run")
    ended(path, outs, altered={"agency": "kill:CachedRows.keep:3:before"})
    booked = {name: len(charged(tmp_path / f"{name}.csv.ledger.jsonl")) for name in NAMES}
    kept = len(list((tmp_path / "run" / "parties" / "agency" / "released").iterdir()))
    # Eight rounds ahead of the two that were kept; whoever answered a round has booked it.
    assert kept == 2
    assert booked["agency"] == kept + ROUNDS_AHEAD
    for name in NAMES[1:]:
        assert kept < booked[name] <= booked["agency"]
    found = ended(path, outs, resume=NAMES)
    assert codes(found) == dict.fromkeys(NAMES, 0), found
    whole = undisturbed(path, tmp_path / "whole")
    for name in NAMES:
        lines = charged(tmp_path / "run" / "parties" / name / "ledger.jsonl")
        assert [line["rows"] for line in lines] == [BATCH] * ROUNDS
        assert lines[-1]["epsilon"] == whole.metrics["privacy"]["epsilon"]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["privacy"]["epsilon"] == whole.metrics["privacy"]["epsilon"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.pt")}


@pytest.mark.slow
def test_parties_of_two_runs_do_not_go_on_together(tmp_path: Path, port: int) -> None:
    """Fresh with resumed, either way: one line at each that names the party and what to do.

    Nothing that was kept is touched, and afterwards the run goes on.
    """
    path = federation(tmp_path, PLAIN, port)
    outs = {name: tmp_path / name for name in NAMES}
    ended(path, outs, altered={"agency": "kill:CachedRows.keep:2:after"})
    before = contents(tmp_path)
    fresh = {name: tmp_path / f"fresh-{name}" for name in NAMES}

    # A fresh primary, secondaries that go on.
    found = ended(path, {**outs, "agency": fresh["agency"]}, resume=NAMES[1:])
    assert codes(found) == dict.fromkeys(NAMES, 3)
    for _, said in found.values():
        assert "'agency' starts afresh, and 'bank-1' goes on with run" in said
        assert "start all parties with --resume in the folders of one run" in said
    # A primary that goes on, and a secondary that starts afresh.
    found = ended(path, {**outs, "bank-2": fresh["bank-2"]}, resume=NAMES[:2])
    assert codes(found) == dict.fromkeys(NAMES, 3)
    for _, said in found.values():
        assert "'agency' goes on with run" in said
        assert "'bank-2' starts afresh" in said
    # The same primaries do not look: each secondary looks for itself.
    lying = {**outs, "agency": tmp_path / "lying"}
    found = ended(path, lying, resume=NAMES[1:], altered={"agency": "trusting"})
    assert codes(found) == dict.fromkeys(NAMES, 3)
    assert any("this party goes on with run" in said for _, said in found.values())
    # A primary of its own run writes down which; nothing of the others' is touched.
    assert contents(tmp_path).items() >= before.items()

    assert codes(ended(path, outs, resume=NAMES)) == dict.fromkeys(NAMES, 0)
