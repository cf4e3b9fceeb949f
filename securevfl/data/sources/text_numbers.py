"""Numbers as texts write them: decimal commas, marks between thousands, a sign of their unit."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import Reading, reading_entry

_SPACES: Final = " \u00a0\u202f"

# A plain number, one with a decimal mark, and one with marks between its thousands.
_WHOLE: Final = re.compile(r"[+-]?\d+")
_DECIMAL: Final = re.compile(r"[+-]?\d*(?P<decimal>[.,])\d+(?:[eE][+-]?\d+)?")

_GROUPED: Final = re.compile(
    rf"[+-]?[1-9]\d{{0,2}}(?P<mark>[.,'_{_SPACES}])\d{{3}}(?:(?P=mark)\d{{3}})*"
    r"(?:(?!(?P=mark))(?P<decimal>[.,])\d+)?"
)
_TRIED_FIRST: Final = 100
_LONGEST: Final = 100

_CURRENCIES: Final = "".join(
    chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) == "Sc"
)

# Minus signs are hyphens, or the sign that typesetters use.
_SIGNED: Final = re.compile(
    rf"(?P<minus>[+\-\u2212]?)[{_SPACES}]*(?:"
    rf"(?P<before>[{_CURRENCIES}])[{_SPACES}]*(?P<amount>[+\-\u2212]?[\d.,].*)"
    rf"|(?P<number>[\d.,].*?)[{_SPACES}]*(?P<after>[%{_CURRENCIES}]))"
)
_WITH_UNIT: Final = re.compile(rf"(?P<number>[+-]?[\d.,]+)[{_SPACES}]?(?P<unit>[^\W\d_]{{1,10}})")
_BRACKETED: Final = re.compile(r"\((?P<number>[^()]+)\)")


def split_unit_sign(cell: str) -> tuple[str, str]:
    """Return a cell without the sign of its unit, and that sign; an empty one if it has none.

    Signs are ``%`` and those of currencies, one a cell: ``"-$ 12"`` is ``("-12", "$")``.
    """
    text = cell.strip()
    # Longer ones are no numbers, and would be tried at each of their blanks.
    match = _SIGNED.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return text, ""
    sign = match["before"] or match["after"]
    number = f"{match['minus']}{match['amount'] or match['number']}".replace("\u2212", "-")
    return (number, sign) if _is_plain(number) else (text, "")


def is_number(cell: str) -> bool:
    """Whether a cell is a number in some way of writing."""
    return _is_plain(split_unit_sign(cell)[0])


def unit_of(cells: Iterable[str]) -> str | None:
    """Return the unit that stands behind the number of every cell, such as ``kg``; None if none."""
    matches = [_WITH_UNIT.fullmatch(cell) for cell in cells]
    units = {
        match["unit"] if match is not None and _is_plain(match["number"]) else None
        for match in matches
    }
    return units.pop() if len(units) == 1 else None


def is_bracketed(cell: str) -> bool:
    """Whether a cell is a number in brackets, as accounts write what is below zero."""
    text, _ = split_unit_sign(cell)
    match = _BRACKETED.fullmatch(text.strip(f"{_CURRENCIES}{_SPACES}"))
    return match is not None and is_number(match["number"])


def _is_plain(text: str) -> bool:
    return any(form.fullmatch(text) for form in (_WHOLE, _DECIMAL, _GROUPED))


def has_decimal_comma(cells: Iterable[str]) -> bool:
    """Whether all cells are numbers, and one of them only with a decimal comma."""
    certain = False
    for cell, _ in map(split_unit_sign, cells):
        if _WHOLE.fullmatch(cell):
            continue
        match = _DECIMAL.fullmatch(cell)
        if match is None or match["decimal"] != ",":
            return False
        certain = certain or _GROUPED.fullmatch(cell) is None
    return certain


def read_numbers(values: "pd.Series[Any]", reading: Reading, *, where: str) -> "pd.Series[Any]":
    """Return a text column as numbers, where the reading says how to read all of its cells.

    Args:
        values: A column that could not be read as numbers; cells keep their spelling.
        reading: The decimal mark and the mark between thousands, as far as they are known.
        where: Name of the column in messages.

    Returns:
        The numbers, or such texts as ``"1200.5€"`` if all have one sign; or the column as it came,
        if it is no column of numbers.

    Raises:
        DataError: If all cells are numbers in some way of writing that the reading does not cover.
    """
    texts = values.dropna()
    if texts.empty or not all(map(is_number, texts.iloc[:_TRIED_FIRST])):
        return values
    if not all(map(is_number, texts)):
        return values
    parts = texts.map(split_unit_sign)
    signs = set(parts.str[1])
    if len(signs) > 1:
        return values  # what a column holds is said of it as a whole
    if signs != {""}:
        plain = parts.str[0].reindex(values.index).astype("str")
        mark = re.escape(reading.decimal or ".")
        form = re.compile(rf"[+-]?(?:\d+(?:{mark}\d+)?|{mark}\d+)")
        if not all(map(form.fullmatch, parts.str[0])):
            plain = read_numbers(plain, reading, where=where)
        return _with_sign(plain, signs.pop(), reading)
    stripped = texts.str.strip()
    if reading.thousands is not None:
        return _without_thousands(values, stripped, reading.thousands, reading, where=where)
    marked = [(row, cell) for row, cell in stripped.items() if not _WHOLE.fullmatch(cell)]
    if marked:
        raise DataError(f"{where}{_question(marked, reading)}")
    return values


def with_sign(number: float, sign: str) -> str:
    """Return a number's text with the sign of its unit, as it is read again to the last bit."""
    return f"{np.format_float_positional(number, trim='-')}{sign}"


