"""Schema of a table: how its columns become keys, features and labels.

It is fitted to one table, saved as JSON, and encodes rows of other tables in the same way.
:attr:`TableSchema.data_dependent` lists what was taken from the first table's records instead of
being declared: a promise about records must not depend on it.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float32

from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.formatting import toml_key
from securevfl.core.settings import read_settings
from securevfl.data.cells import require_columns
from securevfl.data.columns import (
    BooleanColumn,
    Column,
    DateColumn,
    NumberColumn,
    WordsColumn,
    encode_column,
    features_of_column,
    fit_column,
)
from securevfl.data.scaling import Bounds, ColumnSettings, Dependence, Pair, declared_range
from securevfl.data.sources.settings import first_repeated

T = TypeVar("T")

FORMAT: Final = 3
"""Version of the saved form."""

_KINDS: Final[Mapping[str, type[Column]]] = {
    "number": NumberColumn,
    "boolean": BooleanColumn,
    "words": WordsColumn,
    "date": DateColumn,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyColumn:
    """A numeric key column."""

    name: str
    """The column's name."""

    kind: Literal["number", "date"]
    """Dates are keys as days since 1970-01-01."""

    is_id: bool = False
    """True for an identifier, not a place: different whole numbers in the primary's only key
    column. It links, and is no input of the primary's local models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelColumn:
    """What is predicted."""

    name: str
    """The column's name."""

    task: Task
    """Kind of label: regression, binary or multiclass."""

    classes: tuple[str | bool | int | float, ...] | None
    """The original value of each class number; None for regression."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSchema:
    """Encoding of a table; equal schemas encode equal rows equally, to the last bit."""

    columns: tuple[Column, ...]
    """Feature columns, in the order of their features."""

    missing: Literal["fill", "refuse"]
    """Treatment of missing values: filled in or refused."""

    data_dependent: tuple[Dependence, ...] = ()
    """Statistics taken from the records of the table that it was fitted to."""

    keys: tuple[KeyColumn, ...] = ()
    """Numeric key columns, in their order."""

    label: LabelColumn | None = None
    """The label column, at the primary."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name a feature: those of columns of numbers, ``column=word``, and so on."""
        return tuple(name for column in self.columns for name in features_of_column(column))

    def encode(
        self, frame: pd.DataFrame, *, where: str
    ) -> tuple[tuple[str, ...], Float32[np.ndarray, "rows features"]]:
        """Encode a table that has these columns, in any order and among others.

        A word that was not there when the schema was fitted is ``other`` where there is that word,
        and else 0 in all of the column's features. A value that is missing where none was is filled
        in without a flag.

        Args:
            frame: The table.
            where: Name of the table in messages.

        Returns:
            Names and values of the features.

        Raises:
            DataError: If a column is not there, or holds something else than it did.
        """
        require_columns(frame, [column.name for column in self.columns], where=where)
        parts = [
            encode_column(
                column,
                frame[column.name],
                refuse=self.missing == "refuse",
                where=f"{where}: column {column.name!r}",
            )
            for column in self.columns
        ]
        return self.feature_names, _side_by_side(parts, len(frame))

    def unknown_words(self, frame: pd.DataFrame) -> dict[str, int]:
        """Return how many cells hold words that the schema does not know, of columns with any."""
        counts = {
            column.name: column.unknown(frame[column.name])
            for column in self.columns
            if isinstance(column, WordsColumn)
        }
        return {name: count for name, count in counts.items() if count}

    def feature_bounds(self, bounds: Bounds) -> dict[str, Pair]:
        """Return the range of each feature, of what a party declares of its columns.

        Truth values, words and flags lie in [0, 1], sines and cosines in [-1, 1], for any data; a
        declared range of a feature's own name comes first.

        Args:
            bounds: ``[low, high]`` of all columns of numbers, or such a pair by column or feature,
                of dates as texts.

        Raises:
            ConfigError: If a date has no bounds, or some that are no dates.
        """
        ranges: dict[str, Pair] = {}
        for column in self.columns:
            natural = (*column.natural_bounds, *(((0.0, 1.0),) if column.flagged else ()))
            for name, own in zip(features_of_column(column), natural, strict=True):
                declared = _declared_range(column, name, own, bounds)
                if declared is not None:
                    ranges[name] = declared
        return ranges

    def describe(self) -> list[str]:
        """Return a line for each column: its kind, its encoding, its number of features.

        The only value of the table in them is the day from which days are counted.
        """
        return [self._line(column) for column in self.columns]

    def _line(self, column: Column) -> str:
        flag = ", and whether it is missing" if column.flagged else ""
        number = len(features_of_column(column))
        plural = "" if number == 1 else "s"
        return f"{column.name}: {column.kind}; {column.encoding}{flag}; {number} feature{plural}"

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, content: Any, *, where: str = "schema") -> "TableSchema":
        """Read a saved schema.

        Args:
            content: Parsed JSON.
            where: Name of the table in messages.

        Raises:
            DataError: If it is damaged.
        """
        try:
            return _read(cls, content)
        except ConfigError as error:
            raise DataError(f"{where}: is damaged: {error}") from None


