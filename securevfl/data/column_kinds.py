"""The kind of a column: numbers, truth values, words, dates, or nothing that a model can use."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from pandas.api import types

from securevfl.data import cells
from securevfl.data.scaling import MAX_CATEGORIES

Kind = Literal["number", "boolean", "words", "date"]
_FLOAT32_WHOLE: Final = 2**24
_OTHER_DATES: Final = r"\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})( .*)?"
_LEADING_ZERO: Final = r"\s*[+-]?0\d.*"
_FEWEST: Final = 20
_NUMBER: Final = int | float | Decimal | np.number

# What pandas, R and Arrow call a stored index that has no name, and what the first column of a text
# file is called whose header is empty.
_ROW_NUMBER: Final = re.compile(r"|unnamed-1|Unnamed: 0(\.\d+)?|\.\.\.1|__index_level_\d+__")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnKind:
    """Kind of a column, and the reason."""

    kind: Kind | None
    """None: nothing that a model can use."""

    reason: str
    """Reason in a few words; without any value of the column."""

    rows: int
    """Cells, missing ones included."""

    missing: int
    """Missing cells."""

    different: int
    """Different values, missing not counted."""

    identifier: str | None = None
    """Why it looks like a name or number of its row rather than something to learn from."""

    problem: str | None = None
    """Why it can't be a feature as it is, and what to do; to be put behind the column's name."""

    sign: str = ""
    """Sign of a column of texts that are numbers with one sign, such as ``%`` or ``€``."""

    timed: bool = False
    """True if any date has a time of day."""


def is_row_number(name: str) -> bool:
    """Return whether a column is a stored index without a name, judged by its name.

    Such a column is no feature unless its owner names it: in a table that is sorted by its label it
    would be the label. The name alone decides, and no record.
    """
    return _ROW_NUMBER.fullmatch(name) is not None


def numbers_rows(values: "pd.Series[Any]") -> str | None:
    """Return why a column of numbers looks like a row number, or None if it does not."""
    numbers = cells.numbers_of(values)
    present = numbers[~np.isnan(numbers)]
    whole = len(present) > 0 and not (present % 1).any()
    return _numbering_reason(np.unique(present), len(present)) if whole else None


def infer(values: "pd.Series[Any]", *, max_categories: int = MAX_CATEGORIES) -> ColumnKind:
    """Return the kind of a column.

    Args:
        values: The column, of any type.
        max_categories: Up to so many different words are never an identifier.
    """
    present = values.dropna()
    if not len(present):
        return _unusable(values, "empty", "is empty in every row; exclude it")
    if isinstance(values.dtype, pd.CategoricalDtype):
        held = present.astype(object)
        if types.infer_dtype(held) != "string":
            return _words(values, "a categorical column", max_categories)
        return _of_texts(values, max_categories)
    if types.is_bool_dtype(values):
        return _column_kind(values, "boolean", f"true and false ({values.dtype})", different=2)
    if values.dtype.kind == "c":
        return _unusable(values, "complex numbers", "holds complex numbers; exclude it")
    if values.dtype.kind == "m" or types.is_numeric_dtype(values):
        return _number(values, f"numbers ({values.dtype})")
    if values.dtype.kind == "M":
        return _date(values, f"dates ({values.dtype})")
    return _of_objects(values, present.astype(object), max_categories)


def _of_objects(
    values: "pd.Series[Any]", present: "pd.Series[Any]", max_categories: int
) -> ColumnKind:
    held = types.infer_dtype(present)
    if held == "boolean":
        return _column_kind(values, "boolean", "true and false", different=2)
    if held in ("integer", "floating", "mixed-integer-float", "decimal", "timedelta"):
        return _number(values, "numbers")
    if held in ("date", "datetime", "datetime64") or all(isinstance(c, date) for c in present):
        return _date(values, "dates")
    if held in ("string", "mixed-integer", "mixed"):
        strange = [cell for cell in present if not isinstance(cell, str | _NUMBER)]
        if not strange:
            numeric = all(isinstance(cell, _NUMBER) for cell in present)
            return _number(values, "numbers") if numeric else _of_texts(values, max_categories)
        held = type(strange[0]).__name__
    row = cells.first_row(values.notna().to_numpy(dtype=bool))
    return _unusable(
        values,
        f"{held} values",
        f"holds {held} values, as in row {row}; turn them into numbers or words, or exclude it",
    )


def _of_texts(values: "pd.Series[Any]", max_categories: int) -> ColumnKind:
    places, different = cells.texts_of(values)
    texts = pd.Series(different, dtype=object)
    lower = set(texts.str.strip().str.casefold())
    if lower <= {"true", "false"} or lower <= {"yes", "no"}:
        names = " and ".join(word for word in cells.TRUTH_WORDS if word in lower)
        return _column_kind(values, "boolean", f"texts {names}", different=len(lower))
    dated = ~np.isnat(cells.dates_of(texts))
    if dated.all():
        return _date(values, "texts that are dates")
    if dated.mean() > 0.5:
        return _two_kinds(values, "dates", cells.first_row(~np.append(dated, True)[places]))
    if texts.str.fullmatch(_OTHER_DATES).mean() > 0.5:
        return _unusable(
            values,
            "dates in a form that depends on the country",
            'looks like dates; say in which form, as in reading = { dates = "%d.%m.%Y" }, or write '
            "them as 2020-12-31, or exclude it",
        )
    if (signed := _of_signed(values, places, different)) is not None:
        return signed
    readable = ~np.isnan(cells.numbers_of(texts))
    if not texts.str.fullmatch(_LEADING_ZERO).any():
        if readable.all():
            return _number(values, "texts that are numbers")
        if readable.mean() > 0.5:
            return _two_kinds(
                values, "numbers", cells.first_row(~np.append(readable, True)[places])
            )
    return _words(values, "texts", max_categories)


def _of_signed(
    values: "pd.Series[Any]", places: np.ndarray, different: list[str]
) -> ColumnKind | None:
    """Return the kind of a column of numbers with a sign, or None for other columns."""
    signs = Counter(sign for _, sign in map(cells.split_unit_sign, different) if sign)
    bracketed = np.array([*map(cells.is_bracketed, different), False])
    numbers = bracketed[:-1] | np.array([*map(cells.is_number, different)])
    if numbers.mean() <= 0.5 or not (signs or bracketed.any()):
        return None
    if bracketed.any():
        row = cells.first_row(bracketed[places])
        return _unusable(
            values,
            "numbers in brackets",
            f"holds numbers in brackets, as in row {row}; write those below zero with a minus, or "
            f"list the column's words in categories",
        )
    sign = signs.most_common(1)[0][0]
    amounts = cells.amounts_of(values, sign)
    unread = np.isnan(amounts) & values.notna().to_numpy(dtype=bool)
    if unread.any():
        return _two_kinds(values, f"numbers with the sign {sign!r}", cells.first_row(unread))
    return replace(
        _number(pd.Series(amounts), f"texts that are numbers with the sign {sign!r}"), sign=sign
    )


def _two_kinds(values: "pd.Series[Any]", most: str, row: int) -> ColumnKind:
    return _unusable(
        values,
        f"{most} and other texts",
        f"holds {most}, but row {row} holds {str(values.iloc[row - 1])[:40]!r}; correct or empty "
        f"that cell, or list the column's words in categories",
    )


def _words(values: "pd.Series[Any]", reason: str, max_categories: int) -> ColumnKind:
    words, present = cells.texts_of(values)[1], int(values.notna().sum())
    different = len(words)
    if present >= _FEWEST and different > max_categories and different > present / 2:
        if (unit := cells.unit_of(words)) is not None:
            return _unusable(
                values,
                "numbers with a unit",
                f"holds numbers with the unit {unit!r}; write the numbers alone, or list its words "
                f"in categories",
            )
        looks = f"{different} different words in {present} rows"
        return _column_kind(
            values,
            "words",
            reason,
            different=different,
            identifier=looks,
            problem=f"holds {looks}, which looks like an identifier or free text; exclude it, use "
            f"it as a key, or list its words in categories",
        )
    return _column_kind(values, "words", reason, different=different)


def _number(values: "pd.Series[Any]", reason: str) -> ColumnKind:
    numbers = cells.numbers_of(values)
    present = numbers[~np.isnan(numbers)]
    different = np.unique(present)
    identifier = problem = None
    infinite = np.isinf(numbers)
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if infinite.any():
        row = cells.first_row(infinite)
        problem = f"holds an infinite value in row {row}; correct or empty that cell"
    elif too_large.any():
        problem = f"row {cells.first_row(too_large)} is too large for float32; change its unit"
    elif len(different):
        identifier = _numbering_reason(different, len(present))
        problem = _indistinct(different, len(present))
        if problem is not None and len(different) == len(present):
            identifier = f"all {len(present)} values differ"
    return _column_kind(
        values,
        "number",
        reason,
        missing=len(values) - len(present),
        different=len(different),
        identifier=identifier,
        problem=problem,
    )


def _numbering_reason(different: np.ndarray, rows: int) -> str | None:
    """Return why whole numbers look assigned, as they never repeat, or None if they do not.

    Of n numbers drawn evenly from a span, all differ with a probability of about
    exp(-n^2 / (2 span)); identifiers are what leaves less than 5 % to chance.
    """
    span = different[-1] - different[0] + 1
    if rows < _FEWEST or len(different) < rows or (different % 1 != 0).any():
        return None
    return f"all {rows} values differ" if rows**2 >= 6 * span else None


def _indistinct(different: np.ndarray, rows: int) -> str | None:
    """Return the problem if float32, the type of features, merges most of these numbers."""
    if len(different) < 2 or np.abs(different[[0, -1]]).max() < _FLOAT32_WHOLE:
        return None
    left = len(np.unique(different.astype(np.float32)))
    if left > len(different) / 2:
        return None
    what = f"holds {len(different)} different numbers, of which float32 distinguishes {left}"
    if len(different) > rows / 2:
        return f"{what}, so it looks like an identifier; exclude it, or use it as a key"
    return f"{what}; subtract what they have in common, or exclude it"


def _date(values: "pd.Series[Any]", reason: str) -> ColumnKind:
    dates = cells.dates_of(values)
    timed = dates[~np.isnat(dates)]
    return _column_kind(
        values,
        "date",
        reason,
        missing=len(dates) - len(timed),
        different=len(np.unique(timed)),
        timed=bool((timed != timed.astype("datetime64[D]")).any()),
    )


def _column_kind(
    values: "pd.Series[Any]", kind: Kind | None, reason: str, **facts: Any
) -> ColumnKind:
    facts = {"missing": int(values.isna().sum()), **facts}
    return ColumnKind(kind=kind, reason=reason, rows=len(values), **facts)


def _unusable(values: "pd.Series[Any]", reason: str, problem: str) -> ColumnKind:
    return _column_kind(values, None, reason, different=0, problem=problem)
