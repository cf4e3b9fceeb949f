"""What is written is written whole, for its owner alone, or not at all."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.patience import SOON_S

from securevfl.core import files
from securevfl.core.errors import ConfigError, StorageError
from securevfl.core.logs import EventLog
from securevfl.ledger.chain import ChainedFile
from securevfl.linkage.stage.link_cache import table_tag

# Writes what it is told to, where no file may grow beyond 4096 bytes: the system then says what it
# says of a full disk, in any folder and for any user.
FULL = """
import resource, sys
from pathlib import Path
from securevfl.core import files
from securevfl.core.errors import SecureVflError
from securevfl.core.logs import EventLog
from securevfl.ledger.chain import ChainedFile
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path = Path(sys.argv[1])
try:
    {act}
except SecureVflError as error:
    print(type(error).__name__, error.exit_code, error)
"""
ACTS = {
    "file": "files.write_bytes(path, bytes(5000))",
    "log": "log = EventLog(path, party='bank')\n    while True: log.write('epoch', loss=0.5)",
    "ledger": (
        "chain = ChainedFile(path)\n    try:\n        while True: chain.append({'rows': 1})\n"
        "    finally:\n        chain.close()"
    ),
}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    """A umask that lets others read what does not forbid it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_what_a_party_keeps_is_its_own(tmp_path):
    """Checkpoints, releases, tag keys, links, logs and ledgers, and the folders around them."""
    run = tmp_path / "runs" / "test"
    files.write_bytes(run / "parties" / "bank" / "released.pt", b"rows")
    files.write_json(run / "parties" / "bank" / "links.json", {})
    table_tag(run / "parties" / "bank", np.zeros(3))
    log = EventLog(run / "parties" / "bank" / "log.jsonl", party="bank")
    log.write("start")
    log.close()
    ledger = ChainedFile(run / "parties" / "bank" / "ledger.jsonl")
    ledger.append({"kind": "open"})
    ledger.close()
    kept = sorted((run / "parties" / "bank").iterdir())
    names = ["ledger.jsonl", "links.json", "log.jsonl", "released.pt", "tag.key"]
    assert [path.name for path in kept] == names
    assert {mode(path) for path in kept} == {0o600}
    assert {mode(path) for path in (run.parent, run, run / "parties")} == {0o700}


@pytest.mark.usefixtures("open_umask")
def test_what_is_for_others_follows_the_umask(tmp_path):
    """A report may be read by whom the user lets read new files; a folder that was there stays."""
    tmp_path.chmod(0o755)
    files.write_text(tmp_path / "report.html", "<html>", for_others=True)
    assert mode(tmp_path / "report.html") == 0o644
    assert mode(tmp_path) == 0o755
    os.umask(0o077)
    files.write_text(tmp_path / "report.html", "<html>", for_others=True)
    assert mode(tmp_path / "report.html") == 0o600


def test_an_open_file_is_closed_by_the_next_write(tmp_path):
    """A file that an earlier version left open to others is private once it is written again."""
    path = tmp_path / "epoch-1.pt"
    path.write_bytes(b"old")
    path.chmod(0o644)
    files.write_bytes(path, b"new")
    assert (mode(path), path.read_bytes()) == (0o600, b"new")


@pytest.mark.parametrize("kind", ACTS)
def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, kind):
    """The line names the file and the system's reason; what was there before still is."""
    path = tmp_path / "kept"
    if kind == "file":
        path.write_bytes(b"what was there before")
    ended = subprocess.run(
        [sys.executable, "-B", "-c", FULL.format(act=ACTS[kind]), str(path)],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
    )
    assert ended.stderr == ""
    assert ended.stdout.startswith("StorageError 2 ")
    assert f"{path}: cannot be written (File too large)" in ended.stdout
    assert [child.name for child in tmp_path.iterdir()] == ["kept"]
    if kind == "file":
        assert path.read_bytes() == b"what was there before"
    if kind == "ledger":
        chain = ChainedFile(path)  # the whole lines are kept, and the chain holds
        assert len(chain.entries) > 10
        chain.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """A file stands where a folder is wanted."""
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        files.write_text(tmp_path / "run" / "metrics.json", "{}")
    with pytest.raises(ConfigError, match="choose another with --out"):
        files.require_writable_folder(tmp_path / "run" / "parties")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1'])
def test_damaged_figures_are_one_line(tmp_path, content):
    """What a run folder holds is read by later commands: cut, deep or foreign, it is named."""
    path = tmp_path / "metrics.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"metrics\.json: (is not JSON|holds no figures)"):
        files.read_json(path)


def test_what_a_killed_process_has_not_finished_is_removed(tmp_path):
    """Its temporary files at any depth, and nothing that has a name of its own."""
    kept = [tmp_path / ".hidden", tmp_path / "parties" / "model.0123456789abcdef"]
    for path in kept:
        files.write_text(path, "kept")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fsync", killed)
        patch.setattr(files.Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            files.write_text(tmp_path / "parties" / "epoch-1.pt", "half")
    assert len(list(tmp_path.rglob("*epoch-1*"))) == 1
    files.remove_unfinished(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_settings_are_read_as_editors_save_them(tmp_path, encoding):
    path = tmp_path / "fed.toml"
    path.write_text('name = "größe"\r\n', encoding=encoding)
    assert files.read_toml(path) == {"name": "größe"}


def test_a_backslash_is_named(tmp_path):
    path = tmp_path / "fed.toml"
    path.write_text('data = "C:\\Users\\tel.csv"')
    with pytest.raises(ValueError, match="forward slashes"):
        files.read_toml(path)


@pytest.mark.parametrize(("number", "passes"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_synced_is_passed(tmp_path, monkeypatch, number, passes):
    """A share has no such call; a disk that fails has."""

    def fsync(_handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if passes:
        files.sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            files.sync_folder(tmp_path)


def test_an_output_with_two_names_stays_one_file(tmp_path):
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text("of yesterday")
    other.hardlink_to(one)
    files.write_output(one, "of today")
    assert other.read_text() == "of today"
