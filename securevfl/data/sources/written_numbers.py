"""Numbers as texts write them: decimal commas, and marks between thousands.

Nothing here decides between two readings of one cell: the user is asked in one line.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import Reading, written

_SPACES: Final = " \u00a0\u202f"
# A plain number, one with a decimal mark, and one with marks between its thousands.
_WHOLE: Final = re.compile(r"[+-]?\d+")
_DECIMAL: Final = re.compile(r"[+-]?\d*(?P<decimal>[.,])\d+(?:[eE][+-]?\d+)?")
_GROUPED: Final = re.compile(
    rf"[+-]?[1-9]\d{{0,2}}(?P<mark>[.,'_{_SPACES}])\d{{3}}(?:(?P=mark)\d{{3}})*"
    r"(?:(?!(?P=mark))(?P<decimal>[.,])\d+)?"
)
_TRIED_FIRST: Final = 100


def is_number(cell: str) -> bool:
    """Whether a cell is a number in some way of writing."""
    text = cell.strip()
    return any(form.fullmatch(text) for form in (_WHOLE, _DECIMAL, _GROUPED))


def has_decimal_comma(cells: Iterable[str]) -> bool:
    """Whether all cells are numbers, and one of them only with a decimal comma."""
    certain = False
    for cell in map(str.strip, cells):
        if _WHOLE.fullmatch(cell):
            continue
        found = _DECIMAL.fullmatch(cell)
        if found is None or found["decimal"] != ",":
            return False
        certain = certain or _GROUPED.fullmatch(cell) is None
    return certain


def read_numbers(values: "pd.Series[Any]", reading: Reading, *, where: str) -> "pd.Series[Any]":
    """Return a text column as numbers, where the reading says how to read all of its cells.

    Args:
        values: A column that could not be read as numbers; cells keep their spelling.
        reading: The decimal mark and the mark between thousands, as far as they are known.
        where: What messages call the column.

    Returns:
        The numbers; or the column as it came, if it is no column of numbers.

    Raises:
        DataError: If all cells are numbers in some way of writing that the reading does not cover.
    """
    texts = values.dropna()
    if texts.empty or not all(map(is_number, texts.iloc[:_TRIED_FIRST])):
        return values
    stripped = texts.str.strip()
    if not all(map(is_number, stripped)):
        return values
    if reading.thousands is not None:
        return _without_thousands(values, stripped, reading, where=where)
    marked = [(row, cell) for row, cell in stripped.items() if not _WHOLE.fullmatch(cell)]
    if marked:
        raise DataError(f"{where}{_question(marked, reading)}")
    return values


def _without_thousands(
    values: "pd.Series[Any]", stripped: "pd.Series[Any]", reading: Reading, *, where: str
) -> "pd.Series[Any]":
    assert reading.thousands is not None
    marks = _SPACES if reading.thousands == " " else reading.thousands
    decimal = reading.decimal or "."
    form = re.compile(rf"[+-]?(?:\d{{1,3}}(?:[{marks}]\d{{3}})+|\d+)(?:{re.escape(decimal)}\d+)?")
    for row, cell in stripped.items():
        if not form.fullmatch(cell):
            raise DataError(
                f"{where}, row {_count(row)}: {cell[:40]!r} is no number with the decimal mark "
                f"{decimal!r} and {reading.thousands!r} between thousands"
            )
    plain = stripped.str.replace(rf"[{marks}]", "", regex=True).str.replace(decimal, ".")
    numbers = pd.to_numeric(plain)
    if pd.api.types.is_integer_dtype(numbers) and len(numbers) < len(values):
        numbers = numbers.astype("Int64")
    return numbers.reindex(values.index)


def _question(marked: Sequence[tuple[Any, str]], reading: Reading) -> str:
    """Return what may be meant by cells that are no plain numbers, and what to write."""
    row, cell = marked[0]
    for place, text in marked:
        found = _GROUPED.fullmatch(text)
        if found is None or not (found["decimal"] or text.count(found["mark"]) > 1):
            continue
        mark = " " if found["mark"] in _SPACES else found["mark"]
        decimal = found["decimal"] or ("." if mark == "," else ",")
        ways = {"decimal": decimal} if mark in ".," or decimal == "," else {}
        return (
            f", row {_count(place)}: {text[:40]!r} has marks between thousands; "
            f"write {written(**ways, thousands=mark)}"
        )
    for place, text in marked:
        if _GROUPED.fullmatch(text):
            continue
        if reading.decimal is None and "," in text:
            return (
                f", row {_count(place)}: {text[:40]!r} has a decimal comma; "
                f"write {written(decimal=',')}"
            )
        return (
            f", row {_count(place)}: {text[:40]!r} is no number with the decimal mark "
            f"{reading.decimal or '.'!r}; write all columns with one mark, or exclude this one"
        )
    found = _GROUPED.fullmatch(cell)
    assert found is not None
    mark = " " if found["mark"] in _SPACES else found["mark"]
    if mark == "," and reading.decimal is None:
        whole, fraction = cell.split(",")
        return (
            f", row {_count(row)}: {cell[:40]!r} may be {whole}.{fraction} or {whole}{fraction}; "
            f"write {written(decimal=',')} for the first, "
            f"{written(decimal='.', thousands=',')} for the second"
        )
    ways = {} if reading.decimal is None else {"decimal": reading.decimal}
    return (
        f", row {_count(row)}: {cell[:40]!r} may have a mark between thousands; "
        f"if so, write {written(**ways, thousands=mark)}"
    )


def _count(row: Any) -> str:
    return f"{int(row) + 1:,}"
