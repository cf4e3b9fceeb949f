"""The encoding of a text file: recognised where only one reading is possible, else asked for."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import reading_entry

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


# In this order: the mark of UTF-32 begins with that of UTF-16.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# Texts in the Latin alphabet without a mark of their encoding have NUL as every other byte.
_LEAST_SHARE_OF_ZEROS: Final = 0.3

# Of texts as short as names, rarer encodings are guessed as often as right ones.
_COMMON: Final = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257"),
    *("koi8_r", "shift_jis", "gb18030", "big5", "euc_kr", "cp437", "cp850", "mac_roman"),
)
_WESTERN: Final = ("cp1252", "cp1250", "cp1254", "cp1257")
_SHOWN_AROUND: Final = 30
_GUESSED_FROM: Final = 1 << 18


def recognised_encoding(head: bytes, *, where: str) -> str:
    """Return the encoding that a file's first bytes show: UTF-8, UTF-16 or UTF-32.

    UTF-8 is only possible: other bytes may follow, and fail later.

    Raises:
        DataError: If there are NUL bytes that no encoding explains.
    """
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return encoding
    if b"\0" not in head:
        return "utf-8"
    for encoding, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[0::2])):
        others = head[0::2] if encoding == "utf-16-le" else head[1::2]
        share = zeros.count(0) / max(1, len(zeros))
        if share > _LEAST_SHARE_OF_ZEROS and b"\0" not in others:
            return encoding
    raise DataError(f"{where}: is not a text file, as it holds NUL bytes; save the table as CSV")


def no_such_encoding(path: Path, encoding: str, *, where: str) -> DataError:
    """Return the line for a file that is not in the encoding given or recognised.

    It shows the first word that is not, as the likeliest encoding reads it, so that the user can
    judge whether that is the right one.
    """
    problem = f"{where}: can't be read: is not {encoding.removesuffix('-sig').upper()}"
    other = "; name another encoding, or leave reading.encoding out"
    if encoding.lower().startswith(("utf-16", "utf-32", "utf16", "utf32")):
        return DataError(problem + other)  # there a line's end is not one byte
    with open_table(path) as stream:
        for line, content in enumerate(stream, 1):
            try:
                content.decode(encoding)
            except UnicodeDecodeError as error:
                if encoding not in ("utf-8", "utf-8-sig"):
                    return DataError(f"{problem} (line {line}){other}")
                guess, shown = _guess_encoding(content + stream.read(_GUESSED_FROM), error.start)
                return DataError(
                    f"{problem} (line {line}); it may be {guess}{shown}: write "
                    f"{reading_entry(encoding=guess)}"
                )
    return DataError(problem + other)


def _guess_encoding(content: bytes, place: int) -> tuple[str, str]:
    """Return the likeliest encoding, and how it reads the word at a place.

    Without the package that compares encodings it is the one of Western programs.
    """
    guess, best = "windows-1252", None
    with contextlib.suppress(ImportError):
        import charset_normalizer

        best = charset_normalizer.from_bytes(content, cp_isolation=list(_COMMON)).best()
    # Of short words, rarer encodings are guessed that read a letter as a sign.
    if best is not None and (_only_letters(content, best.encoding) or not _only_letters(content)):
        # Western texts are alike in these; Windows-1252 is what programs write.
        guess = guess if best.encoding in _WESTERN else best.encoding.replace("_", "-")
    begin = max(0, place - _SHOWN_AROUND)
    around = content[begin : place + _SHOWN_AROUND].decode(guess, errors="replace")
    middle = len(content[begin:place].decode(guess, errors="replace"))
    start = max((m.end() for m in re.finditer(r"\W", around[:middle])), default=0)
    word = re.match(r"\w+", around[start:])
    return guess, f", which reads {word.group()!r}" if word else ""


def _only_letters(content: bytes, encoding: str = "cp1252") -> bool:
    """Whether an encoding reads all that is no ASCII as letters."""
    text = content.decode(encoding, errors="replace")
    return all(letter.isalpha() for letter in text if not letter.isascii())
