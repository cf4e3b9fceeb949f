"""Read a party's source, a text file, another file or a database, as one frame.

A cell of a text file that could be read in two ways is never guessed: an error asks the user for a
setting.
"""

import io
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.errors import DataError, SecureVflError, missing_extra
from securevfl.data.cells import read_numbers, row_text, whole_date_form
from securevfl.data.sources import dialects, settings
from securevfl.data.sources.pieces import (
    COLUMNAR_SUFFIXES,
    IN_ROWS,
    LOST,
    SOURCES,
    Pieces,
    read_columnar,
)
from securevfl.data.sources.settings import Reading, Wanted

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
    if dialects.is_text_table(path):
        _require_settings(reading, _TEXT_SETTINGS, where=where)
        frame, recognised = read_text_file(path, reading, wanted, where=where)
        if recognised is not None:
            notice(recognised)
        return frame
    if suffix in SOURCES:
        source = SOURCES[suffix]
        _require_settings(reading, source.settings, where=where)
        return source.read(path, reading, wanted, where=where)
    raise DataError(f"{where}: must be a {_known_files()} file")


def holds_cells(path: Path) -> bool:
    """Return whether a file holds cells as users wrote them, so that dates are texts there."""
    suffix = path.suffix.lower()
    return dialects.is_text_table(path) or (
        suffix in SOURCES and "dates" in SOURCES[suffix].settings
    )


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


# With at least this share of other cells, a column holds no dates.
_FEW_DATES: Final = 0.5
_CELLS_OF_A_PIECE: Final = 1_000_000
_TOO_LONG: Final = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")


def read_text_file(
    path: Path, reading: Reading, wanted: Wanted, *, where: str
) -> tuple[pd.DataFrame, str | None]:
    """Read the wanted columns of a text file, and say what was recognised, if it is unusual.

    Cells of other columns are split but never kept, and of the wanted ones no more than a million
    are in memory as texts at a time.

    Raises:
        DataError: If a column is missing or named twice, or the file could be read in two ways.
        OSError: If it cannot be read; and what pandas raises.
    """
    dialect = dialects.dialect_of(
        path,
        reading,
        where=where,
        needed=[*wanted.needed, *wanted.expected],
        spelled=wanted.as_text,
    )
    columns = wanted.choose(dialect.names, where=where)
    read = replace(reading, decimal="," if dialect.decimal == "," else reading.decimal)
    pieces = Pieces(exact=wanted.exact)
    everywhere = dialects.empty_cells(reading)
    own = _declared_words(everywhere, wanted, columns)
    keys = [name for name in columns if name in wanted.as_text and name not in own]
    keys = keys if reading.empty is None else []
    # All cells of a key are looked at for words that count as empty, not those of a sample.
    own |= {name: [""] for name in keys}
    empty = {name: own.get(name, everywhere) for name in dialect.names} if own else everywhere
    spelled = {name: str for name in columns if name in wanted.as_text or name in own}
    try:
        for piece in _pieces(path, dialect, empty, columns, spelled):
            pieces.add(piece)
        if mixed := pieces.mixed_columns:
            again = Pieces(exact=None)
            for piece in _pieces(path, dialect, empty, mixed, dict.fromkeys(mixed, str)):
                again.add(piece)
            texts = again.frame()
            for name in mixed:
                pieces.replace(name, texts[name])
    except UnicodeDecodeError:
        raise dialects.no_such_encoding(path, dialect.encoding, where=where) from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise DataError(f"{where}: {_too_long(str(error), dialect.skipped)}") from None
    frame = pieces.frame()[list(columns)]
    frame = with_dates(frame, reading, wanted, where=where)
    for name in columns:
        if frame[name].dtype == "str" and name not in spelled and name not in wanted.words:
            frame[name] = read_numbers(frame[name], read, where=f"{where}: column {name!r}")
    words = {name: word for name, word in dialect.gaps.items() if name in columns}
    for name in keys:
        gaps = frame[name].isin(everywhere)
        if gaps.any() and frame[name][~gaps].str.strip().str[:1].str.isalpha().any():
            words[name] = frame[name][gaps].min()
        frame[name] = frame[name].mask(gaps)
    frame.attrs[LOST] = {"words": words}
    return frame, dialect.notice


