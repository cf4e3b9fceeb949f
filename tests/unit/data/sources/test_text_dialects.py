"""Text files as they lie around: recognised, or one line that says what to write."""

import bz2
import codecs
import gzip
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.new_rows import read_new_rows

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.party_tables import ColumnRoles, read_table
from securevfl.data.scaling import ColumnSettings
from securevfl.data.sources.pieces import LOST
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import OwnReading, Reading, Wanted

ROWS = [("1.5", "70", "Müller"), ("1.25", "80", "Łoś")]
NAMES = ("lon", "area", "who")


def text(separator: str = ",", decimal: str = ".", *, header: bool = True) -> str:
    rows = [tuple(cell.replace(".", decimal) for cell in row) for row in ROWS]
    return "".join(separator.join(row) + "\n" for row in ([NAMES] if header else []) + rows)


def read(path: Path, *needed: str, **reading: object):
    """Read a file; returns the frame and what was noticed."""
    noticed: list[str] = []
    frame = read_frame(
        path,
        where="table",
        reading=Reading(**reading),
        wanted=Wanted(needed=needed),
        notice=noticed.append,
    )
    return frame, noticed


def refusal(path: Path, *needed: str, **reading: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, *needed, **reading)
    said = str(caught.value)
    assert "\n" not in said
    assert caught.value.exit_code == 2
    return said


