"""Numbers with the sign of their unit: read as such where a column has one, else asked about."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.new_rows import read_new_rows

from securevfl.core.errors import DataError
from securevfl.data.column_kinds import infer
from securevfl.data.frames import from_frame
from securevfl.data.party_tables import ColumnRoles, read_table
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema
from securevfl.data.sources.settings import Reading
from securevfl.data.tables import PartyTable


def table_of(
    folder: Path,
    cells: list[str],
    *,
    separator: str = ",",
    schema: TableSchema | None = None,
    columns: ColumnSettings | None = None,
    **more: Any,
) -> PartyTable:
    lines = [f"id{separator}a{separator}rate"]
    lines += [f"{row}{separator}{row % 3}{separator}{cell}" for row, cell in enumerate(cells)]
    path = folder / "t.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if schema is not None:
        return read_new_rows(path, schema, name="tel", **more)
    roles = ColumnRoles(key=["id"], task="binary")
    return read_table(path, roles, columns or ColumnSettings(), name="tel", **more)


def rates(table: PartyTable) -> list[float]:
    return table.features[:, table.feature_names.index("rate")].tolist()


@pytest.mark.parametrize(
    ("cells", "numbers", "separator"),
    [
        (["5%", "-12.5%", "100 %"], [0.05, -0.125, 1.0], ","),
        (["5 %", "12,5 %", "\u22127,25%"], [0.05, 0.125, -0.0725], ";"),
        (["$12", "-$0.5", "$ -3"], [12, -0.5, -3], ","),
        (["12\u00a0€", "0,5 €", "-3€"], [12, 0.5, -3], ";"),
        (["£0.0000001", "£12345678", "£1"], [1e-7, 12345678, 1], ","),
    ],
)
def test_a_column_with_one_sign_is_numbers(
    tmp_path: Path, cells: list[str], numbers: list[float], separator: str
) -> None:
    """Percentages are hundredths; a gap stays one; a promise needs the bounds of the numbers."""
    table = table_of(tmp_path, [*cells, ""], separator=separator)
    assert rates(table)[:3] == np.array(numbers, dtype=np.float32).tolist()
    assert table.features[:, table.feature_names.index("rate is missing")].tolist() == [0, 0, 0, 1]


def test_marks_between_thousands_are_asked_about_and_read(tmp_path: Path) -> None:
    cells = ["€ 1.200,00", "€ 2.300.400,5", "€ 7"]
    with pytest.raises(DataError, match="has marks between thousands; write reading"):
        table_of(tmp_path, cells, separator=";")
    table = table_of(tmp_path, cells, separator=";", reading=Reading(decimal=",", thousands="."))
    assert rates(table) == [1200, 2300400.5, 7]


def test_another_table_is_written_alike_or_refused(tmp_path: Path) -> None:
    """5 after 5% would be a hundred times as much, and $ is not €."""
    known = table_of(tmp_path, ["5%", "6%", "7%"]).schema
    assert known is not None
    known = TableSchema.from_json(json.loads(json.dumps(known.as_json())))
    assert rates(table_of(tmp_path, ["7 %", "5.0%"], schema=known)) == pytest.approx([0.07, 0.05])
    for cells in (["5", "6"], ["0.05", "0.06"], ["$5", "$6"], ["5%", "6"]):
        with pytest.raises(DataError, match="must be a number with the sign '%'"):
            table_of(tmp_path, cells, schema=known)
    plain = table_of(tmp_path, ["5", "6", "7"]).schema
    with pytest.raises(DataError, match="row 1: must be a number, got '5%'"):
        table_of(tmp_path, ["5%", "6%"], schema=plain)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["5%", "6%", "7"], "holds numbers with the sign '%', but row 3 holds '7'"),
        (["5%", "6%", "none yet"], "holds numbers with the sign '%', but row 3 holds 'none yet'"),
        (["$5", "$6", "€7"], "holds numbers with the sign '$', but row 3 holds '€7'"),
        (["(1200.00)", "13", "14"], "holds numbers in brackets, as in row 1"),
        (["$(1200.00)", "$13", "$14"], "holds numbers in brackets, as in row 1"),
        (["12,5%", "13,5%", "7%"], "but row 1 holds '12,5%'"),
    ],
)
def test_several_forms_are_asked_about(cells: list[str], message: str) -> None:
    """In one line, whatever the source."""
    found = infer(pd.Series(cells))
    assert found.problem is not None
    assert message in found.problem


@pytest.mark.parametrize("cells", [["A1", "A2"], ["%", "$"], ["5% off", "free"], ["10mg", "20mg"]])
def test_other_words_stay_words(cells: list[str]) -> None:
    assert infer(pd.Series(cells)).kind == "words"


def test_declared_words_stay_words(tmp_path: Path) -> None:
    declared = ColumnSettings(categories={"rate": ["5%", "12,5 %"]})
    table = table_of(tmp_path, ["5%", "12,5 %"], separator=";", columns=declared)
    assert table.feature_names[-2:] == ("rate=5%", "rate=12,5 %")
    assert table.features[:, -2:].tolist() == [[1, 0], [0, 1]]


def test_a_label_with_a_sign_is_asked_about(tmp_path: Path) -> None:
    """As predictions come in the label's own unit; not sent to another task."""
    path = tmp_path / "t.csv"
    path.write_text("id,a,y\n1,2,5%\n2,3,6%\n3,4,7%\n")
    with pytest.raises(DataError, match="label 'y', row 1: is '5%', a number with a sign; write"):
        read_table(path, ColumnRoles(key=["id"], label="y", task="regression"), name="bank")
    with pytest.raises(DataError, match="a number with a sign; write labels as numbers"):
        from_frame(pd.read_csv(path), name="bank", key=["id"], label="y")


def test_numbers_with_a_unit_are_words_that_a_line_names(tmp_path: Path) -> None:
    """10mg and 20mg may be words; their order is lost, so somebody should know."""
    table = table_of(tmp_path, ["10mg", "20 mg", "2.5mg"])
    assert table.feature_names[-3:] == ("rate=10mg", "rate=2.5mg", "rate=20 mg")
    assert [note.split(",")[0] for note in table.notes] == [
        "column 'rate' holds numbers with the unit 'mg'"
    ]
    for words in (["1st", "2nd"], ["A1", "A2"], ["10mg", "5 ml"]):
        assert table_of(tmp_path, words).notes == ()
    declared = ColumnSettings(categories={"rate": ["10mg", "20mg"]})
    assert table_of(tmp_path, ["10mg", "20mg"], columns=declared).notes == ()
    many = infer(pd.Series([f"{number} kg" for number in range(100)]))
    assert many.problem is not None
    assert many.problem.startswith("holds numbers with the unit 'kg'; write the numbers alone")
