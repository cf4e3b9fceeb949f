"""How keys are spelled before they are compared: leading zeros, digits alone, the order of dates.

Each key becomes another by itself, whatever others hold: so what one record can change stays
within the bounds of the promise.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Final, Literal

import numpy as np

from securevfl.core import checks

DateOrder = Literal["day-first", "month-first"]

_DATE: Final = re.compile(r"([0-9]{1,2})[./-]([0-9]{1,2})[./-]([0-9]{4})")
_ISO: Final = re.compile(r"([0-9]{4})[./-]([0-9]{1,2})[./-]([0-9]{1,2})")
_MIDNIGHT: Final = re.compile(r"[T ]0?0:00(:00(\.0+)?)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """What counts in a key of text."""

    strip_zeros: bool = False
    """Whether leading zeros are left out: 00025 becomes 25."""

    digits_only: bool = False
    """Whether all but digits is left out: C-123 becomes 123."""

    dates: DateOrder | None = None
    """The order in which dates such as 28.03.1956 are written; they become 1956-03-28."""

    def __post_init__(self) -> None:
        if self.dates is not None:
            checks.one_of(("day-first", "month-first"), dates=self.dates)

    @property
    def settings(self) -> dict[str, Any]:
        """What is not as it is without a setting, by the names of a federation file."""
        values = {name: getattr(self, name) for name in ("strip_zeros", "digits_only", "dates")}
        return {name: value for name, value in values.items() if value}

    def of(self, text: str) -> str:
        """Return a key as it is spelled; empty where nothing is left.

        Examples:
            >>> Spelling(dates="day-first").of("3.4.1956")
            '1956-04-03'
        """
        if self.dates is not None:
            text = _in_iso_form(text.strip(), self.dates)
        if self.digits_only:
            numbers = (unicodedata.digit(letter, None) for letter in text)
            text = "".join(str(number) for number in numbers if number is not None)
        if self.strip_zeros:
            text = text.strip()
            text = text.lstrip("0") or text[-1:]
        return text

    def of_columns(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return key columns with their texts spelled so; numbers as they are."""
        if not self.settings:
            return dict(columns)
        return {
            name: np.array([None if text is None else self.of(text) for text in column], object)
            if column.dtype == object
            else column
            for name, column in columns.items()
        }


def _in_iso_form(text: str, order: DateOrder) -> str:
    day_text = _MIDNIGHT.sub("", text)
    if (found := _DATE.fullmatch(day_text)) is not None:
        first, second, year = map(int, found.groups())
        day, month = (first, second) if order == "day-first" else (second, first)
    elif (found := _ISO.fullmatch(day_text)) is not None:
        year, month, day = map(int, found.groups())
    else:
        return text
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return text  # no day of any month