def _with_sign(numbers: "pd.Series[Any]", sign: str, reading: Reading) -> "pd.Series[Any]":
    if numbers.dtype == "str":
        return numbers.str.replace(reading.decimal or ".", ".") + sign
    texts = [with_sign(float(number), sign) for number in numbers.dropna()]
    cells = pd.Series(None, index=numbers.index, dtype="str")
    cells[numbers.notna()] = texts
    return cells


def _without_thousands(
    values: "pd.Series[Any]",
    stripped: "pd.Series[Any]",
    thousands: str,
    reading: Reading,
    *,
    where: str,
) -> "pd.Series[Any]":
    marks = _SPACES if thousands == " " else thousands
    decimal = reading.decimal or "."
    form = re.compile(rf"[+-]?(?:\d{{1,3}}(?:[{marks}]\d{{3}})+|\d+)(?:{re.escape(decimal)}\d+)?")
    for row, cell in stripped.items():
        if not form.fullmatch(cell):
            raise DataError(
                f"{where}, row {row_text(row)}: {cell[:40]!r} is no number with the decimal mark "
                f"{decimal!r} and {thousands!r} between thousands"
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
        match = _GROUPED.fullmatch(text)
        if match is None or not (match["decimal"] or text.count(match["mark"]) > 1):
            continue
        mark = " " if match["mark"] in _SPACES else match["mark"]
        decimal = match["decimal"] or ("." if mark == "," else ",")
        ways = {"decimal": decimal} if mark in ".," or decimal == "," else {}
        return (
            f", row {row_text(place)}: {text[:40]!r} has marks between thousands; "
            f"write {reading_entry(**ways, thousands=mark)}"
        )
    for place, text in marked:
        if _GROUPED.fullmatch(text):
            continue
        if reading.decimal is None and "," in text:
            return (
                f", row {row_text(place)}: {text[:40]!r} has a decimal comma; "
                f"write {reading_entry(decimal=',')}"
            )
        return (
            f", row {row_text(place)}: {text[:40]!r} is no number with the decimal mark "
            f"{reading.decimal or '.'!r}; write all columns with one mark, or exclude this one"
        )
    match = _GROUPED.fullmatch(cell)
    assert match is not None
    mark = " " if match["mark"] in _SPACES else match["mark"]
    if mark == "," and reading.decimal is None:
        whole, fraction = cell.split(",")
        return (
            f", row {row_text(row)}: {cell[:40]!r} may be {whole}.{fraction} or {whole}{fraction}; "
            f"write {reading_entry(decimal=',')} for the first, "
            f"{reading_entry(decimal='.', thousands=',')} for the second"
        )
    ways = {} if reading.decimal is None else {"decimal": reading.decimal}
    return (
        f", row {row_text(row)}: {cell[:40]!r} may have a mark between thousands; "
        f"if so, write {reading_entry(**ways, thousands=mark)}"
    )


def row_text(row: Any) -> str:
    """Return a row's number for messages, counted from 1."""
    return f"{int(row) + 1:,}"
