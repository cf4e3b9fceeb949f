"""Read a sheet of an Excel workbook (.xlsx), row by row."""

import datetime
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from securevfl.core.errors import DataError, of_an_extra
from securevfl.core.files import require_unpackable
from securevfl.data.sources.dialects import LINES_TO_HEADER, empty_cells, require_header_first
from securevfl.data.sources.pieces import IN_ROWS, LOST, Pieces, TableSource
from securevfl.data.sources.read import with_dates
from securevfl.data.sources.settings import Reading, Wanted, reading_entry, require_names

if TYPE_CHECKING:
    from openpyxl.workbook import Workbook

_MOST_UNPACKED: Final = 512 * 2**20
_CELLS_OF_A_PIECE: Final = 200_000
# Excel keeps so many digits of a number; the others become zeros.
_DIGITS: Final = 15


def read_workbook(path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
    """Read the wanted columns of a sheet. Formulas count as the values that Excel kept of them.

    Args:
        path: The workbook; refused where it would unpack to more than half a gibibyte.
        reading: ``table`` names the sheet, where there are several; ``skip_lines``, ``header``,
            ``empty`` and ``dates`` count as in a text file.
        wanted: Which columns.
        where: Name of the workbook in messages.

    Raises:
        DataError: If the file is no workbook or too large, has no such
            sheet or column, or a key in it has lost digits.
        OSError: If there is no such file.
    """
    openpyxl = of_an_extra("openpyxl", use=f"{where}:")
    try:
        with path.open("rb") as file:
            require_unpackable(file, most=_MOST_UNPACKED)
            book = openpyxl.load_workbook(file, read_only=True, data_only=True, keep_links=False)
            try:
                sheet = _sheet(book, reading, where=where)
                rows = _rows(sheet, reading)
                frame, places = _table(rows, reading, wanted, where=where)
                gaps = {name: place for name, place in places.items() if frame[name].hasnans}
                if gaps:
                    lost = _unshown(sheet, gaps, skipped=reading.skip_lines or 0)
                    frame.attrs[LOST] = {**lost, **frame.attrs[LOST]}
            finally:
                book.close()
    except (DataError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - readers trust a file's own description
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{where}: can't be read as a workbook ({reason[:200]}); save the table as CSV"
        ) from None
    return with_dates(frame, reading, wanted, where=where)


def _sheet(book: "Workbook", reading: Reading, *, where: str) -> Any:
    sheets = {sheet.title: sheet for sheet in book.worksheets}
    if reading.table is not None:
        require_names(list(sheets), [reading.table], where=f"{where}: reading.table", what="sheet")
    elif len(sheets) != 1:
        ways = " or ".join(reading_entry(table=title) for title in list(sheets)[:3])
        raise DataError(f"{where}: has {len(sheets)} sheets; write {ways or 'a table into it'}")
    sheet: Any = sheets[reading.table] if reading.table is not None else book.worksheets[0]
    sheet.reset_dimensions()  # the size that a file states is often wrong
    return sheet


def _rows(sheet: Any, reading: Reading) -> Iterator[tuple[int, list[Any]]]:
    """Return a sheet's rows that are not blank, without empty cells at their ends, numbered."""
    skipped = reading.skip_lines or 0
    for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
        last = next((i for i in range(len(cells), 0, -1) if cells[i - 1] not in (None, "")), 0)
        if number > skipped and last:
            yield number, list(cells[:last])


def _table(
    rows: Iterator[tuple[int, list[Any]]], reading: Reading, wanted: Wanted, *, where: str
) -> tuple[pd.DataFrame, dict[str, int]]:
    """Return the wanted columns, and the place of each in the sheet."""
    names: Sequence[str]
    if reading.header is not None:
        names = reading.header
    else:
        begin = list(islice(rows, LINES_TO_HEADER))
        if not begin:
            raise DataError(f"{where}: can't be read: is empty")
        first, rows = begin[0][1], chain(begin[1:], rows)
        require_header_first(
            [[_text(cell) for cell in cells] for _, cells in begin],
            [number for number, _ in begin],
            " ".join(_text(cell) for cell in first),
            [*wanted.needed, *wanted.expected],
            where=where,
            line="row",
        )
        names = [_text(cell).strip() or f"unnamed-{i}" for i, cell in enumerate(first, 1)]
    columns = wanted.choose(names, where=where)
    everywhere = empty_cells(reading)
    empty = {name: {*everywhere} - {*wanted.words.get(name, ())} for name in columns}
    places = {name: names.index(name) for name in columns}
    pieces, words = Pieces(exact=wanted.exact), dict[str, str]()
    for piece in _pieces(rows, len(names), where=where):
        made = {
            name: _column(
                [row[place] if place < len(row) else None for _, row in piece],
                [number for number, _ in piece],
                empty[name],
                as_text=name in wanted.as_text,
                where=f"{where}: column {name!r}",
                lost=None if reading.empty is not None else partial(words.setdefault, name),
            )
            for name, place in places.items()
        }
        pieces.add(pd.DataFrame(made))
    frame = pieces.frame()[columns]
    frame.attrs[LOST] = {"words": words}
    return frame, places


def _unshown(sheet: Any, places: Mapping[str, int], *, skipped: int) -> dict[str, dict[str, int]]:
    """Return how many cells of each column are formulas without a value, or merged with others.

    openpyxl reads a formula or its value, and no merged cells row by row.
    """
    from openpyxl.utils import cell, range_boundaries
    from openpyxl.xml.functions import iterparse

    formulas, merged = Counter[int](), Counter[int]()
    with sheet._get_source() as source:
        for _, element in iterparse(source):
            tag = element.tag.rpartition("}")[2]
            if tag == "c" and "r" in element.attrib:
                parts = {part.tag.rpartition("}")[2]: part.text for part in element}
                row, column = cell.coordinate_to_tuple(element.attrib["r"])
                # A formula whose value is the empty text says that it is a text.
                uncalculated = "f" in parts and not parts.get("v") and element.get("t") != "str"
                if row > skipped and uncalculated:
                    formulas[column - 1] += 1
            elif tag == "mergeCell":
                first, top, last, bottom = range_boundaries(element.attrib["ref"])
                for column in range(first, last + 1):
                    merged[column - 1] += bottom - max(top, skipped) + (column > first)
            elif tag == "row":
                element.clear()
    counts = {"formulas": formulas, "merged": merged}
    return {
        kind: {name: count[place] for name, place in places.items() if count[place] > 0}
        for kind, count in counts.items()
    }


def _pieces(
    rows: Iterator[tuple[int, list[Any]]], width: int, *, where: str
) -> Iterator[list[tuple[int, list[Any]]]]:
    most = max(100, _CELLS_OF_A_PIECE // width)
    piece: list[tuple[int, list[Any]]] = []
    for number, row in rows:
        if len(row) > width:
            raise DataError(
                f"{where}: can't be read: row {number:,} has {len(row)} cells, and its header has "
                f"{width} names"
            )
        piece.append((number, row))
        if len(piece) == most:
            yield piece
            piece = []
    yield piece  # of no rows, if there are none


def _column(
    cells: list[Any],
    numbers: Sequence[int],
    empty: Collection[str],
    *,
    as_text: bool,
    where: str,
    lost: Callable[[str], object] | None,
) -> "pd.Series[Any]":
    """Return cells as a column of one kind, texts where they are of several.

    A word that counts as empty among others goes to ``lost``.
    """
    words = {cell for cell in cells if isinstance(cell, str) and cell.strip()}
    gaps = words & {*empty}
    if lost is not None and gaps and any(word.strip()[0].isalpha() for word in words - gaps):
        lost(min(gaps))
    cells = [None if isinstance(cell, str) and cell in empty else cell for cell in cells]
    if as_text:
        for number, cell in zip(numbers, cells, strict=True):
            if isinstance(cell, int | float) and abs(cell) >= 10**_DIGITS:
                raise DataError(
                    f"{where}, row {number:,}: is a number of more than {_DIGITS} digits, of which "
                    f"Excel keeps no more; write the column from its source as text"
                )
    if as_text or any(isinstance(cell, str) for cell in cells):
        return pd.Series([None if cell is None else _text(cell) for cell in cells], dtype="str")
    return pd.Series(cells, dtype=object).infer_objects().convert_dtypes()


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, datetime.datetime):
        return cell.date().isoformat() if cell.time() == datetime.time() else cell.isoformat()
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


WORKBOOK: Final = TableSource(kind="workbook", settings=("table", *IN_ROWS), read=read_workbook)
"""Workbooks of Excel, as it writes them since 2007."""
