"""How a column becomes features: fitted once, and the same for every row that comes later.

A row's features depend on that row and on what was fitted, and what was fitted to the table instead
of declared is told (:class:`Dependence`), since a promise about records may not rest on it.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float32, Float64

from securevfl.core.errors import DataError
from securevfl.data.cells import (
    PERCENT,
    amounts_of,
    dates_of,
    days_of,
    first_row,
    is_text,
    texts_of,
    truths_of,
)
from securevfl.data.column_settings import Pair

OTHER: Final = "other"
"""The word that stands for all words without a column of their own."""

_TRUTH: Final[Pair] = (0.0, 1.0)
_CIRCLE: Final[Pair] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberColumn:
    """Numbers as they are."""

    name: str
    """The column's name."""

    flagged: bool
    """Whether there is a feature that says where values are missing."""

    fill: float | None
    """What stands for a missing number; None: nothing may."""

    sign: str = ""
    """The sign that each number is written with, ``%`` or a currency's; empty: none."""

    kind: Literal["number"] = "number"
    """What tells the kinds apart in JSON."""

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        return (self.name,)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """What each feature lies in whatever the data; None: only the party can say."""
        return (None,)

    def values(self, cells: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, "rows 1"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If one is no number, infinite, or too large for float32.
        """
        numbers = amounts_of(cells, self.sign)
        expected = f"a number with the sign {self.sign!r}" if self.sign else "a number"
        _require_read(cells, np.isnan(numbers), expected=expected, where=where)
        too_large = np.abs(numbers) > np.finfo(np.float32).max
        if too_large.any():
            raise DataError(f"{where}, row {first_row(too_large)}: is infinite or beyond float32")
        return numbers[:, None]

    @property
    def fills(self) -> tuple[float, ...] | None:
        """What stands for a missing value in each feature."""
        return None if self.fill is None else (self.fill,)

    @property
    def encoding(self) -> str:
        """How it is encoded, in a few words."""
        if self.sign == PERCENT:
            return "a hundredth of the number before '%'"
        return f"the number without its {self.sign!r}" if self.sign else "as it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class BooleanColumn:
    """True and false as 1 and 0; a missing one is 0.5."""

    name: str
    flagged: bool
    kind: Literal["boolean"] = "boolean"

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        return (self.name,)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """What each feature lies in whatever the data."""
        return (_TRUTH,)

    def values(self, cells: "pd.Series[Any]", *, where: str) -> Float64[np.ndarray, "rows 1"]:
        """Encode cells; NaN where they are missing.

        Raises:
            DataError: If one is no truth value.
        """
        truths = truths_of(cells)
        _require_read(cells, np.isnan(truths), expected="true or false", where=where)
        return truths[:, None]

    @property
    def fills(self) -> tuple[float, ...]:
        """What stands for a missing value in each feature."""
        return (0.5,)

    @property
    def encoding(self) -> str:
        """How it is encoded, in a few words."""
        return "1 and 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class WordsColumn:
    """One 0/1 feature a word; a missing word, or one not known, is 0 in all of them."""

    name: str
    flagged: bool
    words: tuple[str, ...]
    """In the order of their features; if ``other`` is among them, it stands for all not listed."""
    kind: Literal["words"] = "words"

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        return tuple(f"{self.name}={word}" for word in self.words)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """What each feature lies in whatever the data."""
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
        """What stands for a missing value in each feature."""
        return (0.0,) * len(self.words)

    @property
    def encoding(self) -> str:
        """How it is encoded, in a few words."""
        rest = f", the rest as {OTHER!r}" if OTHER in self.words else ""
        return f"one 0/1 feature a word{rest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DateColumn:
    """Days gone by since an origin, and where in the year, week and day a date lies.

    A place on a circle is sine and cosine, so that December lies next to January. All in UTC.
    """

    name: str
    flagged: bool
    origin: float
    """What becomes 0, in days since 1970-01-01."""
    timed: bool
    """Whether the time of day is a feature."""
    fill: float | None
    """Days behind the origin that stand for a missing date; None: nothing may."""
    kind: Literal["date"] = "date"

    @property
    def own_features(self) -> tuple[str, ...]:
        """Names of the features, the flag not among them."""
        circles = ("month", "weekday", *(("hour",) if self.timed else ()))
        parts = (f"{self.name} {part} {wave}" for part in circles for wave in ("sine", "cosine"))
        return (f"{self.name} days", *parts)

    @property
    def natural_bounds(self) -> tuple[Pair | None, ...]:
        """What each feature lies in whatever the data; None: only the party can say."""
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
        """What stands for a missing value in each feature; on a circle, its middle."""
        if self.fill is None:
            return None
        return (self.fill, *(0.0,) * (len(self.own_features) - 1))

    @property
    def encoding(self) -> str:
        """How it is encoded, in a few words."""
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
    if missing.any() and (refuse or fills is None):
        raise DataError(
            f"{where}, row {first_row(missing)}: is missing ({int(missing.sum())} such cells in "
            f"all); {_what_to_do(column, refuse=refuse)}"
        )
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


def toml_key(name: str) -> str:
    """Return a column's name as a federation file spells it in a table."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


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