def with_dates(
    frame: pd.DataFrame, reading: Reading, wanted: Wanted, *, where: str
) -> pd.DataFrame:
    """Return a table with dates of the form that its reading names in ISO form.

    A column is one of dates if most of its cells are of that form; columns whose words are known
    are none. Keys are dates too, so that 31.12.2020 and 2020-12-31 are one.

    Raises:
        DataError: If another cell of such a column is not of the form.
    """
    if reading.dates is None:
        return frame
    for name in frame.columns:
        if pd.api.types.is_numeric_dtype(frame[name]):
            numbers = frame[name].to_numpy(np.float64, na_value=np.nan)
            if whole_date_form(numbers) == reading.dates:
                texts = frame[name].astype("Int64").astype("str")
                frame[name] = texts.str.zfill(settings.WHOLE_DATES[reading.dates])
        if frame[name].dtype == "str" and name not in wanted.words:
            frame[name] = _in_iso_form(
                frame[name], reading.dates, where=f"{where}: column {name!r}"
            )
    return frame


def _in_iso_form(values: "pd.Series[Any]", form: str, *, where: str) -> "pd.Series[Any]":
    present = values.dropna()
    dates = read_dates(present, form)
    unread = dates.isna()
    if unread.mean() >= _FEW_DATES:
        return values
    if unread.any():
        row = int(unread.to_numpy().argmax())
        raise DataError(
            f"{where}, row {row_text(present.index[row])}: {present.iloc[row][:40]!r} "
            f"is no date of the form {form!r} that reading.dates names; correct or empty that "
            f"cell, or exclude the column"
        )
    timed = bool((dates != dates.dt.normalize()).any())
    texts = dates.dt.strftime("%Y-%m-%dT%H:%M:%S.%f" if timed else "%Y-%m-%d")
    return texts.reindex(values.index).astype("str")


def read_dates(cells: "pd.Series[Any]", form: str) -> "pd.Series[Any]":
    """Return texts as points in time, without their zones; NaT where one is not of the form."""
    dates = pd.to_datetime(cells.str.strip(), format=form, errors="coerce", utc=True)
    return dates.dt.tz_localize(None)


def _declared_words(
    everywhere: Collection[str], wanted: Wanted, columns: Collection[str]
) -> dict[str, list[str]]:
    """Return the empty cells of each column where a declared word would count as empty."""
    declared = {name: {*wanted.words.get(name, ())} & {*everywhere} - {""} for name in columns}
    return {name: sorted({*everywhere} - words) for name, words in declared.items() if words}


def _pieces(
    path: Path,
    dialect: dialects.Dialect,
    empty: list[str] | dict[str, list[str]],
    columns: Sequence[str],
    types: Mapping[str, type[str]],
) -> Iterator[pd.DataFrame]:
    settings: dict[str, Any] = {
        "sep": dialect.separator,
        "decimal": dialect.decimal,
        "header": 0 if dialect.skips_first else None,
        "names": list(dialect.names),
        "dtype": dict(types),
        "index_col": False,
        "skipinitialspace": dialect.skips_blanks,
        "na_values": empty,
        "keep_default_na": False,
        "low_memory": False,
        "dtype_backend": "numpy_nullable",
        # A row of one column is blank where its value is missing.
        "skip_blank_lines": len(dialect.names) > 1,
        "chunksize": max(1000, _CELLS_OF_A_PIECE // len(dialect.names)),
    }
    # All columns are parsed, as pandas drops cells beyond the header's in silence if it selects
    # columns.
    with (
        dialects.open_table(path) as raw,
        io.TextIOWrapper(raw, encoding=dialect.encoding, newline="") as stream,
    ):
        for _ in range(dialect.skipped):
            stream.readline()
        with pd.read_csv(stream, **settings) as reader:
            while (piece := _next(reader)) is not None:
                yield piece[list(columns)]


def _next(reader: Iterator[pd.DataFrame]) -> pd.DataFrame | None:
    with warnings.catch_warnings():
        # Rows with more fields than the header are a warning to pandas, lost data to us.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return next(reader, None)


def _too_long(message: str, skipped: int) -> str:
    match = _TOO_LONG.search(message)
    if match is not None:
        line = int(match[2]) + skipped
        return f"can't be read: line {line} has {match[3]} cells instead of {match[1]}"
    if message.startswith("Length of header"):
        return "can't be read: its rows have more cells than its header has names"
    return f"can't be read: {' '.join(message.split())}"
