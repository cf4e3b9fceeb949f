"""A label column as the model needs it: float32 for regression, class numbers otherwise."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from securevfl.core.errors import DataError
from securevfl.core.task import Task
from securevfl.data.tables import Labels


def encode_labels(
    values: "pd.Series[Any]", *, task: Task, where: str
) -> tuple[Labels, tuple[Any, ...] | None]:
    """Check a label column against the task and encode it.

    Args:
        values: One label a row: numbers, booleans or words.
        task: ``"regression"``, ``"binary"`` or ``"multiclass"``.
        where: What messages call the column, for example ``"table a.csv: label 'price'"``.

    Returns:
        The labels, and the original value of each class in sorted order (None for
        regression).

    Raises:
        DataError: If a label is missing or infinite, the column is constant, not numeric for
            regression, does not have two values for binary, or looks like no class at all.
    """
    missing = values.isna().to_numpy(dtype=bool)
    if missing.any():
        row = int(np.argmax(missing)) + 1
        raise DataError(f"{where}, row {row}: is missing; drop the row ({missing.sum()} in all)")
    numeric = pd.api.types.is_numeric_dtype(values)
    if numeric:
        infinite = ~np.isfinite(values.to_numpy(dtype=np.float64))
        if infinite.any():
            raise DataError(f"{where}, row {int(np.argmax(infinite)) + 1}: is infinite")
    if task == "regression":
        return _numbers(values, numeric=numeric, where=where), None
    return _classes(values, task=task, where=where)


def encode_some_labels(
    values: "pd.Series[Any]", *, task: Task, where: str
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
        return (*encode_labels(values, task=task, where=where), None)
    if not there.any():
        raise DataError(f"{where}: is empty in every row; at least some rows need a label")
    given = values[there]
    if pd.api.types.is_float_dtype(given) and (given % 1 == 0).all() and task != "regression":
        # An empty cell turns a column of whole numbers into one of floats.
        given = given.astype(np.int64)
    some, classes = encode_labels(given, task=task, where=where)
    labels = np.zeros(len(values), dtype=some.dtype)
    labels[there] = some
    return labels, classes, there


def _numbers(values: "pd.Series[Any]", *, numeric: bool, where: str) -> Labels:
    if not numeric or pd.api.types.is_bool_dtype(values):
        raise DataError(
            f"{where}: must be numeric for regression, but holds values such as "
            f"{_plain(values.iloc[0])!r}; use the task binary or multiclass for classes"
        )
    labels = values.to_numpy(dtype=np.float32)
    if not np.isfinite(labels).all():
        row = int(np.argmin(np.isfinite(labels))) + 1
        raise DataError(f"{where}, row {row}: is too large for float32; change its unit")
    if labels.min() == labels.max():
        raise DataError(f"{where}: is constant ({labels[0]}); there is nothing to learn")
    return labels


def _classes(values: "pd.Series[Any]", *, task: Task, where: str) -> tuple[Labels, tuple[Any, ...]]:
    if values.dtype == object or isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(str)
    originals, numbers = np.unique(values.to_numpy(), return_inverse=True)
    classes = tuple(_plain(value) for value in originals)
    if len(classes) == 1:
        raise DataError(f"{where}: is constant ({classes[0]!r}); there is nothing to learn")
    if task == "binary" and len(classes) != 2:
        raise DataError(
            f"{where}: the task binary needs two values, found {len(classes)}; "
            f"use the task multiclass"
        )
    if len(classes) > 2 and len(classes) > len(values) / 2:
        raise DataError(
            f"{where}: {len(classes)} different values in {len(values)} rows are not classes; "
            f"use the task regression or another column"
        )
    return numbers.astype(np.int64), classes


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
