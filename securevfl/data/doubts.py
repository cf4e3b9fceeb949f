"""Doubts about a table: what its owner should look at before links or a model rest on it.

Every command that reads a table asks :data:`DOUBTS`, once. A sentence names a column and what to do
about it. It quotes no cell of a record; a value that many rows share in place of none, such as
-9999, it names.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from securevfl.core.formatting import toml_value
from securevfl.data.cells import (
    amounts_of,
    are_whole_dates,
    dates_of,
    days_of,
    numbers_of,
    share_with_zone,
    texts_of,
    unit_of,
)
from securevfl.data.column_kinds import ColumnKind, numbers_rows
from securevfl.data.columns import Column, NumberColumn
from securevfl.data.scaling import NOTHING_DECLARED, ColumnSettings, FeatureScaler, declared_range
from securevfl.data.schema import TableSchema
from securevfl.data.sources.pieces import LOST

# A number of nines, or a date, in place of none lies this many times the others' range away from
# them, and any other number so many times.
_APART: Final = 0.5
_FAR_APART: Final = 10.0
_FEWEST_ALIKE: Final = 5
_NINES: Final = re.compile(r"-?(9{2,}|8{3,})")
_NO_DATES: Final = [
    *("0001-01-01", "1753-01-01", "1900-01-01", "1970-01-01"),
    *("2099-12-31", "2999-12-31", "9999-01-01", "9999-12-31"),
]
# A key that stands for none: of so many rows, of such a share of all, and of so many times more
# than other keys are.
_FEWEST_STAND_INS: Final = 10
_STAND_INS: Final = 0.02
_TIMES_OTHERS: Final = 10
_SHARED: Final = 0.1
_FEWEST_GROUPS: Final = 20
# A range that cells use less of than this share is in another unit, and so are new numbers so many
# deviations away.
_USED: Final = 0.02
_DEVIATIONS: Final = 10.0
_FEWEST_NEW: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TableInUse:
    """A table as it was read, and what its columns are for."""

    frame: pd.DataFrame

    key: Sequence[str] = ()
    """Columns that parties link by."""

    label: str | None = None
    """The label column, at a primary whose rows train."""

    numeric_label: bool = False
    """Whether the label is a number to predict, not a class."""

    features: Mapping[str, Column | ColumnKind] = field(default_factory=dict)
    """Kinds of the feature columns, by name."""

    settings: ColumnSettings = NOTHING_DECLARED
    """What is declared of the columns."""

    row_numbers: Sequence[str] = ()
    """Columns that are left out as stored row numbers without a name."""

    random_split: bool = False
    """Whether a row's side of the split has nothing to do with its key."""

    trained: TableSchema | None = None
    """Encoding of the rows that a model was trained on, where these are new ones."""

    encoded: np.ndarray | None = None
    """Features of new rows, as ``trained`` encodes them."""

    scaler: FeatureScaler | None = None
    """Scaling that the model's training rows gave, or the declared one."""

    def of_kind(self, kind: str) -> Iterator[tuple[str, "pd.Series[Any]", str]]:
        """Yield name, cells and sign of the feature columns of a kind."""
        for name, column in self.features.items():
            if column.kind == kind:
                yield name, self.frame[name], getattr(column, "sign", "")

    def positions(self) -> Iterator[tuple[str, np.ndarray, bool]]:
        """Yield name, numbers or days of columns that hold such, and whether they are days."""
        for name, cells, sign in self.of_kind("number"):
            yield f"column {name!r}", amounts_of(cells, sign), False
        for name, cells, _ in self.of_kind("date"):
            yield f"column {name!r}", days_of(dates_of(cells)), True
        if self.label is not None and self.numeric_label:
            yield f"label {self.label!r}", numbers_of(self.frame[self.label]), False

    def key_in_words(self) -> str:
        """Return the key columns' names."""
        return "key " + ", ".join(map(repr, self.key))

    def rows_of_keys(self) -> np.ndarray:
        """Return how many rows each different key has, most first; keys with gaps are left out."""
        if not self.key:
            return np.empty(0, dtype=np.int64)
        return self.frame[list(self.key)].value_counts(dropna=True).to_numpy()

    def group_column(self) -> str | None:
        """Return the key column that keeps rows of one key together; None where few share one."""
        rows = self.rows_of_keys()
        if rows[rows > 1].sum() <= _SHARED * len(self.frame):
            return None
        different = self.frame[list(self.key)].nunique()
        return str(different.idxmax()) if different.max() >= _FEWEST_GROUPS else None


def _lost_words(table: TableInUse) -> Iterator[str]:
    for name, cell in table.frame.attrs.get(LOST, {}).get("words", {}).items():
        yield (
            f"column {name!r} has {cell!r}, which counts as an empty cell; where it is a word, "
            f'write reading = {{ empty = [""] }}'
            + ("" if name in table.key else ", or declare it in categories")
        )


