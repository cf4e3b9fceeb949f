"""What a ledger's file survives, what it notices, and that opening one alters nothing."""

import os
import signal
from pathlib import Path

import pytest
from helpers.full_disk import at_most

from securevfl.core.errors import ConfigError, PrivacyError, StorageError
from securevfl.ledger import chain
from securevfl.ledger.chain import ChainedFile, read_chain


def written(path: Path, *, lines: int = 3) -> str:
    """Write a file of so many lines and return its head."""
    file = ChainedFile(path)
    for number in range(lines):
        file.append({"number": number})
    file.close()
    return file.head


def test_a_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    """An editor that drops the last newline does not drop the last charge with it."""
    path = tmp_path / "ledger.jsonl"
    head = written(path)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))

    file = ChainedFile(path)
    assert [entry["number"] for entry in file.entries] == [0, 1, 2]
    assert file.head == head
    file.append({"number": 3})
    file.close()
    again = ChainedFile(path)
    assert [entry["number"] for entry in again.entries] == [0, 1, 2, 3]
    again.close()


def test_a_torn_line_is_cut_by_the_next_append_and_not_before(tmp_path: Path) -> None:
    """It was never finished, so nothing followed from it."""
    path = tmp_path / "ledger.jsonl"
    head = written(path)
    torn = path.read_bytes() + b'{"number": 3, "prev'
    path.write_bytes(torn)

    file = ChainedFile(path)
    assert file.head == head
    assert path.read_bytes() == torn
    file.append({"number": 4})
    file.close()
    again = ChainedFile(path)
    assert [entry["number"] for entry in again.entries] == [0, 1, 2, 4]
    again.close()


