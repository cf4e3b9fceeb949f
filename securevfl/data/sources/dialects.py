"""How a text file is written: separator, encoding, decimal mark, header."""

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pandas._libs.parsers import STR_NA_VALUES

from securevfl.core.errors import DataError
from securevfl.data.sources.settings import NO_SEPARATOR, Reading, reading_entry
from securevfl.data.sources.text_encodings import (
    no_such_encoding,
    open_table,
    recognised_encoding,
    require_text,
)
from securevfl.data.sources.text_numbers import has_decimal_comma, is_number

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
