"""Read a party's table from CSV or Parquet, and say in one line what is wrong with it."""

import difflib
import warnings
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError
from securevfl.core.task import Task
from securevfl.data.feature_columns import MAX_CATEGORIES, feature_columns, first_word
from securevfl.data.labels import encode_labels, encode_some_labels
from securevfl.data.tables import Labels, PartyTable, require_finite

if TYPE_CHECKING:
    import pyarrow as pa

# From 2^53 on, float64 does not hold every integer, and different keys could become equal.
_LARGEST_EXACT_INTEGER: Final = 2**53

_READ_ERRORS = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    zlib.error,
    pd.errors.ParserError,
    pd.errors.ParserWarning,
    pd.errors.EmptyDataError,
)


def read_table(
    path: Path,
    *,
    name: str,
    key: Sequence[str],
    task: Task,
    label: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    truth: str | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    max_categories: int = MAX_CATEGORIES,
    empty_labels: bool = False,
) -> PartyTable:
    """Read one party's table.

    Numbers stay numbers, true and false become 1 and 0. A text column becomes one 0/1 column for
    each word of its declared list or, without one, for each of its at most ``max_categories``
    different words in sorted order.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file with a header.
        name: The party's name, for messages.
        key: Numeric key columns, in the order that all parties agreed on; none if keys are texts.
        task: What the label is.
        label: The label column, at the primary; None at a secondary.
        features: Feature columns; None takes every column that has no other purpose.
        exclude: Columns that are neither keys nor features.
        truth: A column with the number of the true entity, for linkage quality only.
        categories: The words of text features, declared; the encoding is then independent of the
            data, and a word that is not in the list is refused.
        max_categories: Largest number of different words of a text feature without a list.
        empty_labels: Whether a row may lack its label; it is then marked so.

    Returns:
        The table, with rows in the order of the file.

    Raises:
        DataError: If the file cannot be read, a column is missing or named twice, the table is
            empty, a value is missing, infinite or not a number, or the label does not fit the
            task. Rows are counted from 1, the header not included.
    """
    where = f"table {path} of {name!r}"
    frame = read_frame(path, where=where)
    special = [*key, *([label] if label is not None else []), *([truth] if truth else [])]
    require_columns(frame, [*special, *(features or ()), *exclude], where=where)
    if len(set(special)) < len(special):
        raise DataError(f"{where}: one column is named for two purposes among {special}")
    chosen = features
    if chosen is None:
        chosen = [c for c in frame.columns if c not in special and c not in exclude]
        if not chosen:
            raise DataError(f"{where}: has no feature columns beside {', '.join(special)}")
    elif set(chosen) & set(special):
        raise DataError(f"{where}: {min(set(chosen) & set(special))!r} can't be a feature")
    if len(frame) == 0:
        raise DataError(f"{where}: has no rows")
    columns_of_keys = [_key_column(frame[c], where=f"{where}: key {c!r}") for c in key]
    keys = np.column_stack(columns_of_keys) if key else np.empty((len(frame), 0))
    require_finite(keys, key, where=where)
    declared = dict(categories or {})
    require_columns(frame, list(declared), where=where)
    names, columns, inferred = feature_columns(
        frame, chosen, declared=declared, max_categories=max_categories, where=where
    )
    labels: Labels | None = None
    classes: tuple[Any, ...] | None = None
    labelled = None
    if label is not None:
        place = f"{where}: label {label!r}"
        if empty_labels:
            labels, classes, labelled = encode_some_labels(frame[label], task=task, where=place)
        else:
            labels, classes = encode_labels(frame[label], task=task, where=place)
    return PartyTable(
        name=name,
        key_names=tuple(key),
        keys=keys,
        feature_names=tuple(names),
        features=columns,
        labels=labels,
        labelled=labelled,
        classes=classes,
        inferred_columns=tuple(inferred),
        entities=_entities(frame, truth, where=where),
    )


def read_frame(path: Path, *, where: str, as_text: Collection[str] = ()) -> pd.DataFrame:
    """Read a whole file.

    Args:
        path: A ``.csv``, ``.csv.gz`` or ``.parquet`` file.
        where: What messages call the file.
        as_text: Columns of a CSV file that keep their spelling ("0123" stays a text).

    Raises:
        DataError: If it cannot be read, or two columns have one name.
    """
    try:
        if path.name.endswith(".parquet"):
            frame = _read_parquet(path)
        elif path.name.endswith((".csv", ".csv.gz")):
            frame = _read_csv(path, as_text)
        else:
            raise DataError(f"{where}: must be a .csv, .csv.gz or .parquet file")
    except _READ_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(reason.split())
        raise DataError(f"{where}: can't be read: {reason}") from None
    for column in frame.columns:
        if list(frame.columns).count(column) > 1:
            raise DataError(f"{where}: two columns are called {column!r}; rename one")
    return frame


def _read_csv(path: Path, as_text: Collection[str]) -> pd.DataFrame:
    with warnings.catch_warnings():
        # Rows with more fields than the header are a warning to pandas, lost data to us.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        # pandas renames the second of two equal names, so the header is read as data.
        header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
        types = dict.fromkeys(as_text, str)
        frame = pd.read_csv(path, low_memory=False, index_col=False, dtype=types)
    frame.columns = pd.Index(header.iloc[0].tolist())
    return frame


def _read_parquet(path: Path) -> pd.DataFrame:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        frame: pd.DataFrame = table.to_pandas()
    except Exception as error:  # noqa: BLE001 - pandas believes what a file says of itself
        raise OSError(f"{type(error).__name__}: {error}") from None
    frame.columns = pd.Index([str(column) for column in frame.columns])
    for field in table.schema:
        if field.name in frame.columns and _is_binary(field.type):
            frame[field.name] = frame[field.name].map(_text, na_action="ignore")
    return frame


def _is_binary(kind: "pa.DataType") -> bool:
    import pyarrow.types as kinds

    return bool(
        kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind)
    )


def _text(cell: bytes | str) -> str:
    # Some programs write texts so; what is no text is at least shown and compared as one.
    return cell if isinstance(cell, str) else cell.decode("utf-8", errors="backslashreplace")


def require_columns(frame: pd.DataFrame, columns: Sequence[str], *, where: str) -> None:
    """Check that all columns are there.

    Raises:
        DataError: Naming the first that is not, the nearest name, and those that there are.
    """
    names = [str(name) for name in frame.columns]
    for column in columns:
        if column not in names:
            close = difflib.get_close_matches(column, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            shown = ", ".join(names[:20]) + more
            raise DataError(f"{where}: has no column {column!r}; {hint}It has {shown}")


def _key_column(values: "pd.Series[Any]", *, where: str) -> np.ndarray:
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        raise DataError(f"{where}: must be numeric, but {first_word(values)}")
    if pd.api.types.is_integer_dtype(values) and len(values):
        low, high = int(values.min()), int(values.max())
        if max(-low, high) > _LARGEST_EXACT_INTEGER:
            raise DataError(f"{where}: holds integers above 2^53, which float64 can't tell apart")
    return values.to_numpy(dtype=np.float64, na_value=np.nan)


def _entities(frame: pd.DataFrame, truth: str | None, *, where: str) -> np.ndarray | None:
    if truth is None:
        return None
    values = frame[truth]
    if not pd.api.types.is_integer_dtype(values) or values.isna().any():
        raise DataError(f"{where}: truth {truth!r}: must be whole numbers without gaps")
    return values.to_numpy(dtype=np.int64)
