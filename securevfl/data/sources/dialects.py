"""How a text file is written: encoding, separator, decimal mark, header.

An encoding is recognised where only one reading is possible, and asked for elsewhere.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pandas._libs.parsers import STR_NA_VALUES

from securevfl.core.errors import DataError
from securevfl.data.cells import has_decimal_comma, is_number
from securevfl.data.sources.settings import NO_SEPARATOR, Reading, reading_entry

_SEPARATORS: Final = (",", ";", "\t", "|")
_OTHERS: Final = (" ", ":", "~", "^", "\x01")
_NAMED_BY_SUFFIX: Final = {".tsv": "\t", ".tab": "\t", ".psv": "|"}
_HEAD: Final = 1 << 18

# Of a table of many columns, or of very long cells, more is read until so many lines are there.
_LEAST_LINES: Final = 3
_LONGEST_HEAD: Final = 1 << 26
_SEP_LINE: Final = re.compile(r'"?sep=(?P<mark>.)"?', re.IGNORECASE)
_SAMPLE: Final = 1000
_SHOWN: Final = 60

LINES_TO_HEADER: Final = 60
"""Lines that a table's header is looked for in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How one text file is read."""

    separator: str
    decimal: str
    encoding: str
    skipped: int
    """Lines before the header that are no part of the table."""
    names: tuple[str, ...]
    """Columns in the order of the file."""
    skips_first: bool
    """True if the first line is the header, not a row."""
    skips_blanks: bool
    """True if blanks stand between separators and quotes: ``"a", "b"``."""
    gaps: Mapping[str, str]
    """Word that counts as empty, by column that holds other words too in the first lines."""
    notice: str | None
    """Unusual settings that were recognised, and how to state them for good; None: all usual."""


def dialect_of(
    path: Path, reading: Reading, *, where: str, needed: Collection[str], spelled: Collection[str]
) -> Dialect:
    """Recognise how a text file is written, from its first quarter of a mebibyte, or three lines.

    Args:
        path: The file.
        reading: Settings of the file.
        where: Name of the table in messages.
        needed: Columns that it should have; a line with all of them is its header.
        spelled: Columns that are texts in any case.

    Raises:
        DataError: If it is no text file, empty, or could be read in two ways; the line says what
            to write.
    """
    head, whole = _head(path, lines=_LEAST_LINES + (reading.skip_lines or 0), where=where)
    require_text(head, where=where)
    encoding = reading.encoding or recognised_encoding(head, where=where)
    # A mark at the beginning is no letter of the first name.
    encoding = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    try:
        # The last letter may have been cut in two.
        decoded = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        raise no_such_encoding(path, encoding, where=where) from None
    text = io.IncrementalNewlineDecoder(None, translate=True).decode(decoded)
    if "\0" in text:
        raise DataError(f"{where}: is not a text file, as it holds NUL bytes; save it as CSV")
    if not text.strip():
        raise DataError(f"{where}: can't be read: is empty")
    text, stated, skipped = _without_first_lines(text, reading, where=where)
    separator = (
        reading.separator
        or stated
        or _separator(text, whole, path, where=where, names=len(reading.header or ()))
    )
    rows, lines = _rows(text, separator, whole=whole)
    if not rows:
        raise DataError(f"{where}: can't be read: has no line of cells; save it as CSV")
    if reading.header is None:
        first = next(filter(str.strip, text.split("\n")))
        lines = [line + skipped for line in lines]
        require_header_first(rows, lines, first, needed, where=where)
    names, skips_first = _header(rows, reading, separator, where=where, needed=needed)
    cells = rows[1:] if skips_first else rows
    columns = {
        name: [row[place] for row in cells if place < len(row) and row[place].strip()]
        for place, name in enumerate(names)
    }
    decimal = reading.decimal
    if decimal is None and reading.thousands is None:
        numbers = (column for name, column in columns.items() if name not in spelled)
        decimal = "," if any(map(has_decimal_comma, numbers)) else None
    dialect = {
        "separator": separator if not (reading.separator or stated or separator == ",") else None,
        "decimal": decimal if reading.decimal is None else None,
        "encoding": encoding if reading.encoding is None and "utf-8" not in encoding else None,
    }
    known = {name: value for name, value in dialect.items() if value is not None}
    shown = " and ".join(f"the {name} {value!r}" for name, value in known.items())
    notice = f"{where}: recognised {shown}; {reading_entry(**known)} says so for good"
    return Dialect(
        separator=separator,
        decimal=decimal or ".",
        encoding=encoding,
        skipped=skipped,
        names=names,
        skips_first=skips_first,
        skips_blanks=_has_blanks_before_quotes(text, separator),
        gaps={} if reading.empty is not None else _gaps(columns),
        notice=notice if known else None,
    )


