"""Cells of a column as numbers, dates, truth values or words, independent of their type.

A value is the same in any type: a CSV file's text, pandas' nullable and categorical types,
columns that Arrow stores, decimals, and Python's own objects. A cell that can't be read is
distinct from one that is missing. Texts write numbers with decimal commas, with marks between
thousands, and with a sign of their unit.
"""

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64
from pandas.api import types

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import WHOLE_DATES, Reading, reading_entry, require_names

_DAY_US: Final = 86_400_000_000
_ISO_DATE: Final = r"\d{4}-\d{2}-\d{2}([T ].*)?"
_ZONE: Final = re.compile(r"(Z|:\d{2}\s*[+-]\d{2}(:?\d{2})?|UTC)\s*$")

PERCENT: Final = "%"
"""The sign of hundredths."""

TRUTH_WORDS: Final[Mapping[str, bool]] = {"true": True, "false": False, "yes": True, "no": False}
"""Texts that stand for truth values, in lower case."""


def numbers_of(values: "pd.Series[Any]") -> Float64[np.ndarray, " rows"]:
    """Return numbers, with NaN for missing cells and for other cells.

    Texts that are numbers count as such, truth values as 0 and 1, durations as days.
    """
    if types.is_timedelta64_dtype(values) or values.dtype.kind == "m":
        values = values.astype(object)
    if values.dtype.kind == "c":
        return np.full(len(values), np.nan)
    if types.is_numeric_dtype(values):
        return values.to_numpy(dtype=np.float64, na_value=np.nan)
    cells = values.astype(object)
    present = cells.dropna()
    if len(present) and types.infer_dtype(present) == "timedelta":
        days = pd.to_timedelta(cells) / pd.Timedelta(days=1)
        return days.to_numpy(dtype=np.float64)
    try:
        numbers = pd.to_numeric(cells, errors="coerce")
    except OverflowError:  # integers beyond float64
        numbers = pd.to_numeric(cells.map(str, na_action="ignore"), errors="coerce")
    return numbers.to_numpy(dtype=np.float64, na_value=np.nan)


def amounts_of(values: "pd.Series[Any]", sign: str) -> Float64[np.ndarray, " rows"]:
    """Return the numbers that stand with a sign; NaN for missing and for other cells.

    A percentage is a hundredth of the number before its sign: 5% is 0.05. Without a sign, numbers
    are those of :func:`numbers_of`.
    """
    if not sign:
        return numbers_of(values)
    if types.is_numeric_dtype(values):
        return np.full(len(values), np.nan)
    places, texts = texts_of(values)
    parts = [split_unit_sign(text) for text in texts]
    amounts = [_float(text) if part_sign == sign else np.nan for text, part_sign in parts]
    return np.array([*amounts, np.nan])[places] / (100 if sign == PERCENT else 1)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def dates_of(values: "pd.Series[Any]") -> np.ndarray:
    """Return points in time as datetime64[us] in UTC, NaT for missing and for other cells.

    A time without a zone is taken as it stands. Texts are dates in ISO form alone
    (2020-12-31, with or without a time of day): 1/2/2020 is two days, by country.
    """
    if types.is_numeric_dtype(values):
        return np.full(len(values), "NaT", dtype="datetime64[us]")
    if types.is_datetime64_dtype(values):
        cells = values
    else:
        cells = values.astype(object)
        if types.infer_dtype(cells, skipna=True) not in ("date", "datetime", "datetime64"):
            return _dates_of_texts(cells)
    return _utc(pd.to_datetime(cells, utc=True, errors="coerce"))


def _dates_of_texts(cells: "pd.Series[Any]") -> np.ndarray:
    places, different = texts_of(cells)
    texts = pd.Series(different, dtype=object).str.strip()
    iso = texts.where(texts.str.fullmatch(_ISO_DATE).astype(bool), None)
    dates = _utc(pd.to_datetime(iso, utc=True, errors="coerce", format="ISO8601"))
    return np.append(dates, np.datetime64("NaT", "us"))[places]


