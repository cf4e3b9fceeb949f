"""Parties on machines of their own: every organisation types its own commands."""

import json
import os
import signal
import time
import tomllib

import pytest
from helpers.command_line import securevfl
from helpers.patience import PATIENCE_S
from helpers.warm import Program

from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1")


def test_two_organisations_meet_with_kits_of_their_own(tmp_path, capfd, port):
    """Provision and join at each, look whether all is ready, run: the primary has the metrics."""
    path = write_federation(tmp_path, secondaries=1)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"][0]["address"] = f"localhost:{port}"
    save_federation(tmp_path, source)
    homes = {name: tmp_path / f"home-{name}" for name in NAMES}

    def typed(*arguments):
        ended = securevfl(capfd, *arguments)
        assert ended.code == 0, ended.err
        return ended.out

    for name, home in homes.items():
        typed("identity", "provision", path, "--name", name, "--out", home)
        (tmp_path / f"{name}.csv").rename(home / f"{name}.csv")
    codes = set()
    for own, other in (NAMES, NAMES[::-1]):
        folder, certificate = homes[own] / "identity", homes[other] / "identity" / "identity.pem"
        taken = ("--name", own, "--identity", folder, "--json")
        codes.add(
            json.loads(typed("identity", "join", of(homes[own]), certificate, *taken))["code"]
        )
    assert len(codes) == 1
    # Behind NAT the primary listens elsewhere than where the others dial.
    runs = [
        start_party("agency", homes["agency"], "--listen", f"127.0.0.1:{port}"),
        start_party("bank-1", homes["bank-1"]),
    ]
    try:
        ended = [run.ended() for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [code for code, _ in ended] == [0, 0], ended
    assert json.loads(runs[0].printed)["bytes"].keys() == set(NAMES)
    assert runs[1].printed == ""
    assert "bank-1 is done" in ended[1][1]
    own = homes["bank-1"] / "run" / "parties" / "bank-1" / "report.html"
    assert str(own) in ended[1][1]
    assert "Nothing bounds what a partner may find out" in own.read_text(encoding="utf-8")
    assert str(own) in typed("report", homes["bank-1"] / "run")
    assert [folder.name for folder in (homes["bank-1"] / "run" / "parties").iterdir()] == ["bank-1"]


def test_a_party_by_hand_is_interrupted_by_sigterm(tmp_path, capfd, port):
    """As systemd stops it: it tells the others. Both were started to resume what never began."""
    path = write_federation(tmp_path, secondaries=1, training={"epochs": 10_000, "batch_size": 8})
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    for party, pinned in zip(
        source["party"], provision(NAMES, tmp_path / "ids").values(), strict=True
    ):
        party["identity"] = pinned
    save_federation(tmp_path, source)
    runs = {
        name: Program(
            *("securevfl.cli.main", "party", path, "--name", name, "--resume"),
            *("--identity", tmp_path / "ids" / name, "--out", tmp_path / f"run-{name}"),
        )
        for name in NAMES
    }
    begun = tmp_path / "run-bank-1" / "parties" / "bank-1" / "run.pt"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not begun.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # nothing else tells a test that a party of its own has begun
        os.kill(runs["bank-1"].pid, signal.SIGTERM)
        ended = {name: run.ended() for name, run in runs.items()}
    finally:
        for run in runs.values():
            run.kill()
    assert {name: code for name, (code, _) in ended.items()} == {"agency": 3, "bank-1": 130}, ended
    assert ended["bank-1"][1].splitlines()[-1] == "securevfl: interrupted"
    assert ended["agency"][1].splitlines()[-1] == (
        "securevfl: bank-1: was interrupted by its operator"
    )
    for name in NAMES:
        assert f"{name}: no run has begun in" in ended[name][1]


def of(home):
    return home / "federation.toml"


def start_party(name, home, *more):
    own = ["--name", name, "--identity", home / "identity", "--out", home / "run", "--json"]
    return Program("securevfl.cli.main", "party", of(home), *more, *own)