def empty_cells(reading: Reading) -> list[str]:
    """Return which cells of a text file stand for no value."""
    return sorted(STR_NA_VALUES) if reading.empty is None else list(reading.empty)


def _gaps(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    first_gaps = {}
    for name, cells in columns.items():
        empty = STR_NA_VALUES.intersection(cells)
        # Among numbers and dates it is no word.
        if empty and any(cell.strip()[0].isalpha() for cell in set(cells) - empty):
            first_gaps[name] = min(empty)
    return first_gaps


def _head(path: Path, *, lines: int, where: str) -> tuple[bytes, bool]:
    """Return a file's first bytes, with so many lines if it has them, and whether that is all."""
    with open_table(path) as stream:
        head, wanted = stream.read(_HEAD), _HEAD
        while len(head) == wanted and max(head.count(b"\n"), head.count(b"\r")) < lines:
            require_text(head, where=where)
            if wanted >= _LONGEST_HEAD:
                raise DataError(
                    f"{where}: can't be read: its first {lines} lines are longer than "
                    f"{_LONGEST_HEAD >> 20} MiB; save the table as CSV, one row a line"
                )
            head += stream.read(wanted)
            wanted *= 2
    return head, len(head) < wanted


def _without_first_lines(text: str, reading: Reading, *, where: str) -> tuple[str, str | None, int]:
    """Return a text from its header on, the separator that it states, and how many lines go."""
    skipped = reading.skip_lines or 0
    lines = text.split("\n", skipped)
    if len(lines) <= skipped or not lines[-1].strip():
        raise DataError(
            f"{where}: reading.skip_lines: leaves nothing of the file's {len(lines)} lines"
        )
    text = lines[-1]
    first, _, rest = text.partition("\n")
    match = _SEP_LINE.fullmatch(first.strip(" "))
    if match is None or match["mark"] in NO_SEPARATOR or not rest.strip():
        return text, None, skipped
    return rest, match["mark"], skipped + 1


def _rows(text: str, separator: str, *, whole: bool) -> tuple[list[list[str]], list[int]]:
    """Return the first rows that are not blank, and the line on which each begins, from 1 on."""
    rows: list[list[str]] = []
    lines: list[int] = []
    blanks = _has_blanks_before_quotes(text, separator)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=blanks)
    begins = 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(begins)
            if len(rows) > _SAMPLE:
                return rows, lines
            begins = reader.line_num + 1
    except csv.Error:
        pass  # a cell of more than 128 KiB; pandas says what it thinks of it
    return (rows if whole or len(rows) < 2 else rows[:-1]), lines


def _has_blanks_before_quotes(text: str, separator: str) -> bool:
    """Return whether some cell's quotes stand behind blanks, where they'd be a part of the cell."""
    if not re.search(rf'(?:^|{re.escape(separator)}) +"', text, re.MULTILINE):
        return False
    with contextlib.suppress(csv.Error):
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            if any(cell[:1] == " " and cell.lstrip(" ")[:1] == '"' for cell in row):
                return True
    return False


def _separator(text: str, whole: bool, path: Path, *, where: str, names: int) -> str:
    tables = {mark: _rows(text, mark, whole=whole)[0] for mark in _SEPARATORS}
    possible = {mark: rows for mark, rows in tables.items() if rows and len(rows[0]) > 1}
    steady = {mark: rows for mark, rows in tables.items() if _usual_width(rows) > 1}
    if steady and not steady.keys() & possible.keys():
        possible = steady  # the first line is a title
    if names:
        fitting = {mark: rows for mark, rows in possible.items() if len(rows[0]) == names}
        possible = fitting or possible
    by_suffix = next((_NAMED_BY_SUFFIX[s] for s in path.suffixes if s in _NAMED_BY_SUFFIX), None)
    if by_suffix in possible:
        return by_suffix
    if len(possible) <= 1:
        return next(iter(possible), ",")
    even = {
        mark: rows
        for mark, rows in possible.items()
        if all(len(row) == len(rows[0]) for row in rows)
    }
    explained = [mark for mark in even if _explains(mark, even)]
    if len(explained) == 1:
        return explained[0]
    marks = " or ".join(repr(mark) for mark in possible)
    ways = " or ".join(reading_entry(separator=mark) for mark in possible)
    raise DataError(f"{where}: its cells may be separated by {marks}; write {ways}")


def _explains(mark: str, tables: dict[str, list[list[str]]]) -> bool:
    """Whether a cell holds another possible separator only where it is a number's decimal mark."""
    others = [other for other in tables if other != mark]
    return all(
        is_number(cell)
        for row in tables[mark]
        for cell in row
        if any(other in cell for other in others)
    )


