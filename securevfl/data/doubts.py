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
    dates_of,
    days_of,
    numbers_of,
    share_with_zone,
    texts_of,
    unit_of,
    whole_date_form,
)
from securevfl.data.column_kinds import ColumnKind, numbers_rows
from securevfl.data.columns import Column, NumberColumn
from securevfl.data.scaling import NOTHING_DECLARED, ColumnSettings, FeatureScaler, declared_range
from securevfl.data.schema import TableSchema
from securevfl.data.sources.pieces import LOST

# What programs and people write for no value: nines, eights, the ends of whole numbers' types,
# the ends of calendars, words, and places where nobody is.
_NO_NUMBER: Final = re.compile(
    r"-?(9{2,}|8{3,})(\.(9+|25))?|-?3276[78]|65535|-?214748364[78]|4294967295"
)
_NO_DAYS: Final = (
    *("0001-01-01", "1111-11-11", "1753-01-01", "1800-01-01", "1899-12-30", "1899-12-31"),
    *("1900-01-01", "1901-01-01", "1970-01-01", "2038-01-19", "2049-12-31", "2099-12-31"),
    *("2100-01-01", "2199-12-31", "2999-12-31", "3000-01-01", "9999-01-01", "9999-12-31"),
)
_NO_KEY: Final = re.compile(
    r"\W*|unknown|unbekannt|inconnue?|desconocid[oa]|sconosciut[oa]|n\W?/?[ad]\W?|none|null|nil|"
    r"nan|missing|not (known|available|given|provided)|keine? angaben?|k\. ?a\.|anonym(ous)?|"
    r"dummy|tb[ad]|x+|-?0+(\.0*)?|-1(\.0*)?|1{4,}|9{4,}(\.0*)?|123456\d*",
    re.IGNORECASE,
)
_NO_PLACE: Final = re.compile(r"-?(0|90|180)(\.0*)?")
# A value of so many times more rows than others have is a spike, and such a key is in doubt.
_SPIKE: Final = 5
_KEY_SPIKE: Final = 10
_OF_ALL: Final = 0.02
# Share of rows with another row's key, and the fewest keys that a split can keep apart.
_SHARED: Final = 0.1
_FEWEST: Final = 20
# A range that cells use less of than this share is in another unit, and so are new numbers so many
# deviations away.
_USED: Final = 0.02
_DEVIATIONS: Final = 10.0
# Seconds since 1970 in the years 1990 to 2037.
_SECONDS: Final = (631_152_000, 2_145_916_800)


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
    """Declarations of the columns."""

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

    def lost(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield name and content of the columns that lack a kind of what their source shows."""
        yield from self.frame.attrs.get(LOST, {}).get(kind, {}).items()

    def key_in_words(self) -> str:
        """Return the key columns' names."""
        return "key " + ", ".join(map(repr, self.key))

    def group_column(self) -> str | None:
        """Return the key column that keeps rows of one key together; None where few share one."""
        keys = self.frame[list(self.key)]
        if keys.dropna().duplicated(keep=False).sum() <= _SHARED * len(keys):
            return None
        different = keys.nunique()
        return None if different.max() < _FEWEST else str(different.idxmax())


def _formulas(table: TableInUse) -> Iterator[str]:
    for name, count in table.lost("formulas"):
        yield (
            f"column {name!r} has {count} formulas without a value, as the program that wrote the "
            f"workbook has not calculated them; open and save it in Excel or LibreOffice, or "
            f"exclude the column"
        )


def _merged_cells(table: TableInUse) -> Iterator[str]:
    for name, count in table.lost("merged"):
        yield (
            f"column {name!r} has {count} empty cells that are merged with a cell above or beside "
            f"them; split them, and fill the value into each"
        )


def _words_for_nothing(table: TableInUse) -> Iterator[str]:
    for name, cell in table.lost("words"):
        declare = "" if name in table.key else ", or declare it in categories"
        yield (
            f"column {name!r} has {cell!r}, which counts as an empty cell; where it is a word, "
            f'write reading = {{ empty = [""] }}{declare}'
        )


def _numbers_for_nothing(table: TableInUse) -> Iterator[str]:
    columns = [
        *(
            (f"column {name!r}", amounts_of(v, sign), 0)
            for name, v, sign in table.of_kind("number")
        ),
        *((f"column {name!r}", days_of(dates_of(v)), 1) for name, v, _ in table.of_kind("date")),
    ]
    if table.label is not None and table.numeric_label:
        columns.append((f"label {table.label!r}", numbers_of(table.frame[table.label]), 0))
    for name, numbers, are_days in columns:
        for value, count in _stand_ins(numbers, are_days=bool(are_days)):
            text = str(np.datetime64(int(value), "D")) if are_days else f"{value:.15g}"
            yield (
                f"{name}: {count} of {len(numbers)} cells are {text}, which may stand for no "
                f'value; if so, write reading = {{ empty = ["", "{text}"] }}, or empty those cells'
            )


def _stand_ins(numbers: np.ndarray, *, are_days: bool) -> Iterator[tuple[float, int]]:
    """Yield numbers, or days, that seem to stand for no value, and how many cells have each."""
    different, counts = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
    if are_days:
        known = np.isin(different, days_of(np.array(_NO_DAYS, "datetime64[us]")))
    else:
        known = np.array([_NO_NUMBER.fullmatch(f"{n:.15g}") is not None for n in different], bool)
        # A negative number alone is none of what cannot be negative.
        if len(different) > 1 and different[0] in (-1, -9) and different[1] >= 0:
            known[0] = True
    for place in {*np.flatnonzero(known), *([0, len(different) - 1] if len(different) else [])}:
        rest = ~known
        rest[place] = False
        others, value, count = different[rest], different[place], int(counts[place])
        if len(others) < 3:
            continue
        span, gap = np.ptp(others), max(others[0] - value, value - others[-1])
        spike = count >= _SPIKE * max(1.0, float(np.median(counts[rest])))
        if not known[place]:
            apart = not are_days and gap >= 10 * span and count >= _SPIKE
        elif are_days and gap < 0:
            apart = spike and count >= max(2 * _SPIKE, _OF_ALL * len(numbers))
        else:
            alone = value in (-1, -9) or gap >= 3 * np.diff(others).max()
            apart = gap > 0 and ((count > 1 and gap >= 2 * span) or (spike and alone))
            apart = apart or (count >= _SPIKE and gap >= span / 2 and value not in (-1, -9))
        if apart:
            yield float(value), count


def _keys_for_nothing(table: TableInUse) -> Iterator[str]:
    columns = list(table.key)
    keys = table.frame[columns].dropna()
    counts = keys.value_counts() if keys.duplicated().any() else pd.Series(dtype=np.int64)
    usual = counts.median()
    nothing = _NO_KEY if len(columns) == 1 else re.compile(f"{_NO_KEY.pattern}|{_NO_PLACE.pattern}")
    for *cells, count in counts.head(_SPIKE).reset_index().itertuples(index=False):
        known = all(nothing.fullmatch(str(cell).strip()) for cell in cells)
        if len(counts) > 1 and count >= (
            _SPIKE * usual
            if known
            else max(_KEY_SPIKE, _KEY_SPIKE * usual, _OF_ALL * len(table.frame))
        ):
            yield (
                f"{table.key_in_words()}: {count} of {len(table.frame)} rows have the same key, "
                f"far more than others have; where it stands for one that is not known (0, 0; "
                f"UNKNOWN), strangers are linked by it: leave those rows out, or empty keys of "
                f"texts"
            )
            return
    for name in columns if len(columns) > 1 else ():
        places, texts = texts_of(table.frame[name])
        words = [bool(re.search(r"[^\W\d]", t) and _NO_KEY.fullmatch(t)) for t in texts]
        if (count := int(np.append(words, False)[places].sum())) >= _SPIKE:
            yield (
                f"key {name!r}: {count} of {len(table.frame)} cells hold a word for no value, by "
                f"which strangers are alike; empty those cells"
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


def _zones(table: TableInUse) -> Iterator[str]:
    for name in dict.fromkeys((*table.key, *(name for name, _, _ in table.of_kind("date")))):
        times = dates_of(table.frame[name])
        times = times[~np.isnat(times)]
        if (times == times.astype("datetime64[D]")).all():
            continue
        share = share_with_zone(table.frame[name])
        if 0 < share < 1 or (share == 0 and name in table.key):
            yield (
                f"{'key' if name in table.key else 'column'} {name!r} has times "
                f"{'without' if share == 0 else 'with and times without'} a zone (Z, +01:00), and "
                f"one without counts as UTC; write the zone, or UTC, at every party"
            )


def _whole_number_dates(table: TableInUse) -> Iterator[str]:
    for name, values, sign in table.of_kind("number"):
        numbers = amounts_of(values, sign)
        if sign or not np.isfinite(numbers).any():
            continue
        if (form := whole_date_form(numbers)) is not None:
            yield (
                f"column {name!r} holds dates as whole numbers, of which float32 merges "
                f"neighbouring days, and a year ends with a leap; write reading = "
                f'{{ dates = "{form}" }}, or write them as 2020-12-31'
            )
        elif _are_seconds(numbers) and numbers_rows(values) is None:
            yield (
                f"column {name!r} looks like points in time, counted since 1970, of which float32 "
                f"merges neighbours; write them as 2020-12-31T09:30Z"
            )


def _are_seconds(numbers: np.ndarray) -> bool:
    """Return whether whole numbers may be seconds since 1970, or thousandths and so on of them."""
    different = np.unique(numbers[np.isfinite(numbers)])
    units = (different / 1000**power for power in range(4))
    return (
        len(different) >= _FEWEST
        and not (different % 1).any()
        and any(low >= _SECONDS[0] and high < _SECONDS[1] for low, *_, high in units)
    )


def _units(table: TableInUse) -> Iterator[str]:
    for name, values, _ in table.of_kind("words"):
        unit = unit_of(texts_of(values)[1])
        if unit is not None and table.settings.words(name) is None:
            yield (
                f"column {name!r} holds numbers with the unit {unit!r}, which are read as words "
                f"without an order; write the numbers alone, or list the words in categories"
            )


def _bounds_in_another_unit(table: TableInUse) -> Iterator[str]:
    for name, column in table.features.items():
        pair, dates = table.settings.pair(name), column.kind == "date"
        known = column.kind in ("number", "date") and pair is not None
        if not known or pair is None or isinstance(pair[0], str) != dates:
            continue
        low, high = declared_range(pair)
        values, sign = table.frame[name], getattr(column, "sign", "")
        numbers = days_of(dates_of(values)) if dates else amounts_of(values, sign)
        numbers = numbers[np.isfinite(numbers)]
        if len(np.unique(numbers)) < 3:
            continue
        outside = ((numbers < low) | (numbers > high)).mean() > 0.5
        if outside or np.ptp(numbers) < _USED * (high - low):
            place = "outside of" if outside else "in a small part of"
            hundredths = f" (numbers with {sign!r} count as hundredths)" if sign == "%" else ""
            yield (
                f"column {name!r}: most cells lie {place} its declared bounds{hundredths}; declare "
                f"them in the unit of the cells"
            )


def _identifiers(table: TableInUse) -> Iterator[str]:
    for name, values, sign in table.of_kind("number"):
        why = None if sign or whole_date_form(numbers_of(values)) else numbers_rows(values)
        if why is not None:
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


def _new_words(table: TableInUse) -> Iterator[str]:
    if table.trained is not None:
        for name, count in table.trained.unknown_words(table.frame).items():
            yield (
                f"{count} of {len(table.frame)} cells of column {name!r} hold words that the model "
                f"does not know; they count as none of its words"
            )


def _new_gaps(table: TableInUse) -> Iterator[str]:
    rows = len(table.frame)
    for column in () if table.trained is None else table.trained.columns:
        gaps = int(table.frame[column.name].isna().sum())
        if gaps and not column.flagged:
            yield (
                f"column {column.name!r} is empty in {gaps} of {rows} new rows, and in none of "
                f"training; a value that stands for it is filled in, so the model has learned "
                f"nothing about such rows"
            )
        elif gaps == rows >= _FEWEST:
            yield f"column {column.name!r} is empty in all {rows} new rows; compare the files"


def _new_units(table: TableInUse) -> Iterator[str]:
    if table.trained is None or table.encoded is None or table.scaler is None:
        return
    scaled = (table.encoded - table.scaler.centre) / table.scaler.width
    numbers = {c.name for c in table.trained.columns if isinstance(c, NumberColumn)}
    # Of declared bounds nobody knows how much of them training used.
    declared = table.scaler.data_independent
    for place, name in enumerate(table.trained.feature_names):
        values = scaled[:, place]
        if name not in numbers or len(values) < _FEWEST:
            continue
        far = (np.abs(values) > (2 if declared else _DEVIATIONS)).mean() > 0.5
        if far or (0 < values.std() < _USED and not declared):
            how = "far from" if far else "much closer together than"
            yield (
                f"column {name!r}: most new cells lie {how} those of training; compare their units"
            )


STOPPING: Final[tuple[Callable[[TableInUse], Iterator[str]], ...]] = (_formulas,)
"""Kinds of doubt that no run can rest on."""

DOUBTS: Final[tuple[Callable[[TableInUse], Iterator[str]], ...]] = (
    _merged_cells,
    _words_for_nothing,
    _numbers_for_nothing,
    _keys_for_nothing,
    _rows_of_one_key,
    _zones,
    _whole_number_dates,
    _units,
    _bounds_in_another_unit,
    _identifiers,
    _row_numbers,
    _close_labels,
    _new_words,
    _new_gaps,
    _new_units,
)
"""All other kinds of doubt: each yields a sentence for each column that it is about."""


def ask(table: TableInUse, *, where: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the doubts about a table that stop, and those that warn, one sentence each.

    Args:
        table: The table.
        where: Its name in the doubts that stop; those that warn come without one.
    """
    stopping = [f"{where}: {text}" for kind in STOPPING for text in kind(table)]
    return stopping, tuple(text for kind in DOUBTS for text in kind(table))
