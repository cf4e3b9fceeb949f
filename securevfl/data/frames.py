"""A party's table from a frame in Python: pandas, polars, pyarrow, and other libraries of Arrow."""

import gzip
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from securevfl.core import files
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError, require_extra
from securevfl.data import keys_and_labels, party_tables
from securevfl.data.cells import split_unit_sign
from securevfl.data.scaling import NOTHING_DECLARED, ColumnSettings
from securevfl.data.sources.pieces import FRAMES_OF_ROWS, plain, reading_column, to_pandas
from securevfl.data.sources.settings import require_different, require_one_role
from securevfl.data.tables import PartyTable


def from_frame(
    frame: Any,
    *,
    name: str,
    key: str | Sequence[str] | Mapping[str, keys_and_labels.KeyKind],
    label: str | None = None,
    task: Task | None = None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    truth: str | None = None,
    columns: ColumnSettings | None = None,
    positive: str | bool | int | float | None = None,
) -> PartyTable:
    """Make a party's table of a frame, as :func:`securevfl.data.read_table` does of a file.

    Args:
        frame: A pandas or polars DataFrame, a pyarrow Table, or anything else that has
            ``__arrow_c_stream__`` or ``to_pandas``. pandas' index becomes a column if it has a
            name. Or a tensor or map-style dataset of torch, whose columns are named by
            :mod:`securevfl.stages.tables.torch_rows`.
        name: The party's name.
        key: The key column, or several in the order that all parties agreed on. They are numbers
            where all of them are numbers or times without gaps, and texts or numbers with gaps
            otherwise, for linkage alone. A mapping says which kind each one is:
            ``{"phone": "text"}``. Of tensors, ``"row"`` is the number of each row, from 0 on.
        label: The label column, at the primary; None at a secondary.
        task: What the label is; default: ``"binary"`` for two values, ``"multiclass"`` for more
            words, ``"regression"`` for numbers with decimals. Whole numbers may be either of these.
        features: Feature columns; None takes every column that has no other purpose.
        exclude: Columns that are neither keys nor features.
        truth: A column with the number of the true entity, for linkage quality only.
        columns: Declared settings of its columns.
        positive: Of a binary task, the label that probabilities and metrics are about; default:
            the one that sorts last.

    Returns:
        The table, which :func:`securevfl.simulate` takes.

    Raises:
        ConfigError: If whole numbers are labels and ``task`` does not say what of.
        DataError: As :func:`securevfl.data.read_table`.
    """
    key = _checked_key(key)
    named = [column for column in (label, truth) if column is not None]
    used = [*key, *named, *(features or ())]
    require_one_role({"key, label, truth or features": used, "exclude": exclude})
    where = f"frame of {name!r}"
    whole = as_pandas(frame, where=where, numbered=party_tables.ROW in key)
    roles = party_tables.ColumnRoles(
        key=tuple(key),
        task="regression",
        label=label,
        positive=positive,
        features=features,
        truth=truth,
    )
    settings = columns or NOTHING_DECLARED
    wanted = party_tables.columns_of_roles(roles, settings, exclude=exclude)
    chosen = wanted.choose([str(column) for column in whole.columns], where=where)
    whole = whole[chosen]
    kinds = dict(key) if isinstance(key, Mapping) else _kinds(whole, key)
    numeric = not isinstance(key, Mapping) and None not in kinds.values()
    roles = replace(
        roles,
        key=tuple(key) if numeric else (),
        task=task or ("regression" if label is None else _task_of(whole[label], label)),
        exclude=() if numeric else tuple(key),
        text_key=() if numeric else tuple(key),
    )
    if features is None and label is None and not set(chosen) - {*key, *named}:
        raise party_tables.no_features_error([*key, *named], where=where)
    table = party_tables.fit_party_table(whole, roles, settings, name=name, where=where)
    if numeric:
        return table
    link_columns = keys_and_labels.key_table_of_frame(
        whole,
        name=name,
        key={
            column: kind or ("number" if is_numeric_dtype(whole[column]) else "text")
            for column, kind in kinds.items()
        },
        truth=truth,
        where=where,
    )
    return replace(table, link_columns=link_columns)


def _checked_key(key: Any) -> Sequence[str] | Mapping[str, keys_and_labels.KeyKind]:
    """Return key columns as a list or mapping.

    Raises:
        ConfigError: If they are neither a name, nor several.
    """
    names: list[Any] = [key] if isinstance(key, str) or not isinstance(key, Iterable) else list(key)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"key: must be a column's name or a list of names, such as ['id'], got {key!r:.60}"
        )
    return key if isinstance(key, Mapping) else names


