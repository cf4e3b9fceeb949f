"""How a text file is written: separator, encoding, decimal mark, header."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pandas._libs.parsers import STR_NA_VALUES

from securevfl.core.errors import DataError
from securevfl.data.sources.encodings import no_such_encoding, recognised_encoding
from securevfl.data.sources.opening import opened, require_text
from securevfl.data.sources.settings import NO_SEPARATOR, Reading, written
from securevfl.data.sources.written_numbers import has_decimal_comma, is_number

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How one text file is read."""

    separator: str
    decimal: str
    encoding: str
    skipped: int
    """Lines before the header that are no part of the table."""
    names: tuple[str, ...]
    """Its columns, in the order of the file."""
    skips_first: bool
    """Whether the first line is the header, and no row."""
    gaps: Mapping[str, str]
    """Of columns that hold words in the first lines: a word among them that counts as empty."""
    notice: str | None
    """What was recognised that is not usual, and what says it for good."""


def dialect_of(
    path: Path, reading: Reading, *, where: str, needed: Collection[str], spelled: Collection[str]
) -> Dialect:
    """Recognise how a text file is written, from its first quarter of a mebibyte, or three lines.

    Args:
        path: The file.
        reading: What its user says of it.
        where: What messages call it.
        needed: Columns that it should have; a line with all of them is its header.
        spelled: Columns that are texts whatever they hold.

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
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(_decoded(head, encoding))
    except UnicodeDecodeError:
        raise no_such_encoding(path, encoding, where=where) from None
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
    rows = _rows(text, separator, whole=whole)
    if not rows:
        raise DataError(f"{where}: can't be read: has no line of cells; save it as CSV")
    if reading.header is None:
        _require_header_first(rows, _Lines(text, separator, skipped), needed, where=where)
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
    found = {
        "separator": separator if not (reading.separator or stated or separator == ",") else None,
        "decimal": decimal if reading.decimal is None else None,
        "encoding": encoding if reading.encoding is None and "utf-8" not in encoding else None,
    }
    known = {name: value for name, value in found.items() if value is not None}
    notice = f"{where}: recognised {_said(known)}; {written(**known)} says so for good"
    return Dialect(
        separator=separator,
        decimal=decimal or ".",
        encoding=encoding,
        skipped=skipped,
        names=names,
        skips_first=skips_first,
        gaps={} if reading.empty is not None else _gaps(columns),
        notice=notice if known else None,
    )


def recognised(reading: Reading, dialect: Dialect) -> Reading:
    """Return a reading with the decimal mark that was recognised."""
    decimal = "," if dialect.decimal == "," else reading.decimal
    return replace(reading, decimal=decimal)


def empty_cells(reading: Reading) -> list[str]:
    """Return which cells of a text file stand for no value."""
    return sorted(STR_NA_VALUES) if reading.empty is None else list(reading.empty)


def _gaps(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    found = {}
    for name, cells in columns.items():
        empty = STR_NA_VALUES.intersection(cells)
        # Among numbers and dates it is no word.
        if empty and any(cell.strip()[0].isalpha() for cell in set(cells) - empty):
            found[name] = min(empty)
    return found


def _head(path: Path, *, lines: int, where: str) -> tuple[bytes, bool]:
    """Return a file's first bytes, with so many lines if it has them, and whether that is all."""
    with opened(path) as stream:
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
    found = _SEP_LINE.fullmatch(first.strip(" "))
    if found is None or found["mark"] in NO_SEPARATOR or not rest.strip():
        return text, None, skipped
    return rest, found["mark"], skipped + 1


def _decoded(head: bytes, encoding: str) -> str:
    # The last letter may have been cut in two.
    return codecs.getincrementaldecoder(encoding)().decode(head)


def _rows(text: str, separator: str, *, whole: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator):
            if row:
                rows.append(row)
            if len(rows) > _SAMPLE:
                return rows
    except csv.Error:
        pass  # a cell of more than 128 KiB; pandas says what it thinks of it
    return rows if whole or len(rows) < 2 else rows[:-1]


def _separator(text: str, whole: bool, path: Path, *, where: str, names: int) -> str:
    tables = {mark: _rows(text, mark, whole=whole) for mark in _SEPARATORS}
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
    ways = " or ".join(written(separator=mark) for mark in possible)
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


@dataclass(frozen=True)
class _Lines:
    """Where in its file each row of a text lies."""

    text: str
    separator: str
    skipped: int

    def of_row(self, place: int) -> int:
        """Return the number of the line on which a row begins, counted from 1."""
        reader = csv.reader(io.StringIO(self.text, newline=""), delimiter=self.separator)
        begins = 1
        for row in reader:
            if row and place == 0:
                break
            place -= bool(row)
            begins = reader.line_num + 1
        return begins + self.skipped

    def first(self) -> str:
        """Return the first line as it stands, for messages."""
        line = next(filter(str.strip, self.text.split("\n")))
        return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"


def _usual_width(rows: Sequence[Sequence[str]]) -> int:
    """Return how many cells more than half of the rows behind the first have; 0 if none do."""
    widths = Counter(map(len, rows[1:]))
    width, count = widths.most_common(1)[0] if widths else (0, 0)
    return width if 2 * count > len(rows) - 1 else 0


def _require_header_first(
    rows: Sequence[Sequence[str]], lines: _Lines, needed: Collection[str], *, where: str
) -> None:
    """Refuse a file whose first line is a title, or a header that lacks names.

    Raises:
        DataError: Naming that line, and what to write.
    """
    names = set(needed)
    for place, row in enumerate(rows[:_SHOWN] if names else ()):
        if names <= {cell.strip() for cell in row}:
            if place == 0:
                break
            before = lines.of_row(place) - 1
            raise DataError(
                f"{where}: can't be read: line {lines.of_row(0)}, {lines.first()!r}, is no "
                f"header, and line {before + 1} is one; write {written(skip_lines=before)}"
            )
    width = _usual_width(rows)
    if len(rows[0]) >= width:
        return
    place = next(place for place, row in enumerate(rows) if len(row) == width)
    found = (
        f"line {lines.of_row(0)}, {lines.first()!r}, has {_cells(rows[0])}, and most lines after "
        f"it have {width}"
    )
    todo = f"give each of the {width} columns a name in the header"
    if not any(map(is_number, rows[place])):
        before = lines.of_row(place) - 1
        todo = (
            f"if line {before + 1} is the header, write {written(skip_lines=before)}; else {todo}"
        )
    raise DataError(f"{where}: can't be read: {found}; {todo}")


def _cells(row: Sequence[str]) -> str:
    return f"{len(row)} cell" + ("" if len(row) == 1 else "s")


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
                f"write {written(separator=other)} if they are several"
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


def _said(known: dict[str, str]) -> str:
    return " and ".join(f"the {name} {value!r}" for name, value in known.items())
