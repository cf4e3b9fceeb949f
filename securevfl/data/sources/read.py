"""Read a party's source, a file of any kind or a database, as one frame."""

import lzma
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.sources import databases, settings
from securevfl.data.sources.pieces import COLUMNAR_SUFFIXES, read_columnar
from securevfl.data.sources.text_files import is_text_table, read_text_file
from securevfl.data.sources.workbooks import WORKBOOK_SUFFIXES, read_workbook

EVERYTHING: Final = settings.Wanted()
"""All columns, with all digits."""

_KNOWN: Final = (
    ".csv, .tsv or .txt (also with .gz, .bz2, .xz, .zst or .zip), .parquet, .arrow, .feather, "
    f".xlsx, .duckdb, .sqlite or {settings.SOURCE_SUFFIX}"
)
_IN_ROWS: Final = ("skip_lines", "header", "empty", "dates")
_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "text file": ("separator", "decimal", "thousands", "encoding", *_IN_ROWS),
    "workbook": ("table", *_IN_ROWS),
    "database": ("table", "query", "timeout_s"),
}
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


def ignore_note(_text: str) -> None:
    """Say nothing."""


def read_frame(
    path: Path,
    *,
    where: str,
    reading: settings.Reading = settings.AS_IT_IS,
    wanted: settings.Wanted = EVERYTHING,
    notice: Callable[[str], None] = ignore_note,
) -> pd.DataFrame:
    """Read the wanted columns of a file or a database, piece by piece.

    Args:
        path: A file of any kind that :data:`securevfl.data.sources` knows, or a
            ``NAME.source.toml`` that says where the table lies.
        where: Name of the source in messages.
        reading: Settings of the source.
        wanted: Which columns; others are not read, or not kept.
        notice: Receives a line for each unusual format that was recognised.

    Returns:
        The columns in the order wanted, of the kinds that
        :mod:`securevfl.data.sources.pieces` names. Peak memory is that of what is kept, one column
        more, and a piece.

    Raises:
        DataError: If it cannot be read, or could be read in two ways, or a column is missing or
            named twice. One line, which says what to write.
    """
    try:
        if settings.is_source_file(path):
            source = settings.read_source(path, where=where)
            if reading != settings.AS_IT_IS:
                raise DataError(f"{where}: reading: settings belong into {path.name} itself")
            if source.url is not None:
                _require_settings(source.reading, "database", where=where)
                return databases.read_url(
                    source.url,
                    source.reading,
                    wanted,
                    password_env=source.password_env,
                    folder=path.parent,
                    where=where,
                )
            assert source.file is not None
            path, reading = settings.file_named(path, source.file), source.reading
        return _read_file(path, reading, wanted, where=where, notice=notice)
    except _READ_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(reason.split()) or type(error).__name__
        raise DataError(f"{where}: can't be read: {reason}") from None


def _read_file(
    path: Path,
    reading: settings.Reading,
    wanted: settings.Wanted,
    *,
    where: str,
    notice: Callable[[str], None],
) -> pd.DataFrame:
    suffix = path.suffix.lower()
    if settings.is_source_file(path):
        raise DataError(f"{where}: file: names another source file")
    if suffix in (*databases.DUCKDB_SUFFIXES, *databases.SQLITE_SUFFIXES):
        _require_settings(reading, "database", where=where)
        if suffix in databases.DUCKDB_SUFFIXES:
            return databases.read_duckdb(path, reading, wanted, where=where)
        url = f"sqlite:///{path.name}"
        return databases.read_url(url, reading, wanted, folder=path.parent, where=where)
    if suffix in COLUMNAR_SUFFIXES:
        for name in reading.given_settings:
            raise DataError(f"{where}: reading.{name}: a {suffix} file needs none")
        return read_columnar(path, wanted, where=where)
    if suffix in WORKBOOK_SUFFIXES:
        _require_settings(reading, "workbook", where=where)
        return read_workbook(path, reading, wanted, where=where)
    if not is_text_table(path):
        raise DataError(f"{where}: must be a {_KNOWN} file")
    _require_settings(reading, "text file", where=where)
    frame, recognised = read_text_file(path, reading, wanted, where=where)
    for text in recognised:
        notice(text)
    return frame


def _require_settings(reading: settings.Reading, kind: str, *, where: str) -> None:
    for name in reading.given_settings:
        if name not in _SETTINGS[kind]:
            kinds = " or ".join(
                f"a {other_kind}" for other_kind in _SETTINGS if name in _SETTINGS[other_kind]
            )
            raise DataError(f"{where}: reading.{name}: goes with {kinds} alone")