def _utc(dates: "pd.Series[Any]") -> np.ndarray:
    return dates.dt.tz_localize(None).to_numpy().astype("datetime64[us]")


def share_with_zone(values: "pd.Series[Any]") -> float:
    """Return which share of the points in time of a column say their zone."""
    if values.dtype.kind == "M" or isinstance(values.dtype, pd.DatetimeTZDtype):
        return float(getattr(values.dt, "tz", None) is not None)
    present = values.dropna().astype(object)
    zoned = [
        (_ZONE.search(cell) if isinstance(cell, str) else getattr(cell, "tzinfo", None)) is not None
        for cell in present
    ]
    return sum(zoned) / max(1, len(zoned))


def days_of(dates: np.ndarray) -> Float64[np.ndarray, " rows"]:
    """Return days since 1970-01-01 of datetime64[us], with the part of the day that has gone by."""
    ticks = dates.astype(np.int64)
    days = ticks // _DAY_US + (ticks % _DAY_US) / _DAY_US
    return np.where(np.isnat(dates), np.nan, days)


def days_since_epoch(values: "pd.Series[Any]") -> Float64[np.ndarray, " rows"]:
    """Return a column of dates as days since 1970-01-01 (UTC), NaN for missing and for other cells.

    Two parties that hold the same day get the same number, however each stores it.
    """
    return days_of(dates_of(values))


def day_number(text: str) -> float:
    """Return the days since 1970-01-01 of one date in ISO form.

    Raises:
        DataError: If it is not a date.
    """
    days = float(days_since_epoch(pd.Series([text], dtype=object))[0])
    if np.isnan(days):
        raise DataError(f"must be a date in ISO form, such as 2020-12-31, got {text!r}")
    return days


def truths_of(values: "pd.Series[Any]") -> Float64[np.ndarray, " rows"]:
    """Return truth values as 0 and 1, with NaN for missing and for other cells.

    Texts count in any case: true, false, yes, no. So do the numbers 0 and 1.
    """
    if types.is_bool_dtype(values) or types.is_numeric_dtype(values):
        numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
        return np.where(np.isin(numbers, (0.0, 1.0)), numbers, np.nan)
    codes, texts = texts_of(values)
    known = [float(TRUTH_WORDS.get(text.strip().casefold(), np.nan)) for text in texts]
    return np.array([*known, np.nan])[codes]


def texts_of(values: "pd.Series[Any]") -> tuple[np.ndarray, list[str]]:
    """Return each cell's place among the different texts, -1 where it is missing, and these.

    Whole numbers are spelled without a point: an empty cell turns a column of integers into one
    of floats, and 3 would else become the other word 3.0. Blanks around a word, and its Unicode
    form, are no part of it.
    """
    cells = values.astype(object)
    try:
        codes, originals = pd.factorize(cells)
    except TypeError:  # lists and the like, which can't be compared
        codes, originals = pd.factorize(cells.map(str, na_action="ignore"))
    spelled = [word(value) for value in originals]
    places, texts = pd.factorize(np.array([*spelled, ""], dtype=object)[: len(spelled)])
    return np.where(codes < 0, -1, np.append(places, -1)[codes]), [str(text) for text in texts]


def word(value: Any) -> str:
    """Return one cell as a word: without blanks around it, in Unicode's composed form (NFC)."""
    whole = (
        isinstance(value, float | Decimal | np.floating)
        and math.isfinite(value)
        and value == value // 1
    )
    text = str(int(value)) if whole else str(value)
    text = unicodedata.normalize("NFC", text.strip() or text)
    # Half a surrogate pair is no text to JSON or to Arrow.
    return text if text.isprintable() else text.encode("utf-8", "backslashreplace").decode()


def is_text(values: "pd.Series[Any]") -> bool:
    """Return whether a column is of a type that may hold words."""
    return not (types.is_numeric_dtype(values) or values.dtype.kind in "mM")


def first_row(chosen: Bool[np.ndarray, " rows"]) -> int:
    """Return the number of the first chosen row, counted from 1."""
    return int(np.argmax(chosen)) + 1


