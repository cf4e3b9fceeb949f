"""Columns of keys as linkage compares them, of labels, and of groups or times that rows follow.

Keys are numbers, days or texts, where values may be missing, and one value is never read as
another. A :class:`~securevfl.data.tables.PartyTable` has numeric keys without gaps, since models
may take keys as inputs; names and addresses are compared as they are, and are no inputs of a model.
Labels are float64 for regression and class numbers otherwise.
"""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64, Int64

from securevfl.core.conventions import Task
from securevfl.core.errors import DataError
from securevfl.data import doubts
from securevfl.data.cells import (
    TRUTH_WORDS,
    dates_of,
    days_since_epoch,
    first_row,
    numbers_of,
    refuse_rows,
    require_columns,
    split_unit_sign,
    texts_of,
    truths_of,
)
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import AS_IT_IS, Reading, Wanted
from securevfl.data.tables import KeyTable, Labels

LARGEST_WHOLE_NUMBER: Final = 2**53
"""From here on float64 does not hold every integer, and different keys could become equal."""


_WHOLE: Final = re.compile(r"-?[0-9]+\.0+")
_SHORTENED: Final = re.compile(r"-?[0-9](\.[0-9]+[eE]\+?|[eE]\+)[0-9]+")


def key_numbers(values: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, " rows"]:
    """Return a column of numbers, or of dates as days since 1970-01-01; NaN for missing.

    Args:
        values: One a row.
        where: Name of the column in messages.

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
    refuse_rows(np.isinf(numbers), where=where, why="is infinite")
    # Rounding has happened by now, so 2^53 itself may have been another number.
    refuse_rows(
        np.abs(numbers) >= LARGEST_WHOLE_NUMBER,
        where=where,
        why="is above 2^53, where float64 takes neighbouring whole numbers for equal; link ids by "
        'linkage.metric = "exact", or change the unit',
    )
    return numbers


def holds_dates(values: "pd.Series[Any]") -> bool:
    """Return whether a column holds dates and no number."""
    return bool(np.isnan(numbers_of(values)).all() and not np.isnat(dates_of(values)).all())


def key_texts(values: "pd.Series[Any]", *, where: str) -> np.ndarray:
    """Return a column of texts, None for missing, whole numbers in their shortest spelling.

    An integer is spelled alike in every type: 1234 as an integer, a decimal, a float (into
    which an empty cell turns a column of integers) or the text "1234.0" is "1234". Leading zeros
    stay. Days are spelled 2020-12-31. How a cell is spelled depends on that cell alone.

    Args:
        values: One a row.
        where: Name of the column in messages.

    Returns:
        Texts, shape (rows,), as objects.

    Raises:
        DataError: If a number has decimals, or may have lost digits: as a float, or in a
            spreadsheet that wrote 4.93E+15.
    """
    column = np.empty(len(values), dtype=object)
    cells = zip(values.astype(object), values.isna(), strict=True)
    for row, (value, missing) in enumerate(cells):
        column[row] = None if missing else _key_text(value, where=f"{where}, row {row + 1}")
    return column


def _key_text(value: Any, *, where: str) -> str:
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
            spelled as :func:`~securevfl.data.keys_and_labels.key_texts` says.
        truth: A column with the number of the true entity.
        reading: Settings of the file; the others are recognised.

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
    stopping, notes = doubts.ask(doubts.TableInUse(frame=frame, key=tuple(kinds)), where=where)
    if stopping:
        raise DataError(stopping[0])
    table = key_table_of_frame(frame, name=name, key=kinds, truth=truth, where=where)
    return replace(table, notes=notes)


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
    return KeyTable(name=name, columns=columns, entities=entities_of(frame, truth, where=where))


def entities_of(frame: pd.DataFrame, truth: str | None, *, where: str) -> np.ndarray | None:
    """Return the true entity of each row, int64 of shape (rows,); None without such a column.

    Raises:
        DataError: If the column is not there, or holds something else than whole numbers.
    """
    if truth is None:
        return None
    require_columns(frame, [truth], where=where)
    values = frame[truth]
    if not pd.api.types.is_integer_dtype(values) or values.isna().any():
        raise DataError(f"{where}: truth {truth!r}: must be whole numbers without gaps")
    return values.to_numpy(dtype=np.int64)


def encode_labels(
    values: "pd.Series[Any]", *, task: Task, where: str, positive: Any = None, rarer: bool = False
) -> tuple[Labels, tuple[Any, ...] | None]:
    """Check a label column against the task and encode it.

    Args:
        values: One label a row: numbers, booleans or words.
        task: ``"regression"``, ``"binary"`` or ``"multiclass"``.
        where: Name of the column in messages, for example ``"table a.csv: label 'price'"``.
        positive: Of a binary task, the label of class 1; None takes the one that sorts last.
        rarer: Take :func:`rarer_class` in place of the one that sorts last, if there is one.

    Returns:
        The labels, and the original value of each class number, in sorted order where no class
        is said to be the positive one (None for regression).

    Raises:
        DataError: If a label is missing or infinite, the column is constant, not numeric for
            regression, does not have two values for binary, or does not look like a class; or if
            ``positive`` is neither of the two.
    """
    missing = values.isna().to_numpy(dtype=bool)
    why = f"is missing; drop the row ({missing.sum()} in all)"
    refuse_rows(missing, where=where, why=why)
    if task == "regression":
        labels = _numbers(values, where=where)
        if labels.min() == labels.max():
            raise DataError(f"{where}: is constant ({labels[0]}); there is nothing to learn")
        return labels, None
    if rarer and positive is None and task == "binary":
        positive = rarer_class(values)
    return _classes(values, task=task, where=where, positive=positive)


def rarer_class(values: "pd.Series[Any]") -> str | None:
    """Return the rarer of two words; None of other labels, and of truth values, 1 and 0."""
    places, texts = texts_of(values)
    counts = np.bincount(places[places >= 0], minlength=2)
    truths = {text.casefold() for text in texts} <= {*TRUTH_WORDS, "0", "1"}
    if len(texts) != 2 or truths or counts[0] == counts[1]:
        return None
    return texts[int(counts.argmin())]


def encode_known_labels(
    values: "pd.Series[Any]",
    *,
    classes: Sequence[Any] | None,
    where: str,
) -> tuple[Labels, Bool[np.ndarray, " rows"]] | None:
    """Encode the labels of new rows as those of the training rows were encoded.

    Args:
        values: One label a row, or none; of any type that spells the classes as they were spelled.
        classes: The original value of each class number; None for regression.
        where: Name of the column in messages.

    Returns:
        The labels, with zeros for missing ones, and which rows have a label; None without any.

    Raises:
        DataError: If a label is no number, or not among the classes.
    """
    there = values.notna().to_numpy(dtype=bool)
    if not there.any():
        return None
    if classes is None:
        labels = np.zeros(len(values), dtype=np.float64)
        labels[there] = _numbers(values[there], where=where)
        return labels, there
    number = {value: place for place, value in enumerate(_readings(pd.Series(classes), classes))}
    known = np.array([number.get(value, -1) for value in _readings(values, classes)])
    unknown = there & (known < 0)
    if unknown.any():
        row = first_row(unknown)
        shown = ", ".join(map(repr, classes[:10])) + (" ..." if len(classes) > 10 else "")
        raise DataError(
            f"{where}, row {row}: {str(values.iloc[row - 1])[:40]!r} is not among the classes that "
            f"the model was trained on: {shown}"
        )
    return np.where(there, known, 0).astype(np.int64), there


def _readings(values: "pd.Series[Any]", classes: Sequence[Any]) -> list[Any]:
    """Return labels in a form in which those of equal meaning are equal."""
    if all(isinstance(value, bool) for value in classes):
        return list(truths_of(values))
    if all(isinstance(value, int | float) for value in classes):
        return list(numbers_of(values))
    places, texts = texts_of(values)
    return [texts[place] if place >= 0 else None for place in places]


def _numbers(values: "pd.Series[Any]", *, where: str) -> Labels:
    numbers = numbers_of(values)
    unread = np.isnan(numbers)
    if pd.api.types.is_bool_dtype(values) or unread.any():
        row = first_row(unread)
        sample = values.iloc[row - 1]
        if split_unit_sign(str(sample))[1]:
            raise DataError(
                f"{where}, row {row}: is {str(sample)[:40]!r}, a number with a sign; write labels "
                f"as numbers without one, in the unit that predictions are to have"
            )
        raise DataError(
            f"{where}: must be numeric for regression, but holds values such as "
            f"{str(sample)[:40]!r}; use the task binary or multiclass for classes"
        )
    refuse_rows(np.isinf(numbers), where=where, why="is infinite")
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    refuse_rows(too_large, where=where, why="is too large for float32; change its unit")
    return numbers


def _classes(
    values: "pd.Series[Any]", *, task: Task, where: str, positive: Any
) -> tuple[Labels, tuple[Any, ...]]:
    originals = _originals(values, where=where)
    different = sorted(set(originals))
    if positive is not None and task == "binary" and len(different) == 2:
        (wanted,) = _readings(pd.Series([positive]), different)
        if wanted not in different:
            raise DataError(
                f"{where}: positive: is {positive!r}, and the label's values are "
                f"{different[0]!r} and {different[1]!r}; name one of them"
            )
        different.sort(key=lambda value: bool(value == wanted))
    number = {value: place for place, value in enumerate(different)}
    if len(different) == 1:
        raise DataError(f"{where}: is constant ({different[0]!r}); there is nothing to learn")
    if task == "binary" and len(different) != 2:
        shown = ", ".join(map(repr, different[:10])) + (" ..." if len(different) > 10 else "")
        raise DataError(
            f"{where}: the task binary needs two values, found {len(different)} ({shown}); "
            f"correct the others, or use the task multiclass"
        )
    if len(different) > 2 and len(different) > len(values) / 2:
        raise DataError(
            f"{where}: {len(different)} different values in {len(values)} rows are not classes; "
            f"use the task regression or another column"
        )
    labels = np.array([number[value] for value in originals], dtype=np.int64)
    return labels, tuple(different)


def _originals(values: "pd.Series[Any]", *, where: str) -> list[Any]:
    """Return class labels as truth values, whole numbers, numbers or texts: all of one type."""
    cells = values.astype(object).tolist()
    if all(isinstance(cell, bool | np.bool_) for cell in cells):
        return [bool(cell) for cell in cells]
    if not all(isinstance(cell, int | float | Decimal | np.number) for cell in cells):
        places, texts = texts_of(values)
        return [texts[place] for place in places]
    numbers = numbers_of(values)
    refuse_rows(np.isinf(numbers), where=where, why="is infinite")
    # An empty cell turns a column of whole numbers into one of floats.
    whole = bool((numbers % 1 == 0).all())
    return [int(cell) if whole else float(cell) for cell in cells]


def split_places(
    frame: pd.DataFrame, column: str, *, kind: Literal["group", "time"], where: str
) -> Int64[np.ndarray, " rows"]:
    """Return where each row stands among a column's groups or times.

    Args:
        frame: The primary's table.
        column: Groups as texts or whole numbers; or times, as numbers or dates in ISO form.
        kind: Whether the column holds groups or times.
        where: Name of the table in messages.

    Returns:
        Numbers of groups, or places in time: equal for equal times, ascending.

    Raises:
        DataError: If the column is not there, or a value is missing or none of its kind.
    """
    require_columns(frame, [column], where=where)
    where = f"{where}: training.split_column {column!r}"
    missing = frame[column].isna().to_numpy(dtype=bool)
    refuse_rows(
        missing,
        where=where,
        why="is missing, so the row belongs to no side of the split; fill it in or drop the row "
        f"({missing.sum()} in all)",
    )
    values = frame[column]
    if kind == "group":
        numbers = pd.api.types.is_numeric_dtype(values)
        places = pd.factorize(values if numbers else key_texts(values, where=where))[0]
    else:
        places = np.unique(_times(values, where=where), return_inverse=True)[1]
    return places.astype(np.int64)


def _times(values: "pd.Series[Any]", *, where: str) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(values):
        numbers = values.to_numpy()
        refuse_rows(np.isinf(numbers), where=where, why="is infinite")
        return numbers
    texts = values.astype(str)
    times = pd.to_datetime(texts, format="ISO8601", utc=True, errors="coerce")
    if times.isna().any():
        row = int(np.argmax(times.isna()))
        raise DataError(
            f"{where}, row {row + 1}: {texts.iloc[row][:40]!r} is neither a number nor a date in "
            f"ISO form, such as 2020-12-31"
        )
    return times.to_numpy()