@pytest.mark.parametrize(
    "tail",
    [
        bytes(1247),
        b'{"number": 3\x00',
        b'{"number": "\xc3',
        b"some words",
        b'[{"number',
        b'{"' + b"9" * 99,
    ],
    ids=["nuls", "a nul", "no ascii", "words", "a list", "long"],
)
def test_an_end_that_no_write_leaves_is_damage(
    tail: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any length, it could stand where lines were; it is neither read over nor cut off."""
    monkeypatch.setattr(chain, "MOST_LINE_BYTES", 100)
    path = tmp_path / "ledger.jsonl"
    ledger = ChainedFile(path)
    with pytest.raises(PrivacyError, match="takes no line of"):
        ledger.append({"number": 0})
    monkeypatch.setattr(chain, "MOST_LINE_BYTES", 200)
    written(path)
    monkeypatch.setattr(chain, "MOST_LINE_BYTES", 100)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)

    for read in (ChainedFile, read_chain):
        with pytest.raises(PrivacyError, match=f"line 4: is no line.*: {len(tail)} bytes"):
            read(path)
    assert path.read_bytes() == whole + tail
    # What a write leaves that was cut off anywhere is none.
    for cut_at in range(1, 90):
        path.write_bytes(whole + whole.splitlines()[1][:cut_at])
        again = ChainedFile(path)
        again.close()
        assert len(again.entries) == len(read_chain(path)[1]) == 3


def test_a_last_line_that_does_not_follow_is_no_torn_one(tmp_path: Path) -> None:
    """A whole line is never thrown away, with its newline or without."""
    path = tmp_path / "ledger.jsonl"
    written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:1], lines[2]]))

    with pytest.raises(PrivacyError, match="line 2: does not follow"):
        ChainedFile(path)


@pytest.mark.parametrize(
    "content",
    [b"thesis, chapter 1", b"x,y\n1,2", b'{"a": 1}', b"[" * 5000, b"\xff\xfe\x00", b"\n", b"1\n"],
)
def test_a_foreign_file_is_refused_and_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    """With a final newline or without one."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)

    for read_only in (False, True):
        with pytest.raises(PrivacyError, match=r"line [12]: is not a ledger's line"):
            ChainedFile(path, read_only=read_only)
    assert path.read_bytes() == content


def test_an_emptied_file_is_not_a_fresh_one(tmp_path: Path) -> None:
    """A ledger has a line from its first moment on; what an empty one held is lost."""
    path = tmp_path / "ledger.jsonl"
    written(path)
    path.write_bytes(b"")

    with pytest.raises(PrivacyError, match="is empty, and a ledger never is"):
        ChainedFile(path)
    assert path.exists()


def test_a_file_that_got_no_line_leaves_nothing(tmp_path: Path) -> None:
    """Its maker failed before the first one: the next maker is the first."""
    path = tmp_path / "ledger.jsonl"
    ChainedFile(path).close()

    assert not path.exists()
    written(path)


def test_a_line_that_the_disk_does_not_take_is_not_there(tmp_path: Path) -> None:
    """A full disk ends in one line for the user; the file is as it was, and goes on afterwards.

    The disk is full because this process may not write files beyond so many bytes.
    """
    path = tmp_path / "ledger.jsonl"
    head = written(path)
    before = path.read_bytes()
    file = ChainedFile(path)
    with at_most(len(before) + 20), pytest.raises(StorageError, match=r"cannot be written \(File"):
        file.append({"number": 3})
    assert path.read_bytes() == before
    assert file.head == head
    file.append({"number": 4})
    file.close()
    again = ChainedFile(path)
    assert [entry["number"] for entry in again.entries] == [0, 1, 2, 4]
    again.close()


def test_looking_neither_makes_nor_writes(tmp_path: Path) -> None:
    """Two may look at a time; nobody looks while a run writes."""
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(ConfigError, match="cannot be opened"):
        ChainedFile(path, read_only=True)
    assert not path.exists()
    written(path)
    one, two = ChainedFile(path, read_only=True), ChainedFile(path, read_only=True)
    with pytest.raises(PrivacyError, match="is closed"):
        one.append({"number": 3})
    with pytest.raises(ConfigError, match="in use by another run"):
        ChainedFile(path)
    one.close()
    two.close()
    writer = ChainedFile(path)
    with pytest.raises(ConfigError, match="in use by another run"):
        ChainedFile(path, read_only=True)
    writer.close()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A pipe would wait for a reader for ever."""
    pipe = tmp_path / "ledger.jsonl"
    os.mkfifo(pipe)

    with pytest.raises(ConfigError, match="is not a file"):
        ChainedFile(pipe)


@pytest.mark.parametrize("step", ["open", "write", "fsync", "link", "unlink"])
def test_a_maker_that_is_killed_leaves_no_empty_ledger(step: str, tmp_path: Path) -> None:
    """Killed before its first line is there, there is no file; the next one makes it."""
    path = tmp_path / "ledger.jsonl"
    child = os.fork()
    if not child:

        def killed(*args: object, **more: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if step == "unlink":
            Path.unlink = killed  # type: ignore[assignment, method-assign]
        else:
            setattr(os, step, killed)
        ChainedFile(path).append({"number": 0})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL

    made = [{"number": 0}] if step == "unlink" else []
    file = ChainedFile(path)
    assert file.entries == made
    file.append({"number": 1})
    file.close()
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.jsonl"]
    assert len(path.read_bytes().splitlines()) == len(made) + 1


def test_of_two_that_make_one_file_one_does(tmp_path: Path) -> None:
    """The other is told, before it has written anything that counts."""
    path = tmp_path / "ledger.jsonl"
    one, other = ChainedFile(path), ChainedFile(path)
    assert not path.exists()
    one.append({"number": 1})
    with pytest.raises(ConfigError, match="is in use by another run"):
        other.append({"number": 2})
    other.close()
    one.append({"number": 3})
    with pytest.raises(ConfigError, match="is in use by another run"):
        ChainedFile(path)
    one.close()
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.jsonl"]
    again = ChainedFile(path)
    assert [entry["number"] for entry in again.entries] == [1, 3]
    again.close()


def test_where_there_are_no_links_one_makes_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on FAT: in two steps, by one of two all the same; a full disk leaves nothing there."""

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "ledger.jsonl"
    full = ChainedFile(path)
    with at_most(5), pytest.raises(StorageError):
        full.append({"number": 0})
    assert list(tmp_path.iterdir()) == []
    one, other = ChainedFile(path), ChainedFile(path)
    one.append({"number": 1})
    with pytest.raises(ConfigError, match="is in use by another run"):
        other.append({"number": 2})
    one.close()
    again = ChainedFile(path, read_only=True)
    again.close()
    assert again.entries == [{"number": 1}]
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.jsonl"]


def cut(path: Path) -> None:
    """Leave the first line alone."""
    os.truncate(path, path.read_bytes().index(b"\n") + 1)


def put_back_as_nuls(path: Path) -> None:
    """Leave its size, and nothing of what it held."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def replace_by_a_copy(path: Path) -> None:
    """Do as an editor, rsync or a backup that is restored."""
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def add_a_line(path: Path) -> None:
    """Do as another run where locks do not hold."""
    with path.open("ab") as file:
        file.write(b'{"kind": "charge"}\n')


TAKEN_AWAY = {
    "emptied": (lambda path: os.truncate(path, 0), "was cut by"),
    "cut": (cut, "was cut by"),
    "nuls": (put_back_as_nuls, "was overwritten"),
    "moved": (lambda path: path.rename(path.with_suffix(".old")), "was moved or removed"),
    "removed": (Path.unlink, "was moved or removed"),
    "replaced": (replace_by_a_copy, "was replaced by another file"),
    "added to": (add_a_line, "got 19 bytes from another program"),
}
"""What may be done to a ledger under a run, and what the run then says."""


@pytest.mark.parametrize("how", TAKEN_AWAY)
@pytest.mark.parametrize("opened", [False, True], ids=["made", "opened"])
def test_a_file_that_is_taken_away_gets_no_line_more(
    how: str, opened: bool, tmp_path: Path
) -> None:
    """It is left as it is: nothing is mended, cut off or made anew, then or later."""
    take_away, said = TAKEN_AWAY[how]
    path = tmp_path / "ledger.jsonl"
    if opened:
        written(path)
    file = ChainedFile(path)
    for number in range(2):
        file.append({"number": number})
    take_away(path)
    left = {one.name: one.read_bytes() for one in tmp_path.iterdir()}

    with pytest.raises(PrivacyError, match=f"{said}.* while this run was using it"):
        file.append({"number": 2})
    with pytest.raises(PrivacyError, match="nothing may be released any more"):
        file.append({"number": 2})
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == left
