"""Feature columns of a table as float32: numbers as they are, words as one 0/1 column each."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.tables import require_finite

MAX_CATEGORIES: Final = 50
"""A text column with more words than this is an identifier or free text by default: one-hot columns
of it would let a model memorise rows."""


def feature_columns(
    frame: pd.DataFrame,
    chosen: Sequence[str],
    *,
    declared: Mapping[str, Sequence[str]],
    max_categories: int,
    where: str,
) -> tuple[list[str], np.ndarray, list[str]]:
    """Encode feature columns: numbers as they are, words as one 0/1 column each.

    Args:
        frame: The table.
        chosen: Feature columns.
        declared: Lists of words, by column.
        max_categories: Largest number of different words of a column without a list.
        where: What messages call the table.

    Returns:
        Names and float32 values of the features, and the columns whose words were collected.

    Raises:
        DataError: If a value is missing, infinite, too large, not declared, or of another type.
    """
    names: list[str] = []
    inferred: list[str] = []
    columns: list[np.ndarray] = []
    for column in chosen:
        values = frame[column]
        if column not in declared and pd.api.types.is_numeric_dtype(values):
            numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
            require_finite(numbers[:, None], (column,), where=where)
            _require_float32(numbers, where=f"{where}: column {column!r}")
            names.append(column)
            columns.append(numbers.astype(np.float32))
        else:
            if column not in declared:
                inferred.append(column)
            words, encoded = _one_hot(
                values,
                declared.get(column),
                max_categories=max_categories,
                where=f"{where}: column {column!r}",
            )
            names += [f"{column}={word}" for word in words]
            columns += list(encoded.T)
    if not columns:
        return names, np.empty((len(frame), 0), dtype=np.float32), inferred
    return names, np.column_stack(columns), inferred


def _require_float32(numbers: np.ndarray, *, where: str) -> None:
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if too_large.any():
        row = int(np.argmax(too_large)) + 1
        raise DataError(f"{where}, row {row}: is too large for float32; change its unit")


def _one_hot(
    values: "pd.Series[Any]",
    declared: Sequence[str] | None,
    *,
    max_categories: int,
    where: str,
) -> tuple[list[str], np.ndarray]:
    missing = values.isna().to_numpy(dtype=bool)
    if missing.any():
        row = int(np.argmax(missing)) + 1
        raise DataError(
            f"{where}, row {row}: is a missing value (NaN); fill it in or drop the row "
            f"({missing.sum()} such values in all)"
        )
    text = values.astype(str).to_numpy(dtype=np.str_)
    if declared is not None:
        words = np.array(declared, dtype=np.str_)
        numbers = _declared_numbers(text, words, where=where)
    else:
        words, numbers = np.unique(text, return_inverse=True)
        _require_words(values, words, max_categories=max_categories, where=where)
    encoded = np.zeros((len(text), len(words)), dtype=np.float32)
    encoded[np.arange(len(text)), numbers] = 1
    return [str(word) for word in words], encoded


def _declared_numbers(text: np.ndarray, words: np.ndarray, *, where: str) -> np.ndarray:
    order = np.argsort(words, kind="stable")
    if not len(words) or (words[order][1:] == words[order][:-1]).any():
        raise DataError(f"{where}: its declared words must be different, and at least one")
    place = np.minimum(np.searchsorted(words, text, sorter=order), len(words) - 1)
    numbers: np.ndarray = order[place]
    unknown = words[numbers] != text
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DataError(
            f"{where}, row {row + 1}: {str(text[row])[:40]!r} is not among its declared words"
        )
    return numbers


def _require_words(
    values: "pd.Series[Any]", words: np.ndarray, *, max_categories: int, where: str
) -> None:
    textual = (
        pd.api.types.is_string_dtype(values)
        or values.dtype == object
        or isinstance(values.dtype, pd.CategoricalDtype)
    )
    if not textual:
        raise DataError(f"{where}: holds {values.dtype} values; turn them into numbers or words")
    as_numbers = pd.to_numeric(pd.Series(words), errors="coerce").notna().to_numpy()
    if as_numbers.mean() > 0.5:
        raise DataError(f"{where}: holds numbers, but {first_word(values)}")
    if len(words) > max_categories:
        raise DataError(
            f"{where}: holds {len(words)} different words, more than {max_categories}; "
            f"exclude it or group its values"
        )


def first_word(values: "pd.Series[Any]") -> str:
    """Say which row of a column that should be numeric is not a number."""
    if pd.api.types.is_bool_dtype(values):
        return "holds true and false"
    present = values.astype(object).where(values.notna(), "0")
    unreadable = pd.to_numeric(present, errors="coerce").isna().to_numpy(dtype=bool)
    if not unreadable.any():
        return f"holds {values.dtype} values"
    row = int(np.argmax(unreadable))
    return f"row {row + 1} holds {str(values.iloc[row])[:40]!r}"
