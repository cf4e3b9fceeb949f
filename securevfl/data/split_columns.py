"""The column that a split of rows follows: groups that stay together, or times."""

from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Int64

from securevfl.core.errors import DataError
from securevfl.data import keys_and_labels
from securevfl.data.cells import refuse_rows, require_columns


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
        places = pd.factorize(keys_and_labels.key_texts(values, where=where))[0]
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
