"""Every command that reads a table asks the one list of doubts about it."""

from pathlib import Path

import pytest
from helpers.command_line import securevfl

from securevfl.testing import make_frames, write_federation
from securevfl.testing.small_federation import KEYS

Capture = pytest.CaptureFixture[str]
KEY = "rows have the same key"
CELLS = "cells are -9999"


def test_one_list_by_command(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what each reads: ``columns`` knows no keys, ``link`` no features, ``predict`` new rows."""
    monkeypatch.setenv("COLUMNS", "300")
    frames = make_frames(secondaries=1, rows=240, binary=True)
    for frame in frames.values():
        frame.iloc[:30, [frame.columns.get_loc(name) for name in KEYS]] = 0.0
        frame.iloc[::9, frame.columns.get_loc("x1")] = -9999.0
    path = write_federation(tmp_path, frames=frames, federation={"task": "binary"})
    agency, bank = tmp_path / "agency.csv", tmp_path / "bank-1.csv"
    frames["agency"].drop(columns="y").to_csv(tmp_path / "new.csv", index=False)
    key = f"key {', '.join(map(repr, KEYS))}: 30 of 240 {KEY}"
    init = ("init", "--primary", agency, "--label", "y", "--secondary", bank)
    by_command = {
        ("columns", bank, "--out", tmp_path / "list.json"): (CELLS,),
        (*init, "--out", tmp_path / "new.toml", *keys()): (CELLS, key),
        ("check", path): (CELLS, key),
        ("link", path, "--out", tmp_path / "links"): (key,),
        ("simulate", path, "--out", tmp_path / "run"): (CELLS, key),
        (
            "predict",
            tmp_path / "run",
            "--data-root",
            tmp_path,
            "--rows",
            tmp_path / "new.csv",
            "--out",
            tmp_path / "p.csv",
        ): (
            CELLS,
            key,
        ),
    }
    for command, doubts in by_command.items():
        ended = securevfl(capfd, *command)
        text = " ".join((ended.out + ended.err).split())
        assert ended.code == 0, (command[0], text)
        for doubt in doubts:
            assert doubt in text, (command[0], doubt)


def keys() -> list[str]:
    """Return the options of ``init`` that name the keys."""
    return [word for name in KEYS for word in ("--key", name)]
