"""One table has one ledger: beside it, or where its owner may write, by whatever name it goes."""

import hashlib
import stat
import sys
from pathlib import Path

import pytest

from securevfl.core.errors import ConfigError
from securevfl.ledger import ledger_file
from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.ledger_file import ledger_of_table


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def table_in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "bank.csv"
    table.write_text("x\n1\n")
    return table


def test_it_lies_beside_the_table(tmp_path: Path) -> None:
    """Only its owner may read it."""
    table = table_in(tmp_path / "data")
    path = ledger_of_table(table)
    assert path == table.with_name("bank.csv.ledger.jsonl")
    file = ChainedFile(path)
    file.append({"kind": "open"})
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_one_table_has_one_ledger_by_whatever_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path, from any folder; a link to the table; a link to its folder."""
    table = table_in(tmp_path / "data")
    (tmp_path / "alias.csv").symlink_to(table)
    (tmp_path / "folder").symlink_to(table.parent)
    paths = {ledger_of_table(table), ledger_of_table(tmp_path / "alias.csv")}
    paths.add(ledger_of_table(tmp_path / "folder" / "bank.csv"))
    for folder, name in ((tmp_path, "data/bank.csv"), (tmp_path / "data", "bank.csv")):
        monkeypatch.chdir(folder)
        paths.add(ledger_of_table(Path(name)))
    assert paths == {table.with_name("bank.csv.ledger.jsonl")}


def test_where_the_folder_takes_no_files_it_lies_in_the_users_state(state: Path) -> None:
    """Nobody, not even root, makes a file in /proc: it stands for a read-only disk."""
    path = ledger_of_table(Path("/proc/version"))
    other = ledger_of_table(Path("/proc/cpuinfo"))

    assert path.parent == other.parent == state / "securevfl" / "ledgers"
    assert path.name.startswith("version-")
    assert path.name.endswith(".ledger.jsonl")
    assert len({path, other}) == 2
    assert ledger_of_table(Path("/proc/version")) == path


def test_a_ledger_in_the_users_state_is_found_again_when_the_folder_can_be_written(
    tmp_path: Path, state: Path
) -> None:
    """What was spent is not forgotten because a disk was mounted otherwise; two are refused."""
    table = table_in(tmp_path / "data")
    beside = ledger_of_table(table)
    away = state / "securevfl" / "ledgers"
    away.mkdir(parents=True)
    # The name that it would have had there.
    digest = hashlib.sha256(str(table).encode()).hexdigest()[:16]
    kept = away / f"bank-{digest}.ledger.jsonl"
    kept.write_text("")
    assert ledger_of_table(table) == kept
    beside.write_text("")
    with pytest.raises(ConfigError, match="has two ledgers"):
        ledger_of_table(table)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    """A mistyped name gets a line, not a fresh ledger."""
    with pytest.raises(ConfigError, match=r"gone\.csv: has no ledger \(No such file"):
        ledger_of_table(tmp_path / "gone.csv")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="has no ledger"):
        ledger_of_table(tmp_path / "a")


@pytest.mark.parametrize(
    ("system", "named", "folder"),
    [
        ("linux", {"XDG_STATE_HOME": "/states"}, "/states/securevfl"),
        ("linux", {}, "/home/me/.local/state/securevfl"),
        ("darwin", {}, "/home/me/Library/Application Support/securevfl"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/securevfl/securevfl"),
    ],
)
def test_every_system_has_a_place_for_what_is_remembered(
    system: str, named: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that platformdirs named, so that ledgers of earlier versions are found."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert ledger_file._state_folder() == Path(folder)
