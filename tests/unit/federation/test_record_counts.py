"""How often each record was released: counted before it is, on the disk, and never from zero."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.counted import Answering, write_counted
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.data.tables import KeyTable
from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.ledger_file import FILE, RecordCounts

RECORDS = 6


def keys_of(records: int = RECORDS) -> KeyTable:
    return KeyTable(name="bank", columns={"id": np.arange(records, dtype=np.float64)})


def counts_of(folder: Path | None) -> RecordCounts:
    return RecordCounts(folder, ChainedFile(None), keys_of(), last=None)


ROUNDS = st.lists(
    st.lists(
        st.lists(st.integers(-1, RECORDS - 1), min_size=2, max_size=2, unique=True),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=200)
@given(rounds=ROUNDS, most=st.integers(1, 4), gone=st.integers(0, RECORDS - 1))
def test_each_record_takes_part_in_its_first_rows_whoever_else_is_there(
    rounds: list[list[list[int]]], most: int, gone: int
) -> None:
    """By a plain count; and without one record nothing changes for any other."""
    here, there = counts_of(None), counts_of(None)
    uses = [0] * RECORDS
    for rows in rounds:
        links = np.array(rows, dtype=np.int64)
        admitted = here.admit(links, most=most)
        expected = np.zeros(links.shape, dtype=bool)
        for place, record in np.ndenumerate(links):
            if record >= 0 and uses[record] < most:
                uses[record] += 1
                expected[place] = True
        np.testing.assert_array_equal(admitted, expected)
        fewer = there.admit(np.where(links == gone, -1, links), most=most)
        np.testing.assert_array_equal(fewer, admitted & (links != gone))
    assert max(uses) <= most


def test_a_release_without_records_is_a_line_too() -> None:
    """How many lines there are depends on no record."""
    counts = counts_of(None)
    before = counts.head
    counts.admit(np.full((3, 2), -1), most=1)
    assert counts.head != before


def test_answers_to_keys_are_there_in_the_next_process(tmp_path: Path) -> None:
    """By a hash of the key; and a line that holds no symbol is refused."""
    ledger = ChainedFile(None)

    def opened() -> RecordCounts:
        return RecordCounts(tmp_path, ledger, keys_of(), last=None)

    counts = opened()
    counts.keep_answers({"1:a": 3, "1:b": 0})
    counts.keep_answers({"1:a": 2})
    counts.close()
    assert "1:" not in (tmp_path / FILE).read_text()
    counts = opened()
    assert [counts.answers_to(key) for key in ("1:a", "1:b", "1:c")] == [2, 1, 0]
    assert [counts.last_answer_to(key) for key in ("1:a", "1:b")] == [2, 0]
    counts.append({"kind": "answers", "symbols": {"aa": -1}})
    counts.close()
    with pytest.raises(PrivacyError, match=r"line 4: is no line that counts records$"):
        opened()


@pytest.fixture
def asked(tmp_path: Path) -> tuple[Path, Answering]:
    """Return a federation whose secondaries have answered two requests, and its parties."""
    path = write_counted(tmp_path, releases=1)
    world = Answering(path, tmp_path / "parties")
    for start in (0, 2):
        world.begin(world.keys.take(np.arange(start, start + 2)))
        world.answer([0, 1])
    world.restart()
    return path, world


def ask_again(path: Path, world: Answering) -> None:
    again = Answering(path, world.folder)
    try:
        again.begin(again.keys.take(np.arange(2)))
        again.answer([0, 1])
    finally:
        again.restart()


def released(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    kept = [line["records"] for line in lines if line["kind"] == "released"]
    return [record for records in kept for record in records]


def test_counts_outlive_the_process(asked: tuple[Path, Answering]) -> None:
    path, world = asked
    before = released(world.folder / "bank-1")
    assert before
    ask_again(path, world)
    after = released(world.folder / "bank-1")
    assert len(set(after)) == len(after), "each record once, over all processes"
    assert after[: len(before)] == before


def without_last(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def altered(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"records": [', '"records": [0, ', 1)
    path.write_text("".join(lines))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda folder: (folder / FILE).unlink(), "are not of the same time"),
    "empty": (lambda folder: (folder / FILE).write_text(""), "is empty"),
    "cut": (lambda folder: without_last(folder / FILE), "are not of the same time"),
    "altered": (lambda folder: altered(folder / FILE), "does not follow from the line before"),
    "no lines": (lambda folder: (folder / FILE).write_text("{}\n"), "is not a ledger's line"),
    "ledger missing": (
        lambda folder: (folder / "ledger.jsonl").unlink(),
        "are not of the same time",
    ),
    "ledger cut": (
        lambda folder: [without_last(folder / "ledger.jsonl") for _ in range(2)],
        "are not of the same time",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_counts_that_cannot_be_known_release_nothing(
    damage: str, asked: tuple[Path, Answering]
) -> None:
    """One clear line; nothing is charged, and nothing starts again at zero."""
    path, world = asked
    folder = world.folder / "bank-1"
    do, text = DAMAGES[damage]
    do(folder)
    with pytest.raises(PrivacyError, match=text) as refused:
        ask_again(path, world)
    assert "\n" not in str(refused.value)
    ledger = folder / "ledger.jsonl"
    assert ledger.read_text().count('"charge"') <= 2
    with pytest.raises(PrivacyError):
        ask_again(path, world)


def test_a_line_that_a_crash_cut_off_was_never_released(asked: tuple[Path, Answering]) -> None:
    path, world = asked
    file = world.folder / "bank-1" / FILE
    with file.open("a") as open_file:
        open_file.write('{"kind": "released", "led')
    ask_again(path, world)


def test_counts_are_of_one_table(asked: tuple[Path, Answering], tmp_path: Path) -> None:
    path, world = asked
    table = tmp_path / "bank-1.csv"
    whole = pd.read_csv(table)
    # A person has moved away, and everybody after it has another number.
    whole.drop(index=1).to_csv(table, index=False)
    with pytest.raises(PrivacyError, match="keys the table no longer has"):
        ask_again(path, world)
    whole.iloc[::-1].to_csv(table, index=False)
    with pytest.raises(PrivacyError, match="keep every record at its place"):
        ask_again(path, world)
    # What is known of a person may change, and new ones come at the end.
    more = pd.concat([whole.assign(x0=0.1), whole.tail(2) + 1e-3])
    more.to_csv(table, index=False)
    ask_again(path, world)
    ask_again(path, world)
    file = world.folder / "bank-1" / FILE
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds.count("table") == 2


def noting(
    name: str,
    call: Callable[..., object],
    names: dict[int, str],
    calls: list[tuple[str, str]],
) -> Callable[..., object]:
    """Return a system call that notes its name and its file's, of the files that have a name."""

    def noted(handle: int, *more: object) -> object:
        done = call(handle, *more)
        file = names.get(os.fstat(handle).st_ino)
        if file is not None:
            calls.append((name, file))
        return done

    return noted


def test_a_count_is_on_the_disk_before_its_release_is_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of what the system is asked for, line by line and file by file."""
    path = write_counted(tmp_path, releases=1)
    folder = tmp_path / "parties"
    world = Answering(path, folder, durable=True)
    world.begin(world.keys.take(np.arange(2)))
    calls: list[tuple[str, str]] = []
    names = {file.stat().st_ino: file.name for file in (folder / "bank-1").iterdir()}
    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name), names, calls))
    world.answer([0, 1])
    monkeypatch.undo()
    world.restart()
    assert calls == [(name, file) for file in (FILE, "ledger.jsonl") for name in ("write", "fsync")]


def test_nobody_else_counts_in_it_meanwhile(tmp_path: Path) -> None:
    counts = counts_of(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        counts_of(tmp_path)
    counts.close()
    with pytest.raises(PrivacyError, match="is closed"):
        counts.admit(np.array([[0]]), most=1)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
