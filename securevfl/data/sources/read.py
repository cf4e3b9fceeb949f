"""Read a party's source, a file of any kind or a database, as one frame."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import pandas as pd

from securevfl.core.errors import DataError, SecureVflError, missing_extra
from securevfl.data.sources import settings
from securevfl.data.sources.pieces import COLUMNAR_SUFFIXES, read_columnar
from securevfl.data.sources.table_source import IN_ROWS, SOURCES
from securevfl.data.sources.text_encodings import is_text_table
from securevfl.data.sources.text_files import read_text_file

EVERYTHING: Final = settings.Wanted()
"""All columns, with all digits."""

_TEXT_FILE: Final = "text file"
_TEXT_SETTINGS: Final = ("separator", "decimal", "thousands", "encoding", *IN_ROWS)


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
            if source.file is None:
                server = SOURCES["url"]
                _require_settings(source.reading, server.settings, where=where)
                return server.read(path, source, wanted, where=where)
            path, reading = settings.file_named(path, source.file), source.reading
        return _read_file(path, reading, wanted, where=where, notice=notice)
    except (SecureVflError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - readers trust a file's own description
        if (lacks := missing_extra(error)) is not None:
            raise lacks from None
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
    if suffix in COLUMNAR_SUFFIXES:
        for name in reading.given_settings:
            raise DataError(f"{where}: reading.{name}: a {suffix} file needs none")
        return read_columnar(path, wanted, where=where)
    if is_text_table(path):
        _require_settings(reading, _TEXT_SETTINGS, where=where)
        frame, recognised = read_text_file(path, reading, wanted, where=where)
        for text in recognised:
            notice(text)
        return frame
    if suffix in SOURCES:
        source = SOURCES[suffix]
        _require_settings(reading, source.settings, where=where)
        return source.read(path, reading, wanted, where=where)
    raise DataError(f"{where}: must be a {_known_files()} file")


def holds_cells(path: Path) -> bool:
    """Return whether a file holds cells as users wrote them, so that dates are texts there."""
    suffix = path.suffix.lower()
    return is_text_table(path) or (suffix in SOURCES and "dates" in SOURCES[suffix].settings)


def _known_files() -> str:
    """Return the suffixes of all files that can be read, for messages."""
    others = ", ".join(suffix for suffix in SOURCES if suffix.startswith("."))
    return (
        f".csv, .tsv or .txt (also with .gz, .bz2, .xz, .zst or .zip), .parquet, .arrow, .feather, "
        f"{others} or {settings.SOURCE_SUFFIX}"
    )


def _require_settings(reading: settings.Reading, allowed: Collection[str], *, where: str) -> None:
    for name in reading.given_settings:
        if name not in allowed:
            takers = {_TEXT_FILE: _TEXT_SETTINGS, **{s.kind: s.settings for s in SOURCES.values()}}
            kinds = " or ".join(f"a {taker}" for taker, own in takers.items() if name in own)
            raise DataError(f"{where}: reading.{name}: goes with {kinds} alone")
