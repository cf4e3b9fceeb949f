"""Columns as features: the kind of a column, its encoding, and how the encoding is fitted.

A row's features depend on that row and on the fitted encoding. Each statistic that is taken from
the table instead of being declared is listed (:class:`Dependence`), since a promise about records
must not depend on it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float32, Float64

from securevfl.core.errors import DataError
from securevfl.core.formatting import toml_key
from securevfl.data.cells import (
    PERCENT,
    amounts_of,
    dates_of,
    days_of,
    first_row,
    is_text,
    refuse_rows,
    texts_of,
    truths_of,
    word,
)
from securevfl.data.column_kinds import infer
from securevfl.data.scaling import ColumnSettings, Dependence, Pair, declared_range

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
    """Words in the order of their features; ``other`` among them stands for all not listed."""
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