def zipped(content: bytes, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("table.csv", content)


@pytest.mark.parametrize(
    ("name", "content", "noticed"),
    [
        ("t.csv", text().encode(), ""),
        ("t.csv", text(";").encode(), "separator ';'"),
        ("t.csv", text("|").encode(), "separator '|'"),
        ("t.tsv", text("\t").encode(), "separator '\\t'"),
        ("t.csv", text(";", ",").encode(), "separator ';' and the decimal ','"),
        ("t.csv", text("\t", ",").encode(), "decimal ','"),
        ("t.csv", codecs.BOM_UTF8 + text().encode(), ""),
        ("t.csv", text().encode("utf-16"), "encoding 'utf-16'"),
        ("t.csv", text().encode("utf-16-le"), "encoding 'utf-16-le'"),
        ("t.csv", text().replace("\n", "\r\n").encode(), ""),
        ("T.CSV", text().encode(), ""),
        ("t.csv.gz", gzip.compress(text().encode(), mtime=0), ""),
        ("t.csv.bz2", bz2.compress(text().encode()), ""),
        ("t.csv.xz", lzma.compress(text().encode()), ""),
        ("t.csv.zst", pa.compress(text().encode(), codec="zstd", asbytes=True), ""),
    ],
)
def test_one_table_in_many_dialects(
    tmp_path: Path, name: str, content: bytes, noticed: str
) -> None:
    """Numbers are numbers, letters are letters, and what is unusual is said."""
    (tmp_path / name).write_bytes(content)
    frame, said = read(tmp_path / name)

    assert frame.columns.tolist() == list(NAMES)
    assert frame["lon"].tolist() == [1.5, 1.25]
    assert frame["area"].tolist() == [70, 80]
    assert frame["who"].tolist() == ["Müller", "Łoś"]
    assert len(said) == bool(noticed)
    assert noticed in "".join(said)
    assert all("reading = { " in line and line.endswith("says so for good") for line in said)


def test_an_archive_of_one_table_is_read(tmp_path: Path) -> None:
    zipped(text(";").encode(), tmp_path / "t.zip")
    assert read(tmp_path / "t.zip")[0].columns.tolist() == list(NAMES)


@pytest.mark.parametrize(
    ("content", "reading"),
    [
        (text().encode("cp1250"), {"encoding": "cp1250"}),
        (text(header=False).encode(), {"header": NAMES}),
        (text(";", ",", header=False).encode(), {"header": NAMES}),
        (text("~").encode(), {"separator": "~"}),
        (text().replace("1.5", "-9").encode(), {"empty": ("-9",)}),
        (text().replace("70", '"1,070"').encode(), {"decimal": ".", "thousands": ","}),
        (text(";", ",").replace("70", "1.070").encode(), {"decimal": ",", "thousands": "."}),
        (text(";", ",").replace("70", "1 070").encode(), {"decimal": ",", "thousands": " "}),
    ],
)
def test_what_is_said_is_taken(tmp_path: Path, content: bytes, reading: dict[str, object]) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    frame, _ = read(tmp_path / "t.csv", **reading)

    assert frame.columns.tolist() == list(NAMES)
    first = np.nan if "empty" in reading else 1.5
    np.testing.assert_array_equal(frame["lon"], [first, 1.25])
    assert frame["area"].tolist() == [1070 if "thousands" in reading else 70, 80]
    assert frame["who"].tolist() == ["Müller", "Łoś"]


AMBIGUOUS = {
    "decimal comma or thousands": (
        'id,price\n1,"1,234"\n2,"5,678"\n',
        "column 'price', row 1: '1,234' may be 1.234 or 1234; write reading = { decimal = \",\" }",
    ),
    "surely thousands": (
        'id,price\n1,"1,234,567"\n2,"5"\n',
        'has marks between thousands; write reading = { decimal = ".", thousands = "," }',
    ),
    "both marks": (
        "id;price\n1;1.234,5\n2;5,5\n",
        'has marks between thousands; write reading = { decimal = ",", thousands = "." }',
    ),
    "two decimal marks": (
        "id;price;area\n1;1,5;2.5\n2;5,5;3.5\n",
        "column 'area', row 1: '2.5' is no number with the decimal mark ','",
    ),
    "two separators": (
        "id,a;b\n1,2;3\n4,5;6\n",
        "its cells may be separated by ',' or ';'; write reading = { separator = \",\" } or",
    ),
    "no header": ("1,2.5\n3,4.5\n", "seems to have no header, its first line being '1', '2.5'"),
    "header is data": ("7,x\n3,y\n", "no header, its first line being '7', 'x'; write"),
}


@pytest.mark.parametrize(("content", "message"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_two_readings_are_asked_about(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    assert message in refusal(tmp_path / "t.csv")


def test_a_decimal_comma_far_down_is_asked_about(tmp_path: Path) -> None:
    """Where the beginning shows whole numbers alone, nothing is guessed from the end."""
    (tmp_path / "t.csv").write_text("a;b\n" + "1;2\n" * 1500 + "1;2,5\n")
    assert "column 'b', row 1,501: '2,5' has a decimal comma" in refusal(tmp_path / "t.csv")


def test_years_are_names_where_they_stand_beside_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,2019,2020\n1,2,3\n4,5,6\n")
    assert read(tmp_path / "t.csv")[0].columns.tolist() == ["id", "2019", "2020"]
    assert read(tmp_path / "t.csv", "2019")[0]["2019"].tolist() == [2, 5]


BAD = {
    "absent": (None, {}, "No such file"),
    "empty": (b"", {}, "is empty"),
    "blank": (b"\n \n", {}, "is empty"),
    "rubbish": (bytes(range(256)) * 4, {}, "is not a text file"),
    "random bytes": (b"\x93\x00\x12" * 50, {}, "is not a text file"),
    "a workbook": (b"PK\x03\x04" + bytes(50), {}, "a workbook of a spreadsheet"),
    "a compressed file": (gzip.compress(b"a,b\n1,2\n"), {}, "is gzip, not a text file; call it"),
    "Latin-1": (text().replace("Łoś", "Grün").encode("latin-1"), {}, "may be windows-1252, which"),
    "not what is said": (text().encode(), {"encoding": "ascii"}, "is not ASCII (line 2)"),
    "wrong separator": (b"id,a\n1,2\n", {"separator": ";"}, 'reading = { separator = "," }'),
    "unknown separator": (b"id~a\n1~2\n", {}, 'reading = { separator = "~" }'),
    "two names": (b"id,a,a\n1,2,3\n", {}, "two columns are called 'a'"),
    "not there": (b"idd,a\nx,y\n", {}, "has no column 'id'; did you mean 'idd'?"),
    "a long row": (b"id,a\n1,2\n1,2,3\n", {}, "line 3 has 3 cells instead of 2"),
    "a short header": (b"id,a\n1,2\n", {"header": ("id",)}, "names 1 columns"),
    "two headers": (b"id,a\n1,2\n", {"header": ("id", "a")}, "leave reading.header out"),
    "a database's": (b"id,a\n1,2\n", {"table": "t"}, "goes with a workbook or a database alone"),
}


@pytest.mark.parametrize(("content", "reading", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_gets_one_line(
    tmp_path: Path, content: bytes | None, reading: dict[str, object], message: str
) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_bytes(content)
    assert message in refusal(tmp_path / "t.csv", "id", **reading)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("t.csv.gz", gzip.compress), ("t.csv.bz2", bz2.compress), ("t.csv.xz", lzma.compress)],
)
def test_a_truncated_archive_gets_one_line(tmp_path: Path, name: str, pack: object) -> None:
    content = "".join(f"{i},{i * i}\n" for i in range(3000))
    (tmp_path / name).write_bytes(pack(f"id,a\n{content}".encode())[:-40])  # type: ignore[operator]
    assert "can't be read: " in refusal(tmp_path / name)


def test_other_bad_places_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "t.csv.zst").write_bytes(b"nothing")
    (tmp_path / "t.csv.zip").write_bytes(b"nothing")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a.csv", "x")
        archive.writestr("b.csv", "x")
    assert "Is a directory" in refusal(tmp_path / "folder.csv")
    assert "can't be read" in refusal(tmp_path / "t.csv.zst")
    assert "can't be read" in refusal(tmp_path / "t.csv.zip")
    assert "holds 2 files instead of one table" in refusal(tmp_path / "two.zip")


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"separator": ";;"}, "separator: must be one character"),
        ({"encoding": "klingon"}, "encoding: 'klingon' is not known"),
        ({"encoding": "base64"}, "encoding: 'base64' is not known"),
        ({"thousands": "."}, "thousands: '.' is the decimal mark"),
        ({"header": ("a", "a")}, "two columns are called 'a'"),
        ({"table": "a", "query": "b"}, "exclude one another"),
    ],
)
def test_impossible_settings_are_refused(reading: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OwnReading(**reading)  # type: ignore[arg-type]


def test_long_whole_numbers_keep_all_digits_beside_gaps(tmp_path: Path) -> None:
    """float64 holds no 17 digits: with an empty cell, pandas alone would round all of them."""
    (tmp_path / "t.csv").write_text("id,a\n90071992547409931,1\n,2\n90071992547409933,3\n")
    frame, _ = read(tmp_path / "t.csv")
    assert frame["id"].dtype == "Int64"
    assert frame["id"].dropna().tolist() == [90071992547409931, 90071992547409933]


@pytest.mark.parametrize("cells", ["007\n7\n", "07\nx\n", "1e3\n2\n"])
def test_texts_keep_their_spelling(tmp_path: Path, cells: str) -> None:
    (tmp_path / "t.csv").write_text("id,a\n" + "".join(f"{c},1\n" for c in cells.split()))
    frame = read_frame(tmp_path / "t.csv", where="table", wanted=Wanted(as_text=["id"]))
    assert frame["id"].tolist() == cells.split()


def test_a_word_in_a_late_piece_makes_a_column_of_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are joined as if the file had been read whole: "007" is not turned into 7 first."""
    monkeypatch.setattr("securevfl.data.sources.read._CELLS_OF_A_PIECE", 1)
    lines = ["007,,1,x", *("8,,2.5,y" for _ in range(1500)), "x,,3,z"]
    (tmp_path / "t.csv").write_text("code,none,b,c\n" + "\n".join(lines) + "\n")
    frame, _ = read(tmp_path / "t.csv")
    assert frame["code"].tolist() == ["007"] + ["8"] * 1500 + ["x"]
    assert frame["b"].tolist() == [1.0] + [2.5] * 1500 + [3.0]
    assert frame["none"].isna().all()


def test_only_what_is_needed_is_kept(tmp_path: Path) -> None:
    """What is excluded may hold anything, and features take half of float64's memory."""
    path = tmp_path / "t.csv"
    path.write_text('id,a,note,y\n1,0.5,"1,234",1.5\n2,0.25,"5,678",2.5\n')
    roles = ColumnRoles(key=["id"], label="y", task="regression", exclude=["note"])
    table = read_table(path, roles, name="bank")
    assert table.feature_names == ("a",)
    frame = read_frame(path, where="t", wanted=Wanted(columns=["id", "a"], exact=["id"]))
    assert frame.dtypes.astype(str).to_dict() == {"id": "int64", "a": "float32"}
    with pytest.raises(DataError, match="has no column 'nte'; did you mean 'note'"):
        read_table(path, ColumnRoles(key=["id"], task="regression", exclude=["nte"]), name="bank")


@pytest.mark.parametrize("mark", [";", ",", "\t", "~"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_first_line_states_the_separator(tmp_path: Path, mark: str, end: str) -> None:
    """As spreadsheets write it and read it; no row and no name is lost."""
    path = tmp_path / "t.csv"
    path.write_bytes(f"sep={mark}\n{text(mark)}".replace("\n", end).encode("utf-8-sig"))
    frame, noticed = read(path, "lon")
    assert tuple(frame.columns) == NAMES
    assert frame.lon.tolist() == [1.5, 1.25]
    assert noticed == []


@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize(
    "title", ["Export of May", "Export, May", "# a;b", '"Export, May"', "\nMay"]
)
@pytest.mark.parametrize("needed", [(), ("who",)])
def test_lines_before_the_header_are_named(
    tmp_path: Path, separator: str, title: str, needed: tuple[str, ...]
) -> None:
    """With what to write, which then reads the table."""
    path = tmp_path / "t.csv"
    path.write_text(f"{title}\n{text(separator)}")
    lines = 1 + title.count("\n")
    said = refusal(path, *needed)
    assert f"line {lines}, " in said
    assert f"write reading = {{ skip_lines = {lines} }}" in said
    frame, _ = read(path, *needed, skip_lines=lines)
    assert tuple(frame.columns) == NAMES
    assert frame.area.tolist() == [70, 80]


def test_a_line_counts_from_the_top_of_the_file(tmp_path: Path) -> None:
    """Lines that are skipped count too, as an editor counts them."""
    path = tmp_path / "t.csv"
    path.write_text(f"title\n\n{text()}1,2,a,b\n1,2,a\n1,2,a\n")
    assert "line 6 has 4 cells instead of 3" in refusal(path, skip_lines=2)
    assert "leaves nothing of the file's" in refusal(path, skip_lines=40)


def test_a_header_may_be_longer_than_the_sample(tmp_path: Path) -> None:
    """A cut header would lack names, and the rows seem too long."""
    names = [f"a column with {'a rather long name ' * 10}{number}" for number in range(1500)]
    path = tmp_path / "t.csv"
    row = ",".join(["1"] * len(names))
    path.write_text(",".join(names) + f"\n{row}\n{row}\n")
    assert path.stat().st_size > 1 << 18
    frame, _ = read(path)
    assert list(frame.columns) == names


def test_a_header_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not called one with too few names."""
    monkeypatch.setattr("securevfl.data.sources.dialects._LONGEST_HEAD", 1 << 18)
    (tmp_path / "t.csv").write_text("a," * (1 << 18))
    assert "its first 3 lines are longer than 0 MiB" in refusal(tmp_path / "t.csv")


def test_a_declared_word_is_no_empty_cell(tmp_path: Path) -> None:
    """In its own column alone; elsewhere the word still stands for no value."""
    path = tmp_path / "t.csv"
    path.write_text("id,plan,tier,fee\n1,None,None,NA\n2,Gold,Gold,5\n3,,NA,6\n4,NA,Gold,7\n")
    plan = {"plan": ["None", "Gold"]}
    frame = read_frame(path, where="table", wanted=Wanted(words=plan))
    assert frame.plan.fillna("-").tolist() == ["None", "Gold", "-", "-"]
    assert frame.tier.fillna("-").tolist() == ["-", "Gold", "-", "Gold"]
    assert frame.fee.fillna(0).tolist() == [0, 5, 6, 7]

    settings = ColumnSettings(categories=plan, missing_columns=["plan"])
    table = read_table(path, ColumnRoles(key=["id"], task="binary"), settings, name="bank")
    assert table.schema is not None
    again = read_new_rows(path, table.schema, name="bank")
    place = table.feature_names.index("plan=None")
    assert table.features[:, place].tolist() == [1, 0, 0, 0]
    assert np.array_equal(again.features, table.features)


def test_a_class_of_training_is_no_empty_label(tmp_path: Path) -> None:
    """A model that knows the class None, from a source with types, reads it in a text file too."""
    rows = {"id": [1.5, 2.5, 3.5, 4.5], "x": [1, 2, 3, 4], "risk": ["None", "low", "low", "low"]}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    roles = ColumnRoles(key=["id"], label="risk", task="multiclass")
    known = read_table(tmp_path / "t.parquet", roles, name="bank")
    assert known.schema is not None
    (tmp_path / "new.csv").write_text("id,x,risk\n1.5,1,None\n2.5,2,\n")
    new = read_new_rows(tmp_path / "new.csv", known.schema, name="bank")
    assert new.labelled is not None
    assert new.labelled.tolist() == [True, False]
    assert known.classes is not None
    assert new.labels is not None
    assert known.classes[int(new.labels[0])] == "None"


def test_a_regression_label_of_new_rows_is_a_number_as_before(tmp_path: Path) -> None:
    """It has no classes that cells could be words of, so marks between thousands are read."""
    path, reading = tmp_path / "t.csv", Reading(thousands=".", decimal=",")
    path.write_text("id;x;price\n1;2;1.200\n2;3;1.300\n3;5;900\n")
    roles = ColumnRoles(key=["id"], label="price", task="regression")
    known = read_table(path, roles, name="bank", reading=reading)
    assert known.schema is not None
    new = read_new_rows(path, known.schema, name="bank", reading=reading)
    assert new.labels is not None
    assert new.labels.tolist() == [1200, 1300, 900]


def test_words_that_count_as_empty_are_named(tmp_path: Path) -> None:
    """Where the others are words, this one may be one too: in features, labels and keys alike."""
    path = tmp_path / "t.csv"
    path.write_text("id,plan,fee,day,tier\n1,None,NA,NA,NULL\n2,Gold,5,2024-01-01,a\n")
    frame, _ = read(path)
    assert frame.attrs[LOST] == {"words": {"plan": "None", "tier": "NULL"}}
    frame, _ = read(path, empty=("",))
    assert frame.attrs[LOST] == {"words": {}}
    assert frame.plan.tolist() == ["None", "Gold"]


def test_dates_of_a_named_form_are_read(tmp_path: Path) -> None:
    """As those in ISO form are, gaps and keys too; a cell of another form is named."""
    path = tmp_path / "t.csv"
    path.write_text("id,day,who\n1,31.12.2020,a\n2,,b\n3,1.2.2021,1.2.2021\n", encoding="utf-8")
    frame, _ = read(path, dates="%d.%m.%Y")
    assert frame["day"].fillna("").tolist() == ["2020-12-31", "", "2021-02-01"]
    assert frame["who"].tolist() == ["a", "b", "1.2.2021"]
    key = read_frame(
        path,
        where="table",
        reading=Reading(dates="%d.%m.%Y"),
        wanted=Wanted(columns=["day"], as_text=["day"]),
    )
    assert key["day"].dropna().tolist() == ["2020-12-31", "2021-02-01"]

    path.write_text("id,day\n1,31.12.2020\n2,31.02.2020\n3,1.2.2021\n", encoding="utf-8")
    said = refusal(path, dates="%d.%m.%Y")
    assert "column 'day', row 2: '31.02.2020' is no date of the form '%d.%m.%Y'" in said
    assert "say in which form" not in said


@pytest.mark.parametrize("form", ["%d.%m", "%y%m%d", "%d.%m.%y", "%H:%M", "day", "%"])
def test_a_form_that_tells_no_day_is_refused(form: str) -> None:
    with pytest.raises(ConfigError, match="dates: must name the day, the month"):
        Reading(dates=form)


def test_quotes_behind_blanks_are_quotes(tmp_path: Path) -> None:
    """As some programs write them; a comma within is a part of the cell."""
    path = tmp_path / "t.csv"
    path.write_text('"id", "plan", "bills"\n"1", "gold, new", "3"\n"2",   "basic", "4"\n')
    frame, _ = read(path, "id")
    assert frame.columns.tolist() == ["id", "plan", "bills"]
    assert frame["plan"].tolist() == ["gold, new", "basic"]
    assert frame["bills"].tolist() == [3, 4]


def test_quotes_within_a_cell_change_no_blanks(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('id,plan,note\n1, gold,"said, ""yes"""\n2, basic,no\n')
    frame, _ = read(path, "id")
    assert frame["plan"].tolist() == [" gold", " basic"]
