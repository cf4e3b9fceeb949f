"""Read a party's source, whatever it is, as one frame."""

import lzma
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pandas as pd

from securevfl.core.errors import ConfigError, DataError
from securevfl.core.settings import read_settings
from securevfl.data.sources.columnar import COLUMNAR_SUFFIXES, read_columnar
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.databases import (
    DUCKDB_SUFFIXES,
    SQLITE_SUFFIXES,
    read_duckdb,
    read_sqlite,
    read_url,
)
from securevfl.data.sources.opening import is_text_table
from securevfl.data.sources.settings import AS_IT_IS, Reading, Source
from securevfl.data.sources.text_files import read_text_file

SOURCE_SUFFIX: Final = ".source.toml"
"""Files that say where a table lies; each is its own party's alone."""

EVERYTHING: Final = Wanted()
"""All columns, with all digits."""

_KNOWN: Final = (
    ".csv, .tsv or .txt (also with .gz, .bz2, .xz, .zst or .zip), .parquet, .arrow, .feather, "
    f".duckdb, .sqlite or {SOURCE_SUFFIX}"
)
_READ_ERRORS: Final = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    NotImplementedError,  # an archive's compression
    RuntimeError,  # an archive with a password
    pd.errors.EmptyDataError,
)


def unnoticed(_text: str) -> None:
    """Say nothing."""


def read_frame(
    path: Path,
    *,
    where: str,
    reading: Reading = AS_IT_IS,
    wanted: Wanted = EVERYTHING,
    notice: Callable[[str], None] = unnoticed,
) -> pd.DataFrame:
    """Read the wanted columns of a file or a database, piece by piece.

    Args:
        path: A file of any kind that :data:`securevfl.data.sources` knows, or a
            ``NAME.source.toml`` that says where the table lies.
        where: What messages call the source.
        reading: What its user says of it.
        wanted: Which columns; others are not read, or not kept.
        notice: Hears what was recognised that is not usual, a line each.

    Returns:
        The columns in the order wanted, of the kinds that
        :mod:`securevfl.data.sources.pieces` names. Peak memory is that of what is kept, one column
        more, and a piece.

    Raises:
        DataError: If it cannot be read, or could be read in two ways, or a column is missing or
            named twice. One line, which says what to write.
    """
    try:
        if is_source_file(path):
            source = read_source(path, where=where)
            if reading != AS_IT_IS:
                raise DataError(f"{where}: reading: belongs into {path.name} itself")
            if source.url is not None:
                _require_settings(source, of_database=True, where=where)
                return read_url(
                    source.url,
                    source.reading,
                    wanted,
                    password_env=source.password_env,
                    folder=path.parent,
                    where=where,
                )
            assert source.file is not None
            path, reading = _file_of(path, source.file), source.reading
        return _read_file(path, reading, wanted, where=where, notice=notice)
    except _READ_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        raise DataError(f"{where}: can't be read: {reason}") from None


def _read_file(
    path: Path, reading: Reading, wanted: Wanted, *, where: str, notice: Callable[[str], None]
) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if is_source_file(path):
        raise DataError(f"{where}: file: names another source file")
    if suffix in (*DUCKDB_SUFFIXES, *SQLITE_SUFFIXES):
        _require_settings(reading, of_database=True, where=where)
        reader = read_duckdb if suffix in DUCKDB_SUFFIXES else read_sqlite
        return reader(path, reading, wanted, where=where)
    if suffix in COLUMNAR_SUFFIXES:
        for name in (*reading.of_text, *reading.of_database):
            raise DataError(f"{where}: reading.{name}: a {suffix} file needs none")
        return read_columnar(path, wanted, where=where)
    if not is_text_table(path):
        raise DataError(f"{where}: must be a {_KNOWN} file")
    _require_settings(reading, of_database=False, where=where)
    frame, recognised = read_text_file(path, reading, wanted, where=where)
    if recognised is not None:
        notice(recognised)
    return frame


def _require_settings(reading: Reading, *, of_database: bool, where: str) -> None:
    for name in reading.of_text if of_database else reading.of_database:
        kind = "text file" if of_database else "database"
        raise DataError(f"{where}: reading.{name}: goes with a {kind} alone")


def is_source_file(path: Path) -> bool:
    """Whether a file says where a table lies, and is none itself."""
    return path.name.endswith(SOURCE_SUFFIX)


def read_source(path: Path, *, where: str) -> Source:
    """Read a ``NAME.source.toml`` file.

    Raises:
        OSError: If there is no such file.
        DataError: If it is no TOML, or a setting is wrong. Values are not shown.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: is not TOML: {error}") from None
    try:
        return read_settings(Source, table, where="source")
    except ConfigError as error:
        raise DataError(f"{where}: {str(error).removeprefix('source.')}") from None


def file_behind(path: Path) -> Path:
    """Return the file that holds a party's table: for most, the path itself.

    A source file with an address of a database stands for its table itself.

    Raises:
        OSError: If there is no such source file.
        DataError: As :func:`read_source`.
    """
    if not is_source_file(path):
        return path
    source = read_source(path, where=f"table {path}")
    return path if source.file is None else _file_of(path, source.file)


def _file_of(path: Path, file: str) -> Path:
    return path.parent / Path(file).expanduser()