def as_pandas(frame: Any, *, where: str, numbered: bool = False) -> pd.DataFrame:
    """Return a frame of any library as pandas', with columns as files give them.

    Args:
        frame: A table with columns, or rows of torch.
        where: Name of the table in messages.
        numbered: Whether rows of torch, which have no names, get their numbers as the column
            ``row``.

    Raises:
        DataError: If it is no frame, or two columns have one name.
    """
    if hasattr(frame, "to_frame") and not isinstance(frame, pd.DataFrame):
        frame = frame.to_frame()  # one column of pandas or polars
    if isinstance(frame, pd.DataFrame):
        index, columns = frame.index, map(str, frame.columns)
        cells = [
            (name, frame.iloc[:, place].reset_index(drop=True))
            for place, name in enumerate(columns)
        ]
        levels = [
            (str(level), pd.Series(index.get_level_values(place)))
            for place, level in enumerate(index.names)
            if level is not None
        ]
        # ``set_index(drop=False)`` leaves the column where it was.
        named = [
            (level, values)
            for level, values in levels
            if not any(name == level and values.equals(others) for name, others in cells)
        ]
        require_different([name for name, _ in (*named, *cells)], where=where)
        read = {}
        try:
            for name, values in (*named, *cells):
                with reading_column(name):
                    read[name] = plain(values)
        except OSError as error:
            raise DataError(f"{where}: {error}") from None
        return pd.DataFrame(read)
    if hasattr(frame, "__arrow_c_stream__"):
        import pyarrow as pa  # an extra, which pandas frames do not need

        try:
            rows = to_pandas(pa.table(frame))
        except pa.ArrowException as error:
            raise DataError(f"{where}: is no table that Arrow reads ({error})") from None
        return as_pandas(rows, where=where)
    if hasattr(frame, "to_pandas"):
        return as_pandas(frame.to_pandas(), where=where)
    rows_in_memory = (read(frame, where=where) for read in FRAMES_OF_ROWS.values())
    made = next((rows for rows in rows_in_memory if rows is not None), None)
    if made is None:
        raise DataError(
            f"{where}: must be a pandas or polars DataFrame, a pyarrow Table, or a tensor or "
            f"map-style dataset of torch, got {type(frame).__name__}"
        )
    if numbered and party_tables.ROW not in made:
        made.insert(0, party_tables.ROW, np.arange(len(made)))
    return as_pandas(made, where=where)


def table_path(path: str | Path, inputs: Iterable[Path]) -> Path:
    """Return the path of a table that :func:`write_frame` can write; see :func:`output_path`.

    Raises:
        ConfigError: As there, or if a package is missing.
    """
    path = files.output_path(path, inputs, endings=(".csv", ".csv.gz", ".parquet"))
    if path.suffix.lower() == ".parquet":
        require_extra("pyarrow", use=f"--out {path}:")
    return path


def write_frame(frame: pd.DataFrame, path: Path, *, about: Mapping[str, Any] | None = None) -> None:
    """Write a result for its user alone: as Parquet or packed CSV if its name says so, else CSV.

    Args:
        frame: Its columns; the index is left out.
        path: The file.
        about: Figures that belong to it: in Parquet's metadata under ``securevfl``, for CSV in
            ``NAME.json``.

    Raises:
        StorageError: If it cannot be written.
    """
    if path.suffix.lower() == ".parquet":
        files.write_output(path, _as_parquet(frame, about), for_others=False)
        return
    text = frame.to_csv(index=False, lineterminator="\n").encode()
    packed = path.suffix.lower() == ".gz"
    files.write_output(path, gzip.compress(text, mtime=0) if packed else text, for_others=False)
    if about is not None:
        note = json.dumps(about, indent=2, allow_nan=False) + "\n"
        files.write_output(path.with_name(f"{path.name}.json"), note, for_others=False)


def _as_parquet(frame: pd.DataFrame, about: Mapping[str, Any] | None) -> bytes:
    import pyarrow as pa  # an extra, as above
    import pyarrow.parquet as pq

    # Without pandas' own copy of the attributes: what is said stands in one place.
    bare = frame.copy(deep=False)
    bare.attrs = {}
    for name, values in frame.items():
        mixed = pd.api.types.infer_dtype(values).startswith("mixed")
        if mixed and pd.api.types.is_object_dtype(values):
            bare[name] = values.map(str, na_action="ignore")
    table = pa.Table.from_pandas(bare, preserve_index=False)
    if about is not None:
        note = {b"securevfl": json.dumps(about, allow_nan=False).encode()}
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **note})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def library_of(frame: Any) -> str:
    """Return the library whose frame a result is returned as: that of a user's own frame."""
    library = type(frame).__module__.partition(".")[0]
    return library if library in ("polars", "pyarrow") else "pandas"


def _kinds(frame: pd.DataFrame, key: Sequence[str]) -> dict[str, keys_and_labels.KeyKind | None]:
    """Return ``number`` for each key that models may take as an input, and else None."""
    return {
        column: "number" if _is_number(frame[column]) and frame[column].notna().all() else None
        for column in key
    }


def _is_number(values: "pd.Series[Any]") -> bool:
    kind = values.dtype
    numeric = pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
    return numeric or pd.api.types.is_datetime64_any_dtype(kind)


def _task_of(values: "pd.Series[Any]", label: str) -> Task:
    kind = values.dtype
    if values.nunique() == 2:
        return "binary"
    if pd.api.types.is_float_dtype(kind):
        return "regression"
    if pd.api.types.is_integer_dtype(kind):
        raise ConfigError(
            f"task: label {label!r} holds whole numbers, which may be classes or amounts; write "
            f'task="binary", "multiclass" or "regression"'
        )
    if any(split_unit_sign(str(cell))[1] for cell in values.dropna().unique()):
        return "regression"  # which says what to do with the sign
    return "multiclass"