def fit_schema(
    frame: pd.DataFrame, columns: Sequence[str], settings: ColumnSettings, *, where: str
) -> tuple[TableSchema, Float32[np.ndarray, "rows features"], list[str]]:
    """Fit a schema, encode the table that it is fitted to, and collect all that is wrong.

    Returns:
        The schema and the features of the columns that can be such, and one line for each that
        can't.
    """
    fitted: list[Column] = []
    parts: list[np.ndarray] = []
    dependent: list[Dependence] = []
    problems: list[str] = []
    for name in columns:
        try:
            column, encoded, taken = fit_column(
                frame[name], name, settings, where=f"{where}: column {name!r}"
            )
        except DataError as error:
            problems.append(str(error))
            continue
        fitted.append(column)
        parts.append(encoded)
        dependent += taken
    schema = TableSchema(
        columns=tuple(fitted), missing=settings.missing, data_dependent=tuple(dependent)
    )
    names = schema.feature_names
    problems += [
        f"{where}: two features would be called {name!r}; rename a column"
        for name in sorted(name for name, count in Counter(names).items() if count > 1)
    ]
    return schema, _side_by_side(parts, len(frame)), problems


def first_problem(problems: Sequence[str]) -> DataError:
    """Return the first of a table's problems as an error, with the number of others."""
    more = f" (and {len(problems) - 1} more; securevfl check lists them)"
    return DataError(problems[0] + (more if len(problems) > 1 else ""))


def _side_by_side(parts: Sequence[np.ndarray], rows: int) -> np.ndarray:
    return np.hstack(parts) if parts else np.empty((rows, 0), dtype=np.float32)


def _declared_range(
    column: Column,
    feature: str,
    natural: Pair | None,
    bounds: Bounds,
) -> Pair | None:
    declared = bounds.get(feature) if isinstance(bounds, Mapping) else None
    if natural is not None and declared is None:
        return natural
    if isinstance(column, DateColumn):
        pair = bounds.get(column.name) if isinstance(bounds, Mapping) else None
        example = f'{toml_key(column.name)} = ["2015-01-01", "2025-12-31"]'
        if pair is None or not all(isinstance(bound, str) for bound in pair):
            raise ConfigError(f"bounds: the dates {column.name!r} need their own: {example}")
        low, high = declared_range(pair)
        return low - column.origin, high - column.origin
    pair = declared if isinstance(bounds, Mapping) else bounds
    if pair is None:
        return None
    if any(isinstance(bound, str) for bound in pair):
        raise ConfigError(f"bounds: of {feature!r} must be numbers, got {list(pair)}")
    return declared_range(pair)


def _read(cls: type[TableSchema], content: Any) -> TableSchema:
    rest = dict(content) if isinstance(content, dict) else {}
    kept = rest.pop("format", None)
    if kept != FORMAT:
        raise ConfigError(f"format: must be {FORMAT}, got {kept!r}")
    for name in {field.name for field in dataclasses.fields(cls)} - {*rest}:
        raise ConfigError(f"{name}: is missing")
    columns = rest["columns"]
    if not isinstance(columns, list | tuple):
        raise ConfigError(f"columns: must be a list, got {type(columns).__name__}")
    schema = read_settings(cls, {**rest, "columns": ()}, where="schema")
    read = tuple(_read_column(column, f"columns[{place}]") for place, column in enumerate(columns))
    if (twice := first_repeated(column.name for column in read)) is not None:
        raise ConfigError(f"columns: two are called {twice!r}")
    return dataclasses.replace(schema, columns=read)


def _read_column(table: Any, where: str) -> Column:
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f"{where}.kind: must be one of {', '.join(_KINDS)}; got {kind!r}")
    for name, value in table.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}.{name}: must be finite, got {value}")
    return read_settings(_KINDS[kind], table, where=where)
