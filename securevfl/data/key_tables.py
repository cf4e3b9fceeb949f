"""Key columns of any kind, for linkage alone: texts and numbers, where values may be missing.

A :class:`~securevfl.data.tables.PartyTable` has numeric keys without gaps, since models may take
keys as inputs. Names and addresses are compared as they are, and are no inputs of a model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.key_columns import key_numbers, key_texts
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.data.tables import KeyTable

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