def _formulas(table: TableInUse) -> Iterator[str]:
    for name, count in table.frame.attrs.get(LOST, {}).get("formulas", {}).items():
        yield (
            f"column {name!r} has {count} formulas without a value, as the program that wrote the "
            f"workbook has not calculated them; open and save it in Excel or LibreOffice, or "
            f"exclude the column"
        )


def _merged_cells(table: TableInUse) -> Iterator[str]:
    for name, count in table.frame.attrs.get(LOST, {}).get("merged", {}).items():
        yield (
            f"column {name!r} has {count} empty cells that are merged with a cell above or beside "
            f"them; split them, and fill the value into each"
        )


def _zones(table: TableInUse) -> Iterator[str]:
    dates = [name for name, _, _ in table.of_kind("date")]
    for name in dict.fromkeys((*table.key, *dates)):
        cells = table.frame[name]
        if pd.api.types.is_numeric_dtype(cells):
            continue
        times = dates_of(cells)
        times = times[~np.isnat(times)]
        if not len(times) or (times == times.astype("datetime64[D]")).all():
            continue
        share = share_with_zone(cells)
        if 0 < share < 1 or (share == 0 and name in table.key):
            yield (
                f"{'key' if name in table.key else 'column'} {name!r} has times "
                f"{'without' if share == 0 else 'with and times without'} a zone (Z, +01:00), and "
                f"one without counts as UTC; write the zone, or UTC, at every party"
            )


def _numbers_for_nothing(table: TableInUse) -> Iterator[str]:
    for name, numbers, are_days in table.positions():
        different, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
        if are_days:
            typical = np.isin(different, days_of(np.array(_NO_DATES, "datetime64[us]")))
        else:
            typical = np.array([_NINES.fullmatch(f"{n:.17g}") is not None for n in different], bool)
        others = different[~typical]
        ends = list(zip(different[typical], counts[typical], strict=True))
        apart = _APART
        if not ends and len(different) > 3 and not are_days:
            # Any other number has to be at an end, of several rows, and far away.
            apart, end = (
                _FAR_APART,
                max((0, -1), key=lambda end: abs(different[end] - np.median(different))),
            )
            ends, others = [(different[end], counts[end])], np.delete(different, end)
        if len(others) < 3:
            continue
        low, high = others[0], others[-1]
        for value, count in ends:
            gap = max(low - value, value - high)
            if count < (2 if apart == _APART else _FEWEST_ALIKE) or gap < apart * (high - low):
                continue
            text = str(np.datetime64(int(value), "D")) if are_days else f"{value:.17g}"
            yield (
                f"{name}: {count} of {len(numbers)} cells are {text}, far from all others; where "
                f'it stands for no value, write reading = {{ empty = ["", "{text}"] }}, or empty '
                f"those cells"
            )


def _key_for_nothing(table: TableInUse) -> Iterator[str]:
    rows = table.rows_of_keys()
    if len(rows) > 1 and rows[0] >= max(
        _FEWEST_STAND_INS, _STAND_INS * len(table.frame), _TIMES_OTHERS * np.median(rows)
    ):
        yield (
            f"{table.key_in_words()}: {rows[0]} of {len(table.frame)} rows have the same key, far "
            f"more than others have; where it stands for one that is not known (0, 0; UNKNOWN), "
            f"strangers are linked by it: leave those rows out, or empty keys of texts"
        )


def _rows_of_one_key(table: TableInUse) -> Iterator[str]:
    if table.label is None or not table.random_split:
        return
    if (column := table.group_column()) is not None:
        yield (
            f"{table.key_in_words()}: many rows have the same key as another row, and a random "
            f"split puts them on both sides, so figures are those of a model that knows its test "
            f'rows\' keys; write split = "group" and split_column = {toml_value(column)} in '
            f"[training]"
        )


def _whole_number_dates(table: TableInUse) -> Iterator[str]:
    for name, cells, sign in table.of_kind("number"):
        if not sign and are_whole_dates(numbers_of(cells)):
            yield (
                f"column {name!r} holds dates as whole numbers, of which float32 merges "
                f"neighbouring days, and a year ends with a leap; write reading = "
                f'{{ dates = "%Y%m%d" }}, or write them as 2020-12-31'
            )


def _units(table: TableInUse) -> Iterator[str]:
    for name, cells, _ in table.of_kind("words"):
        if table.settings.words(name) is None and (unit := unit_of(texts_of(cells)[1])) is not None:
            yield (
                f"column {name!r} holds numbers with the unit {unit!r}, which are read as words "
                f"without an order; write the numbers alone, or list the words in categories"
            )


