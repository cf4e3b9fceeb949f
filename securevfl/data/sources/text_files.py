"""Text files of separated cells: dialect, encoding and number format are recognised, then read.

A cell that could be read in two ways is never guessed: an error asks the user for a setting.
"""

import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.sources.dialects import Dialect, dialect_of, empty_cells
from securevfl.data.sources.pieces import Pieces
from securevfl.data.sources.settings import Reading, Wanted
from securevfl.data.sources.text_encodings import no_such_encoding, open_table
from securevfl.data.sources.text_numbers import read_numbers, row_text

# With at least this share of other cells, a column holds no dates.
_FEW_DATES: Final = 0.5
_CELLS_OF_A_PIECE: Final = 1_000_000
_TOO_LONG: Final = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")


def read_text_file(
    path: Path, reading: Reading, wanted: Wanted, *, where: str
) -> tuple[pd.DataFrame, list[str]]:
    """Read the wanted columns of a text file, and say what was recognised.

    Cells of other columns are split but never kept, and of the wanted ones no more than a million
    are in memory as texts at a time.

    Raises:
        DataError: If a column is missing or named twice, or the file could be read in two ways.
        OSError: If it cannot be read; and what pandas raises.
    """
    dialect = dialect_of(
        path,
        reading,
        where=where,
        needed=[*wanted.needed, *wanted.expected],
        spelled=wanted.as_text,
    )
    columns = wanted.choose(dialect.names, where=where)
    read = replace(reading, decimal="," if dialect.decimal == "," else reading.decimal)
    pieces = Pieces(exact=wanted.exact)
    everywhere = empty_cells(reading)
    own = _declared_words(everywhere, wanted, columns)
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
        raise no_such_encoding(path, dialect.encoding, where=where) from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise DataError(f"{where}: {_too_long(str(error), dialect.skipped)}") from None
    frame = pieces.frame()[list(columns)]
    frame = with_dates(frame, reading, wanted, where=where)
    for name in columns:
        if frame[name].dtype == "str" and name not in spelled and name not in wanted.words:
            frame[name] = read_numbers(frame[name], read, where=f"{where}: column {name!r}")
    gaps = {name: line for name, line in dialect.gaps.items() if name in columns}
    notices = [dialect.notice, _words_for_nothing(gaps, where=where)]
    return frame, [text for text in notices if text is not None]


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


def _words_for_nothing(gaps: Mapping[str, str], *, where: str) -> str | None:
    """Return a line about columns of words in which other words stand for no value."""
    if not gaps:
        return None
    name, cell = next(iter(gaps.items()))
    others = f"{len(gaps) - 1} more column" + ("" if len(gaps) == 2 else "s")
    more = f" (and such cells of {others})" if len(gaps) > 1 else ""
    return (
        f"{where}: {cell!r} of column {name!r}{more} counts as an empty cell; where it is a word, "
        f'declare it in categories, or write reading = {{ empty = [""] }}'
    )


def _pieces(
    path: Path,
    dialect: Dialect,
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
        open_table(path) as raw,
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
