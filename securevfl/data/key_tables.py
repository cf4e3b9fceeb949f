"""Key columns of any kind, for linkage alone: texts and numbers, where values may be missing.

A :class:`~securevfl.data.tables.PartyTable` has numeric keys without gaps, since models may take
keys as inputs. Names and addresses are compared as they are, and are no inputs of a model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.reading import read_frame, require_columns
from securevfl.data.tables import KeyTable

KeyKind = Literal["text", "number"]


def read_key_table(
    path: Path, *, name: str, key: Mapping[str, KeyKind] | Sequence[str], truth: str | None = None
) -> KeyTable:
    """Read key columns of a CSV or Parquet file.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file with a header.
        name: The party's name, for messages.
        key: Key columns and their kinds; a plain list takes all of them as texts. Numbers read as
            text keep their spelling in a CSV file: a postcode "0123" stays one.
        truth: A column with the number of the true entity.

    Raises:
        DataError: If the file cannot be read, a column is missing, the table is empty, or a number
            is not one.
    """
    where = f"table {path} of {name!r}"
    kinds = dict(key) if isinstance(key, Mapping) else dict.fromkeys(key, "text")
    if not kinds:
        raise DataError(f"{where}: at least one key column must be named")
    texts = [column for column, kind in kinds.items() if kind == "text"]
    frame = read_frame(path, where=where, as_text=texts)
    require_columns(frame, [*kinds, *([truth] if truth is not None else [])], where=where)
    if len(frame) == 0:
        raise DataError(f"{where}: has no rows")
    columns = {
        column: _texts(frame[column])
        if kind == "text"
        else _numbers(frame[column], where=f"{where}: key {column!r}")
        for column, kind in kinds.items()
    }
    entities = None
    if truth is not None:
        if not pd.api.types.is_integer_dtype(frame[truth]):
            raise DataError(f"{where}: truth {truth!r}: must be whole numbers without gaps")
        entities = frame[truth].to_numpy(dtype=np.int64)
    return KeyTable(name=name, columns=columns, entities=entities)


def _texts(values: "pd.Series[Any]") -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = [
        None if missing else str(value)
        for value, missing in zip(values, values.isna(), strict=True)
    ]
    return column


def _numbers(values: "pd.Series[Any]", *, where: str) -> np.ndarray:
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        raise DataError(f"{where}: must be numeric")
    numbers = values.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(numbers).any():
        raise DataError(f"{where}, row {int(np.argmax(np.isinf(numbers))) + 1}: is infinite")
    return numbers
