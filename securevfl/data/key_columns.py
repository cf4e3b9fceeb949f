"""Key columns as linkage compares them: numbers, days or texts, where values may be missing.

A :class:`~securevfl.data.tables.PartyTable` has numeric keys without gaps, since models may take
keys as inputs. Names and addresses are compared as they are, and are no inputs of a model.
"""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64

from securevfl.core.errors import DataError
from securevfl.data.cells import dates_of, days_since_epoch, first_row, numbers_of
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import AS_IT_IS, Reading, Wanted
from securevfl.data.tables import KeyTable

# Key columns as linkage compares them: numbers, days or texts, and never one value as another.

LARGEST_WHOLE_NUMBER: Final = 2**53
"""From here on float64 does not hold every integer, and different keys could become equal."""


_WHOLE: Final = re.compile(r"-?[0-9]+\.0+")
_SHORTENED: Final = re.compile(r"-?[0-9](\.[0-9]+[eE]\+?|[eE]\+)[0-9]+")


def key_numbers(values: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, " rows"]:
    """Return a column of numbers, or of dates as days since 1970-01-01; NaN for missing.

    Args:
        values: One a row.
        where: What messages call the column.

    Raises:
        DataError: If a value is neither number nor date, is infinite, or so large that its
            neighbours could be taken for it.
    """
    missing = values.isna().to_numpy(dtype=bool)
    numbers = days_since_epoch(values) if holds_dates(values) else numbers_of(values)
    unread = (np.isnan(numbers) & ~missing) | pd.api.types.is_bool_dtype(values)
    if unread.any():
        row = first_row(unread)
        raise DataError(
            f"{where}: must be numeric or dates, but row {row} holds "
            f'{str(values.iloc[row - 1])[:40]!r}; linkage.metric = "exact" compares texts'
        )
    if np.isinf(numbers).any():
        raise DataError(f"{where}, row {first_row(np.isinf(numbers))}: is infinite")
    # Rounding has happened by now, so 2^53 itself may have been another number.
    large = np.abs(numbers) >= LARGEST_WHOLE_NUMBER
    if large.any():
        raise DataError(
            f"{where}, row {first_row(large)}: is above 2^53, where float64 takes neighbouring "
            f'whole numbers for equal; link ids by linkage.metric = "exact", or change the unit'
        )
    return numbers


def holds_dates(values: "pd.Series[Any]") -> bool:
    """Say whether a column holds dates and no number."""
    return bool(np.isnan(numbers_of(values)).all() and not np.isnat(dates_of(values)).all())


def key_texts(values: "pd.Series[Any]", *, where: str) -> np.ndarray:
    """Return a column of texts, None for missing, whole numbers in their shortest spelling.

    An integer is spelled alike whatever type holds it: 1234 as an integer, a decimal, a float (into
    which an empty cell turns a column of integers) or the text "1234.0" is "1234". Leading zeros
    stay. Days are spelled 2020-12-31. How a cell is spelled depends on that cell alone.

    Args:
        values: One a row.
        where: What messages call the column.

    Returns:
        Texts, shape (rows,), as objects.

    Raises:
        DataError: If a number has decimals, or may have lost digits: as a float, or in a
            spreadsheet that wrote 4.93E+15.
    """
    column = np.empty(len(values), dtype=object)
    cells = zip(values.astype(object), values.isna(), strict=True)
    for row, (value, missing) in enumerate(cells):
        column[row] = None if missing else _spelled(value, where=f"{where}, row {row + 1}")
    return column


def _spelled(value: Any, *, where: str) -> str:
    if isinstance(value, str):
        text = value.strip()
        if _SHORTENED.fullmatch(text):
            raise DataError(
                f"{where}: is {text}, as spreadsheets write long numbers: digits of the id are "
                f"lost; write the column from its source as text"
            )
        return text.partition(".")[0] if _WHOLE.fullmatch(text) else value
    if isinstance(value, float | np.floating | Decimal):
        if not math.isfinite(value) or value % 1:
            raise DataError(
                f"{where}: is {value}, and a number with decimals has many spellings; keys that "
                f"are compared as texts must be whole numbers or texts"
            )
        if not isinstance(value, Decimal) and abs(float(value)) >= LARGEST_WHOLE_NUMBER:
            raise DataError(
                f"{where}: is a float above 2^53, which may have lost digits of an id; store the "
                f"column as integers or as text"
            )
        return str(int(value))
    if isinstance(value, datetime.datetime):
        midnight = value.time() == datetime.time() and value.tzinfo is None
        return value.date().isoformat() if midnight else value.isoformat(sep=" ")
    return str(value)


# Key columns of any kind, for linkage alone: texts and numbers, where values may be missing.

KeyKind = Literal["text", "number"]


def read_key_table(
    path: Path,
    *,
    name: str,
    key: Mapping[str, KeyKind] | Sequence[str],
    truth: str | None = None,
    reading: Reading = AS_IT_IS,
) -> KeyTable:
    """Read key columns, and nothing else, of a party's table.

    Args:
        path: The table's file, or a ``NAME.source.toml`` that says where it lies.
        name: The party's name, for messages.
        key: Key columns and their kinds; a plain list takes all of them as texts. Numbers read as
            text keep their spelling in a CSV file, a postcode "0123" stays one; elsewhere they are
            spelled as :func:`~securevfl.data.key_columns.key_texts` says.
        truth: A column with the number of the true entity.
        reading: How the file is written, as far as its user says.

    Raises:
        DataError: If the file cannot be read, a column is missing, the table is empty, or a key is
            not of its kind.
    """
    where = f"table {path} of {name!r}"
    kinds: dict[str, KeyKind] = (
        dict(key) if isinstance(key, Mapping) else dict.fromkeys(key, "text")
    )
    if not kinds:
        raise DataError(f"{where}: at least one key column must be named")
    texts = [column for column, kind in kinds.items() if kind == "text"]
    columns_read = [*kinds, *([truth] if truth is not None else [])]
    wanted = Wanted(columns=columns_read, needed=columns_read, as_text=texts)
    frame = read_frame(path, where=where, reading=reading, wanted=wanted)
    return key_table_of_frame(frame, name=name, key=kinds, truth=truth, where=where)


def key_table_of_frame(
    frame: pd.DataFrame,
    *,
    name: str,
    key: Mapping[str, KeyKind],
    truth: str | None,
    where: str,
) -> KeyTable:
    """Return the keys of a frame that was read; see :func:`read_key_table`.

    Raises:
        DataError: As :func:`read_key_table`.
    """
    if len(frame) == 0:
        raise DataError(f"{where}: has no rows")
    columns = {
        column: (key_texts if kind == "text" else key_numbers)(
            frame[column], where=f"{where}: key {column!r}"
        )
        for column, kind in key.items()
    }
    entities = None
    if truth is not None:
        if not pd.api.types.is_integer_dtype(frame[truth]) or frame[truth].isna().any():
            raise DataError(f"{where}: truth {truth!r}: must be whole numbers without gaps")
        entities = frame[truth].to_numpy(dtype=np.int64)
    return KeyTable(name=name, columns=columns, entities=entities)
