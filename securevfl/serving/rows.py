"""Rows as JSON: what a model's columns ask of them, and the frame that they become.

A feature that may be missing may be left out. One that the model does not know is refused: a
misspelt name would otherwise be a missing value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, create_model

from securevfl.core.errors import DataError
from securevfl.data.cells import dates_of
from securevfl.data.schema import TableSchema

Kind = Literal["number", "boolean", "words", "date", "text"]

MOST_LINES: Final = 20
"""Problems that are listed; of the others only their number is told."""

_LONGEST_NAME: Final = 60
_KEY: Final = "key; a row without one is predicted by the primary's columns alone"
_FLOAT32: Final = float(np.finfo(np.float32).max)
_NUMBER: Final = Annotated[
    float, Field(strict=True, allow_inf_nan=False, ge=-_FLOAT32, le=_FLOAT32)
]
_TYPES: Final[Mapping[Kind, Any]] = {
    "number": _NUMBER,
    "boolean": StrictBool,
    "words": StrictStr | StrictInt,
    "date": StrictStr,
    "text": StrictStr | StrictInt,
}
_EXPECTED: Final[Mapping[Kind, str]] = {
    "number": "must be a number within float32",
    "boolean": "must be true or false",
    "words": "must be a text",
    "date": "must be a date such as 2020-12-31",
    "text": "must be a text",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowColumn:
    """One column of a row."""

    name: str
    kind: Kind
    required: bool
    """Whether it must be there."""
    nullable: bool
    """Whether it may be null."""
    note: str
    """What it is for."""


class BadRowsError(DataError):
    """Rows hold what their columns do not."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = tuple(lines)
        """What is wrong, a line a cell."""


class RowFormat:
    """The rows that a model takes."""

    def __init__(self, columns: Sequence[RowColumn]) -> None:
        self.columns = tuple(columns)
        self._by_name = {column.name: column for column in columns}
        fields: dict[str, Any] = {
            f"column_{number}": _field(column) for number, column in enumerate(columns)
        }
        strict = ConfigDict(extra="forbid")
        row = create_model("Row", __config__=strict, **fields)
        self.question: type[BaseModel] = create_model(
            "Question",
            __config__=strict,
            rows=(list[row] | None, Field(default=None, description="Rows to predict.")),  # type: ignore[valid-type]
            row=(row | None, Field(default=None, description="One row, instead of rows.")),
        )
        """What is asked: ``rows``, or one ``row``."""

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
                )
            )
        return cls([*keys, *texts, *features])

    def rows_of(self, question: BaseModel) -> list[BaseModel]:
        """Return the rows that are asked for.

        Raises:
            DataError: If there are none, or they come in both ways.
        """
        rows, row = question.rows, question.row  # type: ignore[attr-defined]
        if (rows is None) == (row is None):
            raise DataError('the body has either "rows", a list, or "row", one of them')
        found = [row] if rows is None else list(rows)
        if not found:
            raise DataError('"rows" is empty')
        return found

    def frame(self, rows: Sequence[BaseModel]) -> pd.DataFrame:
        """Return rows as a table, numbers as float64 and everything else as it came.

        Raises:
            BadRowsError: Naming every row and column with a text that is no date.
        """
        cells: dict[str, Any] = {}
        wrong: list[tuple[int, str]] = []
        for number, column in enumerate(self.columns):
            values = [getattr(row, f"column_{number}") for row in rows]
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

    def problems(self, errors: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return what is wrong with a body, one line a cell; never what a cell holds.

        Args:
            errors: As pydantic reports them.
        """
        found: dict[str, None] = {}
        for error in errors:
            place = [part for part in error["loc"] if part != "body"]
            if not place or place[0] not in ("rows", "row"):
                found[_of_body(error, place)] = None
                continue
            row = place[1] if place[0] == "rows" and len(place) > 1 else 0
            rest = place[2:] if place[0] == "rows" else place[1:]
            if not isinstance(row, int) or not rest:
                found[_rows_expected(place)] = None
                continue
            found[_line(row, str(rest[0]), self._said_of(error, str(rest[0])))] = None
        return list(found)

    def _said_of(self, error: Mapping[str, Any], name: str) -> str:
        column = self._by_name.get(name)
        if error["type"] == "extra_forbidden" or column is None:
            return "is no column of the model"
        if error["type"] == "missing" or error.get("input", 0) is None:
            return "is missing"
        return _EXPECTED[column.kind]


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[:MOST_LINES], f"and {len(lines) - MOST_LINES} more"]


def _field(column: RowColumn) -> tuple[Any, Any]:
    of = _TYPES[column.kind] | None if column.nullable else _TYPES[column.kind]
    if column.required:
        return (of, Field(alias=column.name, description=column.note))
    return (of, Field(default=None, alias=column.name, description=column.note))


def _line(row: int, column: str, what: str) -> str:
    return f"row {row + 1}, column {column[:_LONGEST_NAME]!r}: {what}"


def _of_body(error: Mapping[str, Any], place: Sequence[Any]) -> str:
    if error["type"] == "extra_forbidden":
        return f'the body has {str(place[0])[:_LONGEST_NAME]!r}; it has "rows" or "row" alone'
    return 'the body must be JSON: {"rows": [{...}, ...]} or {"row": {...}}'


def _rows_expected(place: Sequence[Any]) -> str:
    if len(place) > 1 and isinstance(place[1], int):
        return f"row {place[1] + 1}: must be an object, one value a column"
    return '"rows" must be a list of objects, and "row" one object'