def _bounds_in_another_unit(table: TableInUse) -> Iterator[str]:
    for name, column in table.features.items():
        pair = table.settings.pair(name)
        dates = column.kind == "date"
        if (
            pair is None
            or column.kind not in ("number", "date")
            or isinstance(pair[0], str) != dates
        ):
            continue
        low, high = declared_range(pair)
        cells, sign = table.frame[name], getattr(column, "sign", "")
        numbers = days_of(dates_of(cells)) if dates else amounts_of(cells, sign)
        numbers = numbers[np.isfinite(numbers)]
        if len(np.unique(numbers)) < 3:
            continue
        outside = ((numbers < low) | (numbers > high)).mean() > 0.5
        if outside or np.ptp(numbers) < _USED * (high - low):
            what = "outside of" if outside else "in a small part of"
            sign_text = f" (numbers with {sign!r} count as hundredths)" if sign == "%" else ""
            yield (
                f"column {name!r}: most cells lie {what} its declared bounds{sign_text}; declare "
                f"them in the unit of the cells"
            )


def _identifiers(table: TableInUse) -> Iterator[str]:
    for name, cells, sign in table.of_kind("number"):
        if not sign and (why := numbers_rows(cells)) is not None:
            yield (
                f"column {name!r} looks like an identifier ({why}), and models memorise rows by "
                f"it; exclude it, or use it as a key"
            )


def _row_numbers(table: TableInUse) -> Iterator[str]:
    for name in table.row_numbers:
        yield (
            f"column {name!r} has no name of its own, as a stored row number has none, and is left "
            f"out; rename it to use it"
        )


def _close_labels(table: TableInUse) -> Iterator[str]:
    if table.label is None or not table.numeric_label:
        return
    labels = numbers_of(table.frame[table.label])
    known = labels[np.isfinite(labels)]
    if 2 * len(np.unique(known.astype(np.float32))) < len(np.unique(known)):
        step = np.spacing(np.float32(np.abs(known).max()))
        yield (
            f"label {table.label!r} has values closer to one another than float32's step of "
            f"{step:g} there; they are centred before training, and no digit is lost"
        )


def _unknown_words(table: TableInUse) -> Iterator[str]:
    if table.trained is not None:
        for name, count in table.trained.unknown_words(table.frame).items():
            yield (
                f"{count} of {len(table.frame)} cells of column {name!r} hold words that the model "
                f"does not know; they count as none of its words"
            )


def _new_gaps(table: TableInUse) -> Iterator[str]:
    for column in () if table.trained is None else table.trained.columns:
        gaps = int(table.frame[column.name].isna().sum())
        if gaps and not column.flagged:
            yield (
                f"column {column.name!r} is empty in {gaps} of {len(table.frame)} new rows, and in "
                f"none of training; a value that stands for it is filled in, so the model has "
                f"learned nothing about such rows"
            )


def _new_unit(table: TableInUse) -> Iterator[str]:
    if table.trained is None or table.encoded is None or table.scaler is None:
        return
    scaled = (table.encoded - table.scaler.centre) / table.scaler.width
    numbers = {c.name for c in table.trained.columns if isinstance(c, NumberColumn)}
    for place, name in enumerate(table.trained.feature_names):
        values = scaled[:, place]
        if name not in numbers or len(values) < _FEWEST_NEW:
            continue
        far = (np.abs(values) > _DEVIATIONS).mean() > 0.5
        if far or 0 < values.std() < _USED:
            how = "far from" if far else "much closer together than"
            yield (
                f"column {name!r}: most new cells lie {how} those of training; compare their units"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """One kind of doubt."""

    name: str
    """Name of the kind."""

    ask: Callable[[TableInUse], Iterator[str]]
    """Yields a sentence for each column that it is about."""

    stops: bool = False
    """Whether a table of which it is true can't be used."""


DOUBTS: Final = (
    Doubt(name="formulas without a value", ask=_formulas, stops=True),
    Doubt(name="merged cells", ask=_merged_cells),
    Doubt(name="words for nothing", ask=_lost_words),
    Doubt(name="numbers for nothing", ask=_numbers_for_nothing),
    Doubt(name="keys for nothing", ask=_key_for_nothing),
    Doubt(name="rows of one key on both sides", ask=_rows_of_one_key),
    Doubt(name="times with and without a zone", ask=_zones),
    Doubt(name="whole-number dates", ask=_whole_number_dates),
    Doubt(name="numbers with a unit", ask=_units),
    Doubt(name="bounds in another unit", ask=_bounds_in_another_unit),
    Doubt(name="identifiers", ask=_identifiers),
    Doubt(name="row numbers without a name", ask=_row_numbers),
    Doubt(name="labels closer than float32", ask=_close_labels),
    Doubt(name="new words", ask=_unknown_words),
    Doubt(name="new gaps", ask=_new_gaps),
    Doubt(name="new units", ask=_new_unit),
)
"""All kinds of doubt, in the order in which they are listed."""


def ask(table: TableInUse, *, where: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the doubts about a table that stop, and those that warn, one sentence each.

    Args:
        table: The table.
        where: Its name in the doubts that stop; those that warn come without one.
    """
    stopping: list[str] = []
    warning: list[str] = []
    for doubt in DOUBTS:
        for text in doubt.ask(table):
            if doubt.stops:
                stopping.append(f"{where}: {text}")
            else:
                warning.append(text)
    return stopping, tuple(warning)
