"""Read a file of separated cells, piece by piece."""

import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pandas as pd

from securevfl.core.errors import DataError
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.dialect import Dialect, dialect_of, empty_cells, recognised
from securevfl.data.sources.encodings import no_such_encoding
from securevfl.data.sources.opening import opened
from securevfl.data.sources.pieces import Pieces
from securevfl.data.sources.settings import Reading
from securevfl.data.sources.written_numbers import read_numbers

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
    read = recognised(reading, dialect)
    pieces = Pieces(exact=wanted.exact)
    everywhere = empty_cells(reading)
    own = _declared_words(everywhere, wanted, columns)
    empty = {name: own.get(name, everywhere) for name in dialect.names} if own else everywhere
    spelled = {name: str for name in columns if name in wanted.as_text or name in own}
    try:
        for piece in _pieces(path, dialect, empty, columns, spelled):
            pieces.add(piece)
        if mixed := pieces.mixed:
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
    for name in columns:
        if frame[name].dtype == "str" and name not in spelled and name not in wanted.words:
            frame[name] = read_numbers(frame[name], read, where=f"{where}: column {name!r}")
    gaps = {name: found for name, found in dialect.gaps.items() if name in columns}
    notices = [dialect.notice, _words_for_nothing(gaps, where=where)]
    return frame, [text for text in notices if text is not None]


def _declared_words(
    everywhere: Collection[str], wanted: Wanted, columns: Collection[str]
) -> dict[str, list[str]]:
    """Return the empty cells of those columns of which a declared word would else be one."""
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
        "na_values": empty,
        "keep_default_na": False,
        "low_memory": False,
        "dtype_backend": "numpy_nullable",
        # A row of one column is blank where its value is missing.
        "skip_blank_lines": len(dialect.names) > 1,
        "chunksize": max(1000, _CELLS_OF_A_PIECE // len(dialect.names)),
    }
    # All columns are parsed, as pandas drops cells beyond the header's in silence where it is told
    # which columns to keep.
    with _text(path, dialect.encoding) as stream:
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


@contextmanager
def _text(path: Path, encoding: str) -> Iterator[io.TextIOWrapper]:
    with opened(path) as stream, io.TextIOWrapper(stream, encoding=encoding, newline="") as text:
        yield text


def _too_long(said: str, skipped: int) -> str:
    found = _TOO_LONG.search(said)
    if found is not None:
        line = int(found[2]) + skipped
        return f"can't be read: line {line} has {found[3]} cells instead of {found[1]}"
    if said.startswith("Length of header"):
        return "can't be read: its rows have more cells than its header has names"
    return f"can't be read: {' '.join(said.split())}"
