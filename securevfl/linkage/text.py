"""Text keys in a canonical form: Unicode, case and spelling.

Each key is rewritten independently of all others, so the influence of one record stays within the
bounds of the promise.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Final, Literal

import numpy as np

from securevfl.core import checks
from securevfl.core.errors import DataError

# Edit distances up to this length fit 16 bits, which bounds the memory of a block.
LONGEST_TEXT: Final = 65_535


def normalise_text(text: str) -> str:
    r"""Return a text as it is compared.

    Without format characters (Unicode Cf: byte-order marks, zero-width blanks, soft hyphens), in
    Unicode NFKC (a letter with a combining accent equals its one-character form, full-width letters
    equal plain ones), case folded ("STRASSE" equals "straße"), blanks at the ends dropped and runs
    of blanks made one. Accents are kept: "é" and "e" differ by one edit.

    Examples:
        >>> normalise_text("  Ame\u0301lie\t MÜLLER ")
        'amélie müller'
    """
    folded = unicodedata.normalize("NFKC", _visible(text)).casefold()
    # Folding may leave letters decomposed, so composition comes last.
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def trimmed_text(text: str) -> str:
    r"""Return a text as an exact key: without format characters and blanks at its ends, in NFC.

    Examples:
        >>> trimmed_text("\ufeff 00Ame\u0301 ")
        '00Amé'
    """
    if text.isascii():
        return text.strip()
    return unicodedata.normalize("NFC", _visible(text).strip())


def _visible(text: str) -> str:
    """Return a text without format characters (Unicode Cf): invisible remains of other programs.

    Byte-order marks, zero-width blanks and joiners, marks of direction, soft hyphens.
    """
    if text.isascii() or not any(unicodedata.category(letter) == "Cf" for letter in text):
        return text
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cf")


def joined_texts(columns: Mapping[str, "np.ndarray | Sequence[Any]"]) -> list[str]:
    """Return all columns of a row as one text, missing values left out."""
    return [
        " ".join(str(value) for value in row if value is not None and value == value)
        for row in zip(*map(list, columns.values()), strict=True)
    ]


def present_texts(values: Sequence[Any] | np.ndarray, *, whose: str) -> list[str | None]:
    """Return a column's texts as they are compared; None for missing ones.

    Raises:
        DataError: As :func:`checked_texts`.
    """
    present = [value for value in values if value is not None]
    words = iter(checked_texts(present, whose=whose) if present else [])
    return [None if value is None else next(words) for value in values]


def checked_texts(values: Sequence[Any] | np.ndarray, *, whose: str) -> list[str]:
    """Check and normalise a column of texts.

    Raises:
        DataError: If it is empty, a value is no text, or one is longer than 65,535 characters.
    """
    if len(values) == 0:
        raise DataError(f"keys of {whose}: has no rows")
    texts = []
    for row, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise DataError(
                f"keys of {whose}: row {row}: must be text, got {type(value).__name__}; "
                f"a column holds texts or numbers, not both"
            )
        text = normalise_text(value)
        if len(text) > LONGEST_TEXT:
            raise DataError(
                f"keys of {whose}: row {row}: has {len(text)} characters, more than {LONGEST_TEXT}"
            )
        texts.append(text)
    return texts


DateOrder = Literal["day-first", "month-first"]

_DATE: Final = re.compile(r"([0-9]{1,2})[./-]([0-9]{1,2})[./-]([0-9]{4})")
_ISO: Final = re.compile(r"([0-9]{4})[./-]([0-9]{1,2})[./-]([0-9]{1,2})")
_MIDNIGHT: Final = re.compile(r"[T ]0?0:00(:00(\.0+)?)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelling:
    """What counts in a key of text."""

    strip_zeros: bool = False
    """Remove leading zeros: 00025 becomes 25."""

    digits_only: bool = False
    """Remove all but digits: C-123 becomes 123."""

    dates: DateOrder | None = None
    """The order in which dates such as 28.03.1956 are written; they become 1956-03-28."""

    def __post_init__(self) -> None:
        checks.require_limits(self)

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
    if (match := _DATE.fullmatch(day_text)) is not None:
        first, second, year = map(int, match.groups())
        day, month = (first, second) if order == "day-first" else (second, first)
    elif (match := _ISO.fullmatch(day_text)) is not None:
        year, month, day = map(int, match.groups())
    else:
        return text
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return text  # no day of any month
