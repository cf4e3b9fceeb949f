"""A table of a run's released embeddings as a Parquet or CSV file."""

import io
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.runtime.released_table import METADATA


def write_released(frame: pd.DataFrame, path: Path) -> None:
    """Write a table of releases that only this user can read.

    Args:
        frame: Table of :func:`securevfl.runtime.released_table.released_table`.
        path: Path with ``.parquet`` or ``.csv``. The promise is in the Parquet schema's metadata
            under ``securevfl``, or in ``NAME.csv.json``.

    Raises:
        ConfigError: If it ends otherwise.
        StorageError: If the disk takes no more.
    """
    metadata = frame.attrs[METADATA]
    require_writable_name(path)
    if path.suffix == ".csv":
        files.write_text(path, frame.to_csv(index=False, lineterminator="\n"))
        files.write_json(path.with_name(f"{path.name}.json"), metadata)
        return
    # Without pandas' own copy of the attributes: the promise stands in one place.
    bare = frame.copy(deep=False)
    bare.attrs = {}
    arrow = pa.Table.from_pandas(bare, preserve_index=False)
    own = {METADATA.encode(): json.dumps(metadata, allow_nan=False).encode()}
    buffer = io.BytesIO()
    pq.write_table(arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), **own}), buffer)
    files.write_bytes(path, buffer.getvalue())


def require_writable_name(path: Path) -> None:
    """Refuse a file name with another ending than ``.parquet`` or ``.csv``.

    Raises:
        ConfigError: Naming the kinds that are.
    """
    if path.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--out: must end with .parquet or .csv, got {path.name!r}")
