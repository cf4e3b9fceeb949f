"""Runs on the same tables, one after another, by processes that keep one another's ledger heads."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.command_line import securevfl
from helpers.countersigners import rewrite

from securevfl.ledger.countersigning import forget_party
from securevfl.runtime.entry import train
from securevfl.testing import write_federation

pytestmark = pytest.mark.multiprocess

OTHERS = ("agency", "bank-2")
NAMES = (*OTHERS, "bank-1")
NAMED = "party 'bank-1': its ledger does not continue the one that it signed on "


def federation(folder: Path) -> Path:
    return write_federation(folder, rows=120, training={"epochs": 1})


def ledger_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.csv.ledger.jsonl"


def log_of(folder: Path, name: str) -> list[dict]:
    lines = (folder / "parties" / name / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cut(path: Path) -> None:
    """Roll the ledger back to a copy from early in the run."""
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:3]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tables, their ledgers and one finished run."""
    made = tmp_path_factory.mktemp("federation")
    train(federation(made), out=made / "run")
    return made


@pytest.fixture(autouse=True)
def true_ledger(folder: Path) -> Iterator[None]:
    """What a test did to a ledger is undone."""
    path = ledger_of(folder, "bank-1")
    true = path.read_bytes()
    yield
    path.write_bytes(true)


@pytest.mark.parametrize(
    "tamper",
    [
        cut,
        pytest.param(Path.unlink, marks=pytest.mark.slow),
        pytest.param(rewrite, marks=pytest.mark.slow),
    ],
    ids=["rolled back", "emptied", "forged"],
)
def test_a_ledger_that_does_not_go_on_stops_the_next_run_and_is_named(
    folder: Path, tmp_path: Path, capfd, tamper: Callable[[Path], None]
) -> None:
    """The others name the party; nothing is linked or charged; ``ledger verify`` agrees."""
    ended = securevfl(capfd, "ledger", "verify", folder / "run")
    assert ended.code == 0, ended.out
    for name in NAMES:
        points = [line["point"] for line in log_of(folder / "run", name) if "point" in line]
        assert points == ["start", "epoch 1", "end"]
    charged = {name: charges(ledger_of(folder, name)) for name in OTHERS}

    tamper(ledger_of(folder, "bank-1"))

    checked = securevfl(capfd, "ledger", "verify", folder / "run")
    assert checked.code == 4, checked.out
    assert "verdict: BAD (bank-1)" in checked.out
    ended = securevfl(capfd, "train", folder / "fed.toml", "--out", tmp_path)
    assert ended.code == 3, ended.err
    assert NAMED in ended.err.splitlines()[-1]
    ends = {name: log_of(tmp_path, name)[-1] for name in NAMES}
    assert all(NAMED in end["reason"] for end in ends.values()), ends
    # At least one of the others has found it by itself, whoever was first to say so.
    assert "ProtocolError" in {ends[name]["error"] for name in OTHERS}
    assert all(line["event"] != "linked" for name in NAMES for line in log_of(tmp_path, name))
    assert charged == {name: charges(ledger_of(folder, name)) for name in OTHERS}


@pytest.mark.slow
def test_who_remembers_can_forget_on_purpose(folder: Path, tmp_path: Path, capfd) -> None:
    """A new table under an old name: after both others have said so, a run is good again."""
    ledger_of(folder, "bank-1").unlink()
    for name in OTHERS:
        assert forget_party(ledger_of(folder, name), party="bank-1") == ["test"]

    train(folder / "fed.toml", out=tmp_path / "run")

    assert securevfl(capfd, "ledger", "verify", tmp_path / "run").code == 0


def charges(path: Path) -> int:
    return sum('"kind": "charge"' in line for line in path.read_text().splitlines())