def refuse_rows(wrong: Bool[np.ndarray, " rows"], *, where: str, why: str) -> None:
    """Refuse a table for the first of some rows, if there is any.

    Raises:
        DataError: Naming that row.
    """
    if wrong.any():
        raise DataError(f"{where}, row {first_row(wrong)}: {why}")


def require_columns(frame: pd.DataFrame, columns: Sequence[str], *, where: str) -> None:
    """Check that all columns are there.

    Raises:
        DataError: Naming the first that is not, the nearest name, and those that there are.
    """
    require_names([str(name) for name in frame.columns], columns, where=where)


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
_FEWEST_DATES: Final = 3

_CURRENCIES: Final = "".join(
    chr(code) for code in range(0x10000) if unicodedata.category(chr(code)) == "Sc"
)

# Minus signs are hyphens, or the sign that typesetters use.
_SIGNED: Final = re.compile(
    rf"(?P<minus>[+\-\u2212]?)[{_SPACES}]*(?:"
    rf"(?P<before>[{_CURRENCIES}])[{_SPACES}]*(?P<amount>[+\-\u2212]?[\d.,].*)"
    rf"|(?P<number>[\d.,].*?)[{_SPACES}]*(?P<after>[%{_CURRENCIES}]))"
)
_MONEY: Final = (
    "AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HKD|HUF|INR|JPY|KRW|MXN|NOK|NZD|PLN|RON|RUB|SEK|SGD|TRY|"
    "USD|ZAR|Rs|Fr|SFr|kr|US|Euro"
)
_WITH_UNIT: Final = re.compile(
    rf"(?P<before>(?:{_MONEY})\.?[{_CURRENCIES}]?)?[{_SPACES}]?(?P<number>[+-]?[\d.,'_{_SPACES}]*\d)"
    rf"(?(before)|[{_SPACES}]?(?P<unit>[^\W\d_]{{1,10}}(?:/[^\W\d_]{{1,10}})?[²³]?|°\w?|[{_CURRENCIES}]))"
)
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
    """Return the unit of the numbers that all cells are; None if they are no such.

    It stands behind the number, such as ``kg``, or is a currency's. Currencies may be several.
    """
    matches = [_WITH_UNIT.fullmatch(cell) for cell in cells]
    units = {
        match["before"] or match["unit"] if match and _is_plain(match["number"]) else None
        for match in matches
    }
    money = re.compile(rf"(?:{_MONEY})\.?[{_CURRENCIES}]?|[{_CURRENCIES}]")
    if None in units or (len(units) > 1 and not all(money.fullmatch(unit or "") for unit in units)):
        return None
    return " or ".join(sorted(unit for unit in units if unit)) or None


def is_bracketed(cell: str) -> bool:
    """Whether a cell is a number in brackets, as accounts write what is below zero."""
    text, _ = split_unit_sign(cell)
    match = _BRACKETED.fullmatch(text.strip(f"{_CURRENCIES}{_SPACES}"))
    return match is not None and is_number(match["number"])


def _is_plain(text: str) -> bool:
    return any(form.fullmatch(text) for form in (_WHOLE, _DECIMAL, _GROUPED))


def whole_date_form(numbers: Float64[np.ndarray, " rows"]) -> str | None:
    """Return the form of whole numbers that are all dates of 1900 to 2099; None for others."""
    present = np.unique(numbers[np.isfinite(numbers)])
    if len(present) < _FEWEST_DATES or (present % 1).any() or not present[0] > 1e5:
        return None
    for form, digits in WHOLE_DATES.items():
        if present[-1] >= 10**digits or (form == "%Y%m" and len(present) < 4 * _FEWEST_DATES):
            continue
        texts = pd.Series(present.astype(np.int64)).astype("str").str.zfill(digits)
        dates = pd.to_datetime(texts, format=form, errors="coerce")
        if dates.dt.year.between(1900, 2099).all() and texts.str.len().eq(digits).all():
            return form
    return None


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
