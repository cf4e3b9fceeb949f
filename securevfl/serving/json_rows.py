"""Rows as JSON: their schema by a model's columns, and conversion to a frame.

A feature that may be missing may be left out. Columns that the model does not know are left out of
account, as they are in a file of new rows; in a row that lacks a feature they are refused, since a
misspelt name would otherwise be a missing value.

Rows are counted before they are read, each is checked for the model's own columns alone, and the
check ends soon after :data:`MOST_LINES` problems: what a body costs follows from its size, whatever
it holds.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, create_model
from pydantic_core import from_json

from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.data.cells import dates_of, with_sign
from securevfl.data.columns import NumberColumn
from securevfl.data.schema import TableSchema

Kind = Literal["number", "boolean", "words", "date", "text"]

MOST_LINES: Final = 20
"""Problems that are listed; the check ends soon after."""

_LONGEST_NAME: Final = 60
_LONGEST_TEXT: Final = 1000
_LARGEST_CODE: Final = 2**63 - 1
# One that is not closed runs to the end: a failed match would be tried again at each quote.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_STRICT: Final = ConfigDict(extra="forbid")
_KEY: Final = "key; a row without one is predicted by the primary's columns alone"
_FLOAT32: Final = float(np.finfo(np.float32).max)
_NUMBER: Final = Annotated[
    float, Field(strict=True, allow_inf_nan=False, ge=-_FLOAT32, le=_FLOAT32)
]
_TEXT: Final = Annotated[str, Field(strict=True, max_length=_LONGEST_TEXT)]
_CODE: Final = Annotated[int, Field(strict=True, ge=-_LARGEST_CODE, le=_LARGEST_CODE)]
_TYPES: Final[Mapping[Kind, Any]] = {
    "number": _NUMBER,
    "boolean": StrictBool,
    "words": _TEXT | _CODE,
    "date": _TEXT,
    "text": _TEXT | _CODE,
}
_NO_NUMBER: Final = "must be a number as JSON writes it, such as 1.5: no text, true or false"
_EXPECTED: Final[Mapping[Kind, str]] = {
    "number": "must be a number within float32",
    "boolean": "must be true or false",
    "words": f"must be a text of at most {_LONGEST_TEXT:,} characters",
    "date": "must be a date such as 2020-12-31",
    "text": f"must be a text of at most {_LONGEST_TEXT:,} characters",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """One column of a row."""

    name: str
    kind: Kind
    required: bool
    """True if the column must be there."""
    nullable: bool
    """True if the column may be null."""
    note: str
    """Purpose of the column."""
    sign: str = ""
    """Sign of the column's numbers in tables; a JSON row has the number alone."""


