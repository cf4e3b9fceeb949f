"""Columns as features: the kind of a column, its encoding, and how the encoding is fitted.

A row's features depend on that row and on the fitted encoding. Each statistic that is taken from
the table instead of being declared is listed (:class:`Dependence`), since a promise about records
must not depend on it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float32, Float64
from pandas.api import types

from securevfl.core.errors import DataError
from securevfl.core.formatting import toml_key
from securevfl.data.cells import (
    PERCENT,
    TRUTH_WORDS,
    amounts_of,
    dates_of,
    days_of,
    first_row,
    is_text,
    numbers_of,
    refuse_rows,
    texts_of,
    truths_of,
    word,
)
from securevfl.data.scaling import MAX_CATEGORIES, ColumnSettings, Dependence, Pair, declared_range
from securevfl.data.sources.text_files import is_bracketed, is_number, split_unit_sign, unit_of

# The kind of a column: numbers, truth values, words, dates, or nothing that a model can use.

Kind = Literal["number", "boolean", "words", "date"]

_FLOAT32_WHOLE: Final = 2**24
_OTHER_DATES: Final = r"\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2})( .*)?"
_LEADING_ZERO: Final = r"\s*[+-]?0\d.*"
_FEWEST: Final = 20
_NUMBER: Final = int | float | Decimal | np.number
# What pandas, R and Arrow call a stored index that has no name, and what the first column of a text
# file is called whose header is empty.
_ROW_NUMBER: Final = re.compile(r"|unnamed-1|Unnamed: 0(\.\d+)?|\.\.\.1|__index_level_\d+__")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnKind:
    """Kind of a column, and the reason."""

    kind: Kind | None
    """None: nothing that a model can use."""

    reason: str
    """Reason in a few words; without any value of the column."""

    rows: int
    """Cells, missing ones included."""

    missing: int
    """Missing cells."""

    different: int
    """Different values, missing not counted."""

    identifier: str | None = None
    """Why it looks like a name or number of its row rather than something to learn from."""

    problem: str | None = None
    """Why it can't be a feature as it is, and what to do; to be put behind the column's name."""

    sign: str = ""
    """Sign of a column of texts that are numbers with one sign, such as ``%`` or ``€``."""

    timed: bool = False
    """True if any date has a time of day."""


def is_row_number(name: str) -> bool:
    """Return whether a column is a stored index without a name, judged by its name.

    Such a column is no feature unless its owner names it: in a table that is sorted by its label it
    would be the label. The name alone decides, and no record.
    """
    return _ROW_NUMBER.fullmatch(name) is not None


def numbers_rows(values: "pd.Series[Any]") -> str | None:
    """Return why a column of numbers looks like a row number, or None if it does not."""
    numbers = numbers_of(values)
    present = numbers[~np.isnan(numbers)]
    whole = len(present) > 0 and not (present % 1).any()
    return _numbering_reason(np.unique(present), len(present)) if whole else None


def infer(values: "pd.Series[Any]", *, max_categories: int = MAX_CATEGORIES) -> ColumnKind:
    """Return the kind of a column.

    Args:
        values: The column, of any type.
        max_categories: Up to so many different words are never an identifier.
    """
    present = values.dropna()
    if not len(present):
        return _unusable(values, "empty", "is empty in every row; exclude it")
    if isinstance(values.dtype, pd.CategoricalDtype):
        held = present.astype(object)
        if types.infer_dtype(held) != "string":
            return _words(values, "a categorical column", max_categories)
        return _of_texts(values, max_categories)
    if types.is_bool_dtype(values):
        return _column_kind(values, "boolean", f"true and false ({values.dtype})", different=2)
    if values.dtype.kind == "c":
        return _unusable(values, "complex numbers", "holds complex numbers; exclude it")
    if values.dtype.kind == "m" or types.is_numeric_dtype(values):
        return _number(values, f"numbers ({values.dtype})")
    if values.dtype.kind == "M":
        return _date(values, f"dates ({values.dtype})")
    return _of_objects(values, present.astype(object), max_categories)


def _of_objects(
    values: "pd.Series[Any]", present: "pd.Series[Any]", max_categories: int
) -> ColumnKind:
    held = types.infer_dtype(present)
    if held == "boolean":
        return _column_kind(values, "boolean", "true and false", different=2)
    if held in ("integer", "floating", "mixed-integer-float", "decimal", "timedelta"):
        return _number(values, "numbers")
    if held in ("date", "datetime", "datetime64") or all(isinstance(c, date) for c in present):
        return _date(values, "dates")
    if held in ("string", "mixed-integer", "mixed"):
        strange = [cell for cell in present if not isinstance(cell, str | _NUMBER)]
        if not strange:
            numeric = all(isinstance(cell, _NUMBER) for cell in present)
            return _number(values, "numbers") if numeric else _of_texts(values, max_categories)
        held = type(strange[0]).__name__
    row = first_row(values.notna().to_numpy(dtype=bool))
    return _unusable(
        values,
        f"{held} values",
        f"holds {held} values, as in row {row}; turn them into numbers or words, or exclude it",
    )


def _of_texts(values: "pd.Series[Any]", max_categories: int) -> ColumnKind:
    places, different = texts_of(values)
    texts = pd.Series(different, dtype=object)
    lower = set(texts.str.strip().str.casefold())
    if lower <= {"true", "false"} or lower <= {"yes", "no"}:
        names = " and ".join(word for word in TRUTH_WORDS if word in lower)
        return _column_kind(values, "boolean", f"texts {names}", different=len(lower))
    dated = ~np.isnat(dates_of(texts))
    if dated.all():
        return _date(values, "texts that are dates")
    if dated.mean() > 0.5:
        return _two_kinds(values, "dates", first_row(~np.append(dated, True)[places]))
    if texts.str.fullmatch(_OTHER_DATES).mean() > 0.5:
        return _unusable(
            values,
            "dates in a form that depends on the country",
            'looks like dates; say in which form, as in reading = { dates = "%d.%m.%Y" }, or write '
            "them as 2020-12-31, or exclude it",
        )
    if (signed := _of_signed(values, places, different)) is not None:
        return signed
    readable = ~np.isnan(numbers_of(texts))
    if not texts.str.fullmatch(_LEADING_ZERO).any():
        if readable.all():
            return _number(values, "texts that are numbers")
        if readable.mean() > 0.5:
            return _two_kinds(values, "numbers", first_row(~np.append(readable, True)[places]))
    return _words(values, "texts", max_categories)


def _of_signed(
    values: "pd.Series[Any]", places: np.ndarray, different: list[str]
) -> ColumnKind | None:
    """Return the kind of a column of numbers with a sign, or None for other columns."""
    signs = Counter(sign for _, sign in map(split_unit_sign, different) if sign)
    bracketed = np.array([*map(is_bracketed, different), False])
    numbers = bracketed[:-1] | np.array([*map(is_number, different)])
    if numbers.mean() <= 0.5 or not (signs or bracketed.any()):
        return None
    if bracketed.any():
        row = first_row(bracketed[places])
        return _unusable(
            values,
            "numbers in brackets",
            f"holds numbers in brackets, as in row {row}; write those below zero with a minus, or "
            f"list the column's words in categories",
        )
    sign = signs.most_common(1)[0][0]
    amounts = amounts_of(values, sign)
    unread = np.isnan(amounts) & values.notna().to_numpy(dtype=bool)
    if unread.any():
        return _two_kinds(values, f"numbers with the sign {sign!r}", first_row(unread))
    return replace(
        _number(pd.Series(amounts), f"texts that are numbers with the sign {sign!r}"), sign=sign
    )


def _two_kinds(values: "pd.Series[Any]", most: str, row: int) -> ColumnKind:
    return _unusable(
        values,
        f"{most} and other texts",
        f"holds {most}, but row {row} holds {str(values.iloc[row - 1])[:40]!r}; correct or empty "
        f"that cell, or list the column's words in categories",
    )


def _words(values: "pd.Series[Any]", reason: str, max_categories: int) -> ColumnKind:
    words, present = texts_of(values)[1], int(values.notna().sum())
    different = len(words)
    if present >= _FEWEST and different > max_categories and different > present / 2:
        if (unit := unit_of(words)) is not None:
            return _unusable(
                values,
                "numbers with a unit",
                f"holds numbers with the unit {unit!r}; write the numbers alone, or list its words "
                f"in categories",
            )
        looks = f"{different} different words in {present} rows"
        return _column_kind(
            values,
            "words",
            reason,
            different=different,
            identifier=looks,
            problem=f"holds {looks}, which looks like an identifier or free text; exclude it, use "
            f"it as a key, or list its words in categories",
        )
    return _column_kind(values, "words", reason, different=different)


def _number(values: "pd.Series[Any]", reason: str) -> ColumnKind:
    numbers = numbers_of(values)
    present = numbers[~np.isnan(numbers)]
    different = np.unique(present)
    identifier = problem = None
    infinite = np.isinf(numbers)
    too_large = np.abs(numbers) > np.finfo(np.float32).max
    if infinite.any():
        problem = (
            f"holds an infinite value in row {first_row(infinite)}; correct or empty that cell"
        )
    elif too_large.any():
        problem = f"row {first_row(too_large)} is too large for float32; change its unit"
    elif len(different):
        identifier = _numbering_reason(different, len(present))
        problem = _indistinct(different, len(present))
        if problem is not None and len(different) == len(present):
            identifier = f"all {len(present)} values differ"
    return _column_kind(
        values,
        "number",
        reason,
        missing=len(values) - len(present),
        different=len(different),
        identifier=identifier,
        problem=problem,
    )


def _numbering_reason(different: np.ndarray, rows: int) -> str | None:
    """Return why whole numbers look assigned, as they never repeat, or None if they do not.

    Of n numbers drawn evenly from a span, all differ with a probability of about
    exp(-n^2 / (2 span)); identifiers are what leaves less than 5 % to chance.
    """
    span = different[-1] - different[0] + 1
    if rows < _FEWEST or len(different) < rows or (different % 1 != 0).any():
        return None
    return f"all {rows} values differ" if rows**2 >= 6 * span else None


def _indistinct(different: np.ndarray, rows: int) -> str | None:
    """Return the problem if float32, the type of features, merges most of these numbers."""
    if len(different) < 2 or np.abs(different[[0, -1]]).max() < _FLOAT32_WHOLE:
        return None
    left = len(np.unique(different.astype(np.float32)))
    if left > len(different) / 2:
        return None
    what = f"holds {len(different)} different numbers, of which float32 distinguishes {left}"
    if len(different) > rows / 2:
        return f"{what}, so it looks like an identifier; exclude it, or use it as a key"
    return f"{what}; subtract what they have in common, or exclude it"


def _date(values: "pd.Series[Any]", reason: str) -> ColumnKind:
    dates = dates_of(values)
    timed = dates[~np.isnat(dates)]
    return _column_kind(
        values,
        "date",
        reason,
        missing=len(dates) - len(timed),
        different=len(np.unique(timed)),
        timed=bool((timed != timed.astype("datetime64[D]")).any()),
    )


def _column_kind(
    values: "pd.Series[Any]", kind: Kind | None, reason: str, **facts: Any
) -> ColumnKind:
    facts = {"missing": int(values.isna().sum()), **facts}
    return ColumnKind(kind=kind, reason=reason, rows=len(values), **facts)


def _unusable(values: "pd.Series[Any]", reason: str, problem: str) -> ColumnKind:
    return _column_kind(values, None, reason, different=0, problem=problem)


# The encoding of a column, the same for every row.

OTHER: Final = "other"
"""The word that stands for all words without a column of their own."""

_TRUTH: Final[Pair] = (0.0, 1.0)
_CIRCLE: Final[Pair] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ColumnOfFeatures:
    """What columns of every kind have."""

    name: str
    """The column's name."""

    flagged: bool
    """True if a feature flags missing values."""

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        return (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberColumn(_ColumnOfFeatures):
    """Numbers as they are."""

    fill: float | None
    """Value for a missing number; None: missing numbers are refused."""

    sign: str = ""
    """The sign that each number is written with, ``%`` or a currency's; empty: none."""

    kind: Literal["number"] = "number"
    """Name of the kind in JSON."""

    natural_bounds: ClassVar[tuple[Pair | None, ...]] = (None,)
    """Range of each feature for any data; None: the party has to declare it."""

    def values(self, cells: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, "rows 1"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If one is no number, infinite, or too large for float32.
        """
        numbers = amounts_of(cells, self.sign)
        expected = f"a number with the sign {self.sign!r}" if self.sign else "a number"
        _require_read(cells, np.isnan(numbers), expected=expected, where=where)
        too_large = np.abs(numbers) > np.finfo(np.float32).max
        refuse_rows(too_large, where=where, why="is infinite or beyond float32")
        return numbers[:, None]

    @property
    def fills(self) -> tuple[float, ...] | None:
        """Value for a missing cell in each feature."""
        return None if self.fill is None else (self.fill,)

    @property
    def encoding(self) -> str:
        """Description of the encoding, in a few words."""
        if self.sign == PERCENT:
            return "a hundredth of the number before '%'"
        return f"the number without its {self.sign!r}" if self.sign else "as it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class BooleanColumn(_ColumnOfFeatures):
    """True and false as 1 and 0; a missing one is 0.5."""

    kind: Literal["boolean"] = "boolean"

    natural_bounds: ClassVar[tuple[Pair | None, ...]] = (_TRUTH,)
    fills: ClassVar[tuple[float, ...]] = (0.5,)
    """Value for a missing cell in each feature."""
    encoding: ClassVar[str] = "1 and 0"
    """Description of the encoding, in a few words."""

    def values(self, cells: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, "rows 1"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If one is no truth value.
        """
        truths = truths_of(cells)
        _require_read(cells, np.isnan(truths), expected="true or false", where=where)
        return truths[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsColumn(_ColumnOfFeatures):
    """One 0/1 feature a word; a missing word, or one not known, is 0 in all of them."""

    words: tuple[str, ...]
    """In the order of their features; if ``other`` is among them, it stands for all not listed."""
    kind: Literal["words"] = "words"

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        return tuple(f"{self.name}={word}" for word in self.words)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """Range of each feature for any data."""
        return (_TRUTH,) * len(self.words)

    def values(self, cells: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, "rows words"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If they are numbers or dates, and none of them is a known word.
        """
        places, texts = texts_of(cells)
        known = {word: place for place, word in enumerate(self.words)}
        if texts and not is_text(cells) and not known.keys() & set(texts):
            raise DataError(f"{where}: must be words, got {cells.dtype} values")
        rest = known.get(OTHER, len(self.words))
        own = np.array([*(known.get(text, rest) for text in texts), len(self.words)])
        identity = np.vstack([np.eye(len(self.words)), np.zeros(len(self.words))])
        encoded = identity[own[places]]
        encoded[places < 0] = np.nan
        return encoded

    def unknown(self, cells: "pd.Series[Any]") -> int:
        """Return how many cells hold a word that has no feature, and so are 0 in all of them."""
        if OTHER in self.words:
            return 0
        places, texts = texts_of(cells)
        known = np.array([*(text in self.words for text in texts), True])
        return int((~known[places]).sum())

    @property
    def fills(self) -> tuple[float, ...]:
        """Value for a missing cell in each feature."""
        return (0.0,) * len(self.words)

    @property
    def encoding(self) -> str:
        """Description of the encoding, in a few words."""
        rest = f", the rest as {OTHER!r}" if OTHER in self.words else ""
        return f"one 0/1 feature a word{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DateColumn(_ColumnOfFeatures):
    """Days gone by since an origin, and where in the year, week and day a date lies.

    A place on a circle is sine and cosine, so that December lies next to January. All in UTC.
    """

    origin: float
    """Date that becomes 0, in days since 1970-01-01."""
    timed: bool
    """True if the time of day is a feature."""
    fill: float | None
    """Value for a missing date, in days after the origin; None: missing dates are refused."""
    kind: Literal["date"] = "date"

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        circles = ("month", "weekday", *(("hour",) if self.timed else ()))
        parts = (f"{self.name} {part} {wave}" for part in circles for wave in ("sine", "cosine"))
        return (f"{self.name} days", *parts)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """Range of each feature for any data; None: the party has to declare it."""
        return (None, *(_CIRCLE,) * (len(self.own_features) - 1))

    def values(
        self, cells: "pd.Series[Any]", *, where: str
    ) -> Float64[np.ndarray, "rows features"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If one is no date.
        """
        dates = dates_of(cells)
        _require_read(cells, np.isnat(dates), expected="a date such as 2020-12-31", where=where)
        days = days_of(dates)
        months = (dates.astype("datetime64[M]").astype(np.int64) % 12) / 12
        weekdays = (np.floor(days) % 7) / 7
        circles = [months, weekdays, *([days % 1] if self.timed else [])]
        waves = [wave(2 * np.pi * part) for part in circles for wave in (np.sin, np.cos)]
        encoded = np.column_stack([days - self.origin, *waves])
        encoded[np.isnat(dates)] = np.nan
        return encoded

    @property
    def fills(self) -> tuple[float, ...] | None:
        """Value for a missing cell in each feature; on a circle, its middle."""
        if self.fill is None:
            return None
        return (self.fill, *(0.0,) * (len(self.own_features) - 1))

    @property
    def encoding(self) -> str:
        """Description of the encoding, in a few words."""
        day = str(np.datetime64(int(np.floor(self.origin)), "D"))
        hour = ", hour" if self.timed else ""
        return f"days since {day}; month, weekday{hour} as sine and cosine"


Column = NumberColumn | BooleanColumn | WordsColumn | DateColumn


def features_of_column(column: Column) -> tuple[str, ...]:
    """Return the names of all features of a column."""
    flag = (f"{column.name} is missing",) if column.flagged else ()
    return (*column.own_features, *flag)


def encode_column(
    column: Column, cells: "pd.Series[Any]", *, refuse: bool, where: str
) -> Float32[np.ndarray, "rows features"]:
    """Return the features of a column's cells.

    Raises:
        DataError: If a cell is of another kind, or missing where that is refused or nothing may
            stand for it.
    """
    missing, fills = cells.isna().to_numpy(dtype=bool), column.fills
    if refuse or fills is None:
        why = f"is missing ({missing.sum()} such cells in all); "
        refuse_rows(missing, where=where, why=why + _what_to_do(column, refuse=refuse))
    values = column.values(cells, where=where)
    if fills is not None:
        values = np.where(missing[:, None], fills, values)
    flag = [missing[:, None]] if column.flagged else []
    return np.hstack([values, *flag]).astype(np.float32)


def _what_to_do(column: Column, *, refuse: bool) -> str:
    if refuse:
        return 'fill them in, drop these rows, or set missing = "fill"'
    return (
        "under a promise only the middle of declared bounds may stand for one: use scaling = "
        f'"bounds" and declare those of {column.name!r}'
    )


def _require_read(
    cells: "pd.Series[Any]", unread: np.ndarray, *, expected: str, where: str
) -> None:
    wrong = unread & cells.notna().to_numpy(dtype=bool)
    if wrong.any():
        row = first_row(wrong)
        raise DataError(
            f"{where}, row {row}: must be {expected}, got {str(cells.iloc[row - 1])[:40]!r} "
            f"({int(wrong.sum())} such cells in all)"
        )


# Fit the encoding of one column: by what its party declares, or else by its cells.


def fit_column(
    cells: "pd.Series[Any]", name: str, settings: ColumnSettings, *, where: str
) -> tuple[Column, Float32[np.ndarray, "rows features"], tuple[Dependence, ...]]:
    """Fit the encoding of a column, and encode it.

    Args:
        cells: The column.
        name: Its name.
        settings: Declared settings.
        where: Name of the column in messages.

    Returns:
        The fitted column, its features, and what was taken from the cells.

    Raises:
        DataError: If it can't be a feature, or a cell does not match what is declared.
    """
    gaps = bool(cells.isna().any()) and settings.missing == "fill"
    declared = name in settings.missing_columns
    fit = _Fit(cells=cells, name=name, settings=settings, where=where, flagged=gaps or declared)
    column = fit.column()
    if gaps and not declared:
        quoted = json.dumps(name, ensure_ascii=False)
        fit.takes("whether values are missing", f"party.missing_columns = [{quoted}]")
    encoded = encode_column(column, cells, refuse=settings.missing == "refuse", where=where)
    return column, encoded, tuple(fit.taken)


@dataclass(kw_only=True, slots=True)
class _Fit:
    """The fitting of one column."""

    cells: "pd.Series[Any]"
    name: str
    settings: ColumnSettings
    where: str
    flagged: bool
    taken: list[Dependence] = field(default_factory=list)
    """Statistics taken from the cells so far."""

    def takes(self, what: str, declare: str) -> None:
        """Note a statistic of the cells, and the setting that would replace it."""
        self.taken.append(Dependence(column=self.name, what=what, declare=declare))

    def column(self) -> Column:
        """Return the column's encoding."""
        settings, name, where = self.settings, self.name, self.where
        words, pair = settings.words(name), settings.pair(name)
        if words is not None:
            words = tuple(map(word, words))
            _require_declared(self.cells, words, where=where)
            return WordsColumn(name=name, flagged=self.flagged, words=words)
        if pair is not None and isinstance(pair[0], str):
            return self._declared_dates(pair)
        inferred = infer(self.cells, max_categories=settings.max_categories)
        stated = isinstance(settings.bounds, Mapping) and pair is not None  # to be numbers
        if inferred.problem is not None and (inferred.kind == "number" or not stated):
            raise DataError(f"{where}: {inferred.problem}")
        if inferred.kind == "boolean":
            return BooleanColumn(name=name, flagged=self.flagged)
        if inferred.kind == "number" or stated:
            fill = self._filling_number(inferred.sign)
            return NumberColumn(name=name, flagged=self.flagged, fill=fill, sign=inferred.sign)
        return self._dates(inferred.timed) if inferred.kind == "date" else self._collected_words()

    def _filling_number(self, sign: str) -> float | None:
        pair = self.settings.pair(self.name)
        if pair is not None:
            return sum(declared_range(pair)) / 2
        if not self.settings.own_statistics:
            return None
        if self.flagged:
            self.takes(
                "the median that stands for missing values",
                f'scaling = "bounds" and party.bounds = {{ {toml_key(self.name)} = [low, high] }}',
            )
        return _median(amounts_of(self.cells, sign))

    def _declared_dates(self, pair: Sequence[float | str]) -> DateColumn:
        try:
            low, high = declared_range(pair)
        except DataError as error:
            raise DataError(f"{self.where}: its bounds: {error}") from None
        timed = any(":" in str(date) for date in pair)
        return DateColumn(
            name=self.name, flagged=self.flagged, origin=low, timed=timed, fill=(high - low) / 2
        )

    def _dates(self, timed: bool) -> DateColumn:
        days = days_of(dates_of(self.cells))
        origin = float(np.floor(np.nanmin(days)))
        example = f'{toml_key(self.name)} = ["2015-01-01", "2025-12-31"]'
        self.takes(
            "the earliest date, from which days are counted,",
            f'scaling = "bounds" and party.bounds = {{ {example} }}',
        )
        fill = _median(days) - origin if self.settings.own_statistics else None
        return DateColumn(
            name=self.name, flagged=self.flagged, origin=origin, timed=timed, fill=fill
        )

    def _collected_words(self) -> WordsColumn:
        places, texts = texts_of(self.cells)
        self.takes(
            "which words there are",
            f'party.categories = {{ {toml_key(self.name)} = ["...", "..."] }}',
        )
        counts = np.bincount(places[places >= 0], minlength=len(texts))
        # Equally frequent words go by their letters, so that the order of rows decides nothing.
        by_number = sorted(range(len(texts)), key=lambda place: (-counts[place], texts[place]))
        kept = sorted(texts[place] for place in by_number[: self.settings.max_categories])
        rest = [OTHER] if len(texts) > len(kept) and OTHER not in kept else []
        return WordsColumn(name=self.name, flagged=self.flagged, words=(*kept, *rest))


def _median(numbers: np.ndarray) -> float:
    present = numbers[~np.isnan(numbers)]
    return float(np.median(present)) if len(present) else 0.0


def _require_declared(cells: "pd.Series[Any]", words: Sequence[str], *, where: str) -> None:
    if not words or len(set(words)) < len(words):
        raise DataError(f"{where}: its declared words must be different, and at least one")
    places, texts = texts_of(cells)
    known = np.array([*(text in words for text in texts), True])
    unknown = ~known[places]
    if unknown.any() and OTHER not in words:
        row = first_row(unknown)
        raise DataError(
            f"{where}, row {row}: {texts[places[row - 1]][:40]!r} is not among its declared words; "
            f"correct it, or declare {OTHER!r} for words that are not listed"
        )
