"""Text files as streams of bytes, compressed or not."""

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import DataError

# Files of separated cells.
_TEXT_SUFFIXES: Final = (".csv", ".tsv", ".tab", ".psv", ".txt", ".dat")

# What files of other formats begin with, at which byte, and what they are called.
_MAGICS: Final = (
    (0, b"\x1f\x8b", "gzip", ".csv.gz"),
    (0, b"BZh", "bzip2", ".csv.bz2"),
    (0, b"\xfd7zXZ\x00", "xz", ".csv.xz"),
    (0, b"\x28\xb5\x2f\xfd", "Zstandard", ".csv.zst"),
    (0, b"PK\x03\x04", "a zip archive, or a workbook of a spreadsheet", None),
    (0, b"\xd0\xcf\x11\xe0", "a workbook of a spreadsheet", None),
    (0, b"PAR1", "Parquet", ".parquet"),
    (0, b"ARROW1", "Arrow", ".arrow"),
    (0, b"FEA1", "Feather", ".feather"),
    (0, b"SQLite format 3\0", "an SQLite database", ".sqlite"),
    (8, b"DUCK", "a DuckDB database", ".duckdb"),
)


def _zst(path: Path) -> Any:
    import pyarrow as pa

    # pandas needs one more package for these; pyarrow is there anyway.
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


def _member_of(archive: zipfile.ZipFile) -> str:
    members = [
        name
        for name in archive.namelist()
        if not name.endswith("/") and not name.startswith("__MACOSX/")
    ]
    if len(members) != 1:
        raise OSError(f"the archive holds {len(members)} files instead of one table")
    return members[0]


_OPENERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zst,
}


def is_text_table(path: Path) -> bool:
    """Whether a file's name says that it holds separated cells, compressed or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".zip"]:
        return True  # "bank.zip" may hold "bank.csv"; the other compressions keep no name
    if suffixes and suffixes[-1] in _OPENERS:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _TEXT_SUFFIXES


@contextmanager
def open_table(path: Path) -> Iterator[Any]:
    """Open a file for reading its uncompressed bytes; its suffix names the compression.

    Raises:
        OSError: If there is no such file, or it is no such archive.
    """
    suffix = path.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(_member_of(archive)) as member:
            yield member
        return
    opener = _OPENERS.get(suffix)
    with path.open("rb") if opener is None else opener(path) as stream:
        yield stream


def require_text(head: bytes, *, where: str) -> None:
    """Refuse what begins as a file of another format does.

    Raises:
        DataError: Naming the format, and the suffix that files of it have.
    """
    for start, magic, name, suffix in _MAGICS:
        if head[start : start + len(magic)] == magic:
            todo = f"call it {suffix}" if suffix else "save the table as CSV"
            raise DataError(f"{where}: is {name}, not a text file; {todo}")
