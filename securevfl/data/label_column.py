"""A label column as the model needs it: float64 for regression, class numbers otherwise."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from securevfl.core.conventions import Task
from securevfl.core.errors import DataError
from securevfl.data.cells import first_row, numbers_of, texts_of, truths_of
from securevfl.data.sources.text_files import unsigned
from securevfl.data.tables import Labels


def encode_labels(
    values: "pd.Series[Any]", *, task: Task, where: str, positive: Any = None
) -> tuple[Labels, tuple[Any, ...] | None]:
    """Check a label column against the task and encode it.

    Args:
        values: One label a row: numbers, booleans or words.
        task: ``"regression"``, ``"binary"`` or ``"multiclass"``.
        where: What messages call the column, for example ``"table a.csv: label 'price'"``.
        positive: Of a binary task, the label of class 1; None takes the one that sorts last.

    Returns:
        The labels, and the original value of each class number, in sorted order where no class
        is said to be the positive one (None for regression).

    Raises:
        DataError: If a label is missing or infinite, the column is constant, not numeric for
            regression, does not have two values for binary, or looks like no class at all; or if
            ``positive`` is neither of two.
    """
    missing = values.isna().to_numpy(dtype=bool)
    if missing.any():
        row = first_row(missing)
        raise DataError(f"{where}, row {row}: is missing; drop the row ({missing.sum()} in all)")
    if task == "regression":
        labels = _numbers(values, where=where)
        if labels.min() == labels.max():
            raise DataError(f"{where}: is constant ({labels[0]}); there is nothing to learn")
        return labels, None
    return _classes(values, task=task, where=where, positive=positive)


def encode_some_labels(
    values: "pd.Series[Any]", *, task: Task, where: str, positive: Any = None
) -> tuple[Labels, tuple[Any, ...] | None, Bool[np.ndarray, " rows"] | None]:
    """Encode the labels that are there; see :func:`encode_labels`.

    Returns:
        The labels, with zeros where there is none; the classes; and which rows have one, None if
        all do.

    Raises:
        DataError: If no row has a label, or those that there are can't be encoded.
    """
    there = values.notna().to_numpy(dtype=bool)
    if there.all():
        return (*encode_labels(values, task=task, where=where, positive=positive), None)
    if not there.any():
        raise DataError(f"{where}: is empty in every row; at least some rows need a label")
    given = values[there]
    some, classes = encode_labels(given, task=task, where=where, positive=positive)
    labels = np.zeros(len(values), dtype=some.dtype)
    labels[there] = some
    return labels, classes, there


def encode_known_labels(
    values: "pd.Series[Any]",
    *,
    task: Task,
    classes: Sequence[Any] | None,
    where: str,
) -> tuple[Labels, Bool[np.ndarray, " rows"]] | None:
    """Encode the labels of new rows as those of the training rows were encoded.

    Args:
        values: One label a row, or none; of any type that spells the classes as they were spelled.
        task: What the label is.
        classes: The original value of each class number; None for regression.
        where: What messages call the column.

    Returns:
        The labels, with zeros where there is none, and which rows have one; None if none has.

    Raises:
        DataError: If a label is no number, or none of the classes.
    """
    there = values.notna().to_numpy(dtype=bool)
    if not there.any():
        return None
    if task == "regression":
        labels = np.zeros(len(values), dtype=np.float64)
        labels[there] = _numbers(values[there], where=where)
        return labels, there
    assert classes is not None, "of a task with classes"
    number = {value: place for place, value in enumerate(_readings(pd.Series(classes), classes))}
    known = np.array([number.get(value, -1) for value in _readings(values, classes)])
    unknown = there & (known < 0)
    if unknown.any():
        row = first_row(unknown)
        shown = ", ".join(map(repr, classes[:10])) + (" ..." if len(classes) > 10 else "")
        raise DataError(
            f"{where}, row {row}: {str(values.iloc[row - 1])[:40]!r} is none of the classes that "
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
        if unsigned(str(sample))[1]:
            raise DataError(
                f"{where}, row {row}: is {str(sample)[:40]!r}, a number with a sign; write labels "
                f"as numbers without one, in the unit that predictions are to have"
            )
        raise DataError(
            f"{where}: must be numeric for regression, but holds values such as "
            f"{str(sample)[:40]!r}; use the task binary or multiclass for classes"
        )
    if np.isinf(numbers).any():
        raise DataError(f"{where}, row {first_row(np.isinf(numbers))}: is infinite")
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if too_large.any():
        raise DataError(
            f"{where}, row {first_row(too_large)}: is too large for float32; change its unit"
        )
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
    if np.isinf(numbers).any():
        raise DataError(f"{where}, row {first_row(np.isinf(numbers))}: is infinite")
    # An empty cell turns a column of whole numbers into one of floats.
    whole = bool((numbers % 1 == 0).all())
    return [int(cell) if whole else float(cell) for cell in cells]