def _usual_width(rows: Sequence[Sequence[str]]) -> int:
    """Return how many cells more than half of the rows behind the first have; 0 if none do."""
    widths = Counter(map(len, rows[1:]))
    width, count = widths.most_common(1)[0] if widths else (0, 0)
    return width if 2 * count > len(rows) - 1 else 0


def require_header_first(
    rows: Sequence[Sequence[str]],
    lines: Sequence[int],
    first: str,
    needed: Collection[str],
    *,
    where: str,
    line: str = "line",
) -> None:
    """Refuse a file whose first line is a title, or a header that lacks names.

    Args:
        rows: Of the file.
        lines: On which line each begins.
        first: The first line as it stands.
        needed: Columns that the header should have.
        where: Name of the table in messages.
        line: What the file calls a line.

    Raises:
        DataError: Naming that line, and what to write.
    """
    shown = first if len(first) <= _SHOWN else first[:_SHOWN] + "…"
    names = set(needed)
    for place, row in enumerate(rows[:LINES_TO_HEADER] if names else ()):
        if names <= {cell.strip() for cell in row}:
            if place == 0:
                break
            raise DataError(
                f"{where}: can't be read: {line} {lines[0]}, {shown!r}, is no header, and {line} "
                f"{lines[place]} is one; write {reading_entry(skip_lines=lines[place] - 1)}"
            )
    width = _usual_width(rows)
    if len(rows[0]) >= width:
        return
    place = next(place for place, row in enumerate(rows) if len(row) == width)
    count = f"{len(rows[0])} cell" + ("" if len(rows[0]) == 1 else "s")
    todo = f"give each of the {width} columns a name in the header"
    if not any(map(is_number, rows[place])):
        todo = (
            f"if {line} {lines[place]} is the header, write "
            f"{reading_entry(skip_lines=lines[place] - 1)}; else {todo}"
        )
    raise DataError(
        f"{where}: can't be read: {line} {lines[0]}, {shown!r}, has {count}, and most "
        f"{line}s after it have {width}; {todo}"
    )


def _header(
    rows: Sequence[Sequence[str]],
    reading: Reading,
    separator: str,
    *,
    where: str,
    needed: Collection[str],
) -> tuple[tuple[str, ...], bool]:
    first = [cell.strip() for cell in rows[0]]
    if reading.header is not None:
        _require_names_for(first, reading.header, separator, where=where)
        return reading.header, False
    missing = not needed or not set(needed) <= set(first)
    if missing:
        _require_several(first, rows[0], separator, needed=needed, where=where)
        if _is_row(first, rows[1:], any_number=bool(needed)):
            shown = ", ".join(repr(cell[:12]) for cell in first[:4])
            dots = ", …" if len(first) > 4 else ""
            raise DataError(
                f"{where}: seems to have no header, its first line being {shown}{dots}; write "
                f"reading = {{ header = [...] }} with the names of its {len(first)} columns"
            )
    names = [cell or f"unnamed-{place}" for place, cell in enumerate(first, 1)]
    return tuple(names), True


def _require_names_for(
    first: Sequence[str], names: tuple[str, ...], separator: str, *, where: str
) -> None:
    if len(first) != len(names):
        raise DataError(
            f"{where}: reading.header names {len(names)} columns, and its first line has "
            f"{len(first)} cells separated by {separator!r}"
        )
    if tuple(first) == names:
        raise DataError(f"{where}: begins with its header; leave reading.header out")


def _require_several(
    first: Sequence[str], raw: Sequence[str], separator: str, *, needed: Collection[str], where: str
) -> None:
    """Refuse a file that is one column by this separator, where another makes several of it."""
    if len(first) > 1 or len(needed) < 1:
        return
    for other in (*_SEPARATORS, *_OTHERS):
        if other != separator and other in raw[0].strip():
            raise DataError(
                f"{where}: is one column, {raw[0][:_SHOWN]!r}, if {separator!r} separates cells; "
                f"write {reading_entry(separator=other)} if they are several"
            )


def _is_row(first: Sequence[str], others: Sequence[Sequence[str]], *, any_number: bool) -> bool:
    numbers = [is_number(cell) for cell in first]
    if any_number:
        return any(numbers)
    # Years are good names of columns; a header has no number above a column of them everywhere.
    of_numbers = [
        place
        for place in range(len(first))
        if others and all(is_number(row[place]) for row in others if place < len(row))
    ]
    return bool(of_numbers) and all(numbers[place] for place in of_numbers)


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