class BadRowsError(DataError):
    """Error of a body without valid rows.

    Its lines name rows and columns, and never quote a cell.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        more = ["and more"] if len(lines) > MOST_LINES else []
        self.lines = (*lines[:MOST_LINES], *more)
        """Problems, a line for each cell."""
        super().__init__("; ".join(self.lines))


class TooManyRowsError(DataError):
    """Error of a body with more rows than a request may have."""


class RowFormat:
    """The rows that a model takes."""

    def __init__(self, columns: Sequence[RowColumn]) -> None:
        self.columns = tuple(columns)
        self._by_name = {column.name: column for column in columns}
        fields: dict[str, Any] = {
            f"column_{number}": _field(column) for number, column in enumerate(columns)
        }
        self._row = create_model("Row", __config__=_STRICT, **fields)

    def question(self, *, most_rows: int) -> type[BaseModel]:
        """Return the schema of a body, for clients: ``rows``, or one ``row``.

        Args:
            most_rows: Most rows of one request.
        """
        rows = Field(default=None, max_length=most_rows, description="Rows to predict.")
        return create_model(
            "Question",
            __config__=_STRICT,
            rows=(list[self._row] | None, rows),  # type: ignore[name-defined,arg-type]
            row=(self._row | None, Field(default=None, description="One row, instead of rows.")),
        )

    @classmethod
    def of(
        cls, schema: TableSchema, text_keys: Mapping[str, Literal["text", "number"]]
    ) -> "RowFormat":
        """Return the format of a model's rows.

        Args:
            schema: The model's.
            text_keys: Key columns that are compared as they are, by the table's own names; none
                where keys are numbers that the schema has.
        """
        keys = [
            RowColumn(name=key.name, kind=key.kind, required=True, nullable=True, note=_KEY)
            for key in schema.keys
        ]
        texts = [
            RowColumn(name=name, kind=kind, required=True, nullable=True, note=_KEY)
            for name, kind in text_keys.items()
        ]
        features = []
        for column in schema.columns:
            fills = schema.missing == "fill" and column.fills is not None
            features.append(
                RowColumn(
                    name=column.name,
                    kind=column.kind,
                    required=not fills,
                    nullable=fills,
                    note=f"feature: {column.encoding}",
                    sign=column.sign if isinstance(column, NumberColumn) else "",
                )
            )
        return cls([*keys, *texts, *features])

    def read(self, body: bytes, *, most_rows: int) -> pd.DataFrame:
        """Return the rows of a body as a table, numbers as float64 and all else as it came.

        Args:
            body: JSON: ``{"rows": [{...}, ...]}`` or ``{"row": {...}}``.
            most_rows: Most rows of one request.

        Raises:
            TooManyRowsError: Before any row is checked.
            BadRowsError: Naming the first rows and columns that are wrong.
        """
        rows: list[BaseModel] = []
        lines: list[str] = []
        for number, cells in enumerate(_rows_of(body, most_rows)):
            try:
                rows.append(self._check_row(number, cells))
            except BadRowsError as error:
                lines += error.lines
            if len(lines) > MOST_LINES:
                break
        if lines:
            raise BadRowsError(lines)
        return self._frame(rows)

    def _check_row(self, number: int, cells: Any) -> BaseModel:
        if not isinstance(cells, dict):
            raise BadRowsError([f"row {number + 1}: must be an object, one value a column"])
        known = {name: cells[name] for name in self._by_name if name in cells}
        lines = self._misspelt(number, cells) if len(known) < len(self._by_name) else []
        try:
            row: BaseModel = self._row.model_validate(known)
        except ValidationError as error:
            lines = [*dict.fromkeys(self._problems(number, error)), *lines]
            raise BadRowsError(lines) from None
        if lines:
            raise BadRowsError(lines)
        return row

    def _misspelt(self, number: int, cells: Mapping[str, Any]) -> list[str]:
        """Return a line for each unknown column of a row that lacks some column."""
        absent = [name for name in self._by_name if name not in cells]
        unknown = (name for name in cells if name not in self._by_name)
        first = repr(absent[0][:_LONGEST_NAME])
        lines = []
        for name in islice(unknown, MOST_LINES + 1):
            meant = checks.did_you_mean(name[:_LONGEST_NAME], absent)
            todo = meant or f", and {first} is not there; write null for it if it is missing"
            lines.append(_line(number, name, f"is no column of the model{todo}"))
        return lines

    def _problems(self, number: int, error: ValidationError) -> Iterator[str]:
        """Yield the problems of a row, a line for each cell; some come twice."""
        for detail in error.errors(include_url=False, include_context=False):
            name = str(detail["loc"][0])
            what = _EXPECTED[self._by_name[name].kind]
            if detail["type"] == "missing" or detail["input"] is None:
                what = "is missing"
            elif detail["type"] == "float_type":
                what = _NO_NUMBER
            yield _line(number, name, what)

    def _frame(self, rows: Sequence[BaseModel]) -> pd.DataFrame:
        cells: dict[str, Any] = {}
        wrong: list[tuple[int, str]] = []
        for number, column in enumerate(self.columns):
            values = [getattr(row, f"column_{number}") for row in rows]
            if column.kind == "number" and column.sign:
                signed = [v if v is None else with_sign(v, column.sign) for v in values]
                cells[column.name] = pd.Series(signed, dtype=object)
                continue
            if column.kind == "number":
                cells[column.name] = np.array(values, dtype=np.float64)
                continue
            spelled = column.kind in ("words", "text", "date")
            texts = [str(value) if spelled and value is not None else value for value in values]
            series = pd.Series(texts, dtype=object)
            cells[column.name] = series
            if column.kind == "date":
                bad = np.isnat(dates_of(series)) & series.notna().to_numpy(dtype=bool)
                wrong += [(int(row), column.name) for row in np.flatnonzero(bad)]
        if wrong:
            lines = [_line(row, name, _EXPECTED["date"]) for row, name in sorted(wrong)]
            raise BadRowsError(lines)
        return pd.DataFrame(cells)


def _rows_of(body: bytes, most_rows: int) -> list[Any]:
    """Return the rows of a body, not checked yet.

    Objects and lists are counted before JSON makes them: a million of them cost seconds of garbage
    collection, in which nothing else of the process runs.
    """
    too_many = TooManyRowsError(f"a request may have {most_rows} rows, of single values")
    nested = most_rows + 2  # the body, "rows" and each row
    if _count_brackets(body) > nested and _count_brackets(_STRING.sub(b"", body)) > nested:
        raise too_many
    try:
        asked = from_json(body, allow_inf_nan=False)
        # Of two values of one name, the reader above keeps the last.
        json.loads(body, object_pairs_hook=_require_different)
    except BadRowsError:  # it is a ValueError, too
        raise
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise BadRowsError(
            ['the body must be JSON: {"rows": [{...}, ...]} or {"row": {...}}'],
        )
    for name in asked:
        if name not in ("rows", "row"):
            shown = name[:_LONGEST_NAME]
            raise BadRowsError([f'the body has {shown!r}; it has "rows" or "row" alone'])
    rows, row = asked.get("rows"), asked.get("row")
    if (rows is None) == (row is None):
        raise BadRowsError(['the body has either "rows", a list, or "row", one of them'])
    if rows is None:
        return [row]
    if not isinstance(rows, list):
        raise BadRowsError(['"rows" must be a list of objects, and "row" one object'])
    if not rows:
        raise BadRowsError(['"rows" is empty'])
    if len(rows) > most_rows:
        raise too_many
    return rows


def _require_different(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with a repeated name.

    Raises:
        BadRowsError: Naming it.
    """
    seen = set[str]()
    for name, _ in pairs:
        if name in seen:
            raise BadRowsError([f"{name[:_LONGEST_NAME]!r} is there twice in one object"])
        seen.add(name)


def _count_brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _field(column: RowColumn) -> tuple[Any, Any]:
    of = _TYPES[column.kind] | None if column.nullable else _TYPES[column.kind]
    if column.required:
        return (of, Field(alias=column.name, description=column.note))
    return (of, Field(default=None, alias=column.name, description=column.note))


def _line(row: int, column: str, what: str) -> str:
    return f"row {row + 1}, column {column[:_LONGEST_NAME]!r}: {what}"
