"""Workbooks of Excel: the same table as from other sources, or one line each for what is wrong."""

import datetime
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import OwnReading, Wanted
from securevfl.desk.setup.init import look_at
from securevfl.desk.setup.proposed_columns import Declared
from securevfl.stages.tables import workbooks

openpyxl = pytest.importorskip("openpyxl")

ROWS = [
    ["id", None, "a", "flag", "who", "day", "when"],
    ["0123", 1, 0.5, True, "Müller", datetime.datetime(2020, 1, 31), "28.03.1956"],
    [25115, None, 1, None, None, None, None],
    [None] * 7,
    [7.0, 2, None, False, "NA", datetime.datetime(2021, 2, 1), "1.4.1956"],
]


def write(path: Path, **sheets: list[list[object]]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return path


def read(path: Path, *, wanted: Wanted = Wanted(), **reading: object) -> pd.DataFrame:  # noqa: B008
    return read_frame(path, where="table", reading=OwnReading(**reading), wanted=wanted)  # type: ignore[arg-type]


def refusal(path: Path, *, wanted: Wanted = Wanted(), **reading: object) -> str:  # noqa: B008
    with pytest.raises((ConfigError, DataError)) as caught:
        read(path, wanted=wanted, **reading)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_cells_keep_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of few rows: kinds are those of whole columns."""
    path = write(tmp_path / "t.xlsx", only=ROWS)
    for most in (200_000, 1):
        monkeypatch.setattr(workbooks, "_CELLS_OF_A_PIECE", most)
        frame = read(path, wanted=Wanted(as_text=["id"]), dates="%d.%m.%Y")
        assert frame.columns.tolist() == ["id", "unnamed-2", *ROWS[0][2:]]
        assert frame["id"].tolist() == ["0123", "25115", "7"]
        np.testing.assert_array_equal(frame["a"], [0.5, 1.0, np.nan])
        assert frame["flag"].dropna().tolist() == [True, False]
        assert frame["who"].dropna().tolist() == ["Müller"]
        assert [str(day)[:10] for day in frame["day"].dropna()] == ["2020-01-31", "2021-02-01"]
        assert frame["when"].dropna().tolist() == ["1956-03-28", "1956-04-01"]
    kept = read(path, wanted=Wanted(columns=["who"], words={"who": ["NA"]}))
    assert kept["who"].dropna().tolist() == ["Müller", "NA"]


def test_init_looks_at_a_workbook(tmp_path: Path) -> None:
    path = write(tmp_path / "bank.xlsx", only=ROWS)
    table = look_at(path, declared=Declared(), root=tmp_path)
    assert (table.name, table.rows, table.reading.dates) == ("bank", 3, "%d.%m.%Y")
    column = table.column("when")
    assert column is not None
    assert column.kind == "date"


def test_a_sheet_is_named_and_a_title_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.xlsx", one=[["title"], ["a", "b"], [1, 2]], two=[["c"], [3]])
    assert 'has 2 sheets; write reading = { table = "one" } or' in refusal(path)
    assert "has no sheet 'on'; did you mean 'one'?" in refusal(path, table="on")
    assert read(path, table="one", skip_lines=1)["b"].tolist() == [2]
    assert "if row 2 is the header, write reading = { skip_lines = 1 }" in refusal(
        path, table="one"
    )
    assert "reading.separator: goes with a text file alone" in refusal(path, separator=";")
    assert "reading.query: goes with a database alone" in refusal(path, query="select 1")


def test_an_id_that_lost_digits_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.xlsx", only=[["card"], [4929000000000000]])
    assert "row 2: is a number of more than 15 digits" in refusal(
        path, wanted=Wanted(as_text=["card"])
    )


def test_a_workbook_that_unpacks_to_much_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.xlsx", only=ROWS)
    monkeypatch.setattr(workbooks, "_MOST_UNPACKED", 1000)
    monkeypatch.setattr(openpyxl, "load_workbook", None)  # it would fail with another line
    assert "would unpack to" in refusal(path)


def test_a_cell_far_down_takes_no_room(tmp_path: Path) -> None:
    """Between two cells lie 17 billion that are not there."""
    path = write(tmp_path / "t.xlsx", only=[["a", "b"], [1, 2]])
    book = openpyxl.load_workbook(path)
    book.active["XFD90000"] = 1
    book.save(path)
    assert "row 90,000 has 16384 cells, and its header has 2 names" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"rubbish" * 40, None])
def test_what_is_no_workbook_gets_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("a.txt", "a")
        content = packed.getvalue()
    path = tmp_path / "t.xlsx"
    path.write_bytes(content)
    assert "can't be read as a workbook" in refusal(path)
    assert "No such file" in refusal(tmp_path / "none.xlsx")


def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    said = refusal(tmp_path / "t.xlsx")
    assert "pip install 'securevfl[excel]'" in said


def test_a_title_above_the_header_is_named(tmp_path: Path) -> None:
    """With the columns that are needed, and by the width of what follows, as for text files."""
    rows = [["Customers 2026"], [], ["id", "a", "b"], [1, 2, 3], [4, 5, 6]]
    path = write(tmp_path / "t.xlsx", only=rows)
    for wanted in (Wanted(needed=["id"]), Wanted()):
        said = refusal(path, wanted=wanted)
        assert "row 1, 'Customers 2026'" in said
        assert "reading = { skip_lines = 2 }" in said
    assert read(path, skip_lines=2).columns.tolist() == ["id", "a", "b"]
