"""A suspect's record exchanged for a stranger's, between processes: what others receive, and ends.

The same runs in one process, with what is behind masks: tests/property/federation/test_exchange.py.
"""

import json
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import altered_party
from helpers.warm import Program

from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2")
SUSPECT, STRANGER = 77, 9_999_999


def write(folder: Path, port: int) -> Path:
    """Write a federation whose primary has one person that ``bank-1`` may know, by exact ids."""
    path = write_federation(
        folder,
        rows=40,
        model={"release": "pooled", "hidden": 4, "top": "additive", "keys_as_features": False},
        encoder={"method": "principal", "share": 0.3},
        privacy={"epsilon": 20.0, "delta": 1e-4, "encoder": "frozen", "links_per_record": 1},
        training={"batch_size": 16, "epochs": 1},
        linkage={"metric": "exact", "choose": "records", "protection": "psi", "least_linked": 0.0},
    )
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["model"]["neighbours"] = 1
    pinned = provision(NAMES, folder / "ids")
    for number, party in enumerate(source["party"]):
        frame = pd.read_csv(folder / party["data"]).drop(columns=["lon", "lat"])
        frame = frame.head(12) if number else frame
        frame.insert(0, "id", [1000 * (number + 1) + row for row in range(len(frame))])
        frame.loc[5, "id"] = SUSPECT if number < 2 else 1000
        frame.to_csv(folder / party["data"], index=False)
        party |= {"key": ["id"], "identity": pinned[party["name"]]}
        if number:
            party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    return save_federation(folder, source)


def played(path: Path, out: Path) -> tuple[dict[str, int], dict[tuple[str, str], list[Any]]]:
    """Run all parties; return their exit codes, and what the others received of each sender."""
    folder = path.parent
    out.mkdir()
    parties = {
        name: Program(
            Path(altered_party.__file__),
            *(f"lists:{out / name}.jsonl", "party", path, "--name", name),
            *("--identity", folder / "ids" / name, "--out", out / "run"),
        )
        for name in NAMES
    }
    try:
        codes = {name: party.ended()[0] for name, party in parties.items()}
    finally:
        for party in parties.values():
            party.kill()
    received = defaultdict(list)
    for name in ("agency", "bank-2"):
        for line in (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            sender, kind, number, figures, arrays = json.loads(line)
            figures.pop("run", None)  # random in every run
            if kind == "LINK_COUNT":
                figures.pop("linked")  # behind noise that is drawn anew
            received[name, sender].append([kind, number, figures, arrays])
    return codes, received


def test_others_receive_the_same_of_a_suspect_and_of_a_stranger(tmp_path: Path, port: int) -> None:
    """Kinds, rounds, figures, types and lengths of all messages, and every party's end."""
    path = write(tmp_path, port)
    codes, with_suspect = played(path, tmp_path / "suspect")
    assert codes == dict.fromkeys(NAMES, 0)
    table = tmp_path / "bank-1.csv"
    frame = pd.read_csv(table)
    frame["id"] = frame["id"].replace(SUSPECT, STRANGER)
    frame.to_csv(table, index=False)
    for ledger in tmp_path.glob("*.ledger.jsonl*"):
        ledger.unlink()
    codes, with_stranger = played(path, tmp_path / "stranger")
    assert codes == dict.fromkeys(NAMES, 0)
    assert with_stranger.keys() == with_suspect.keys()
    for pair, messages in with_suspect.items():
        assert with_stranger[pair] == messages, pair
    kinds = {one[0] for one in with_suspect["agency", "bank-1"]}
    assert {"HELLO", "LINK_POINTS", "LINKED", "READY", "SHARE", "HEADS"} <= kinds
