"""Text keys in one form: what counts as the same letter, and which texts are refused."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

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
    return unicodedata.normalize("NFC", _visible(text).strip())


def _visible(text: str) -> str:
    """Return a text without format characters (Unicode Cf), which nobody sees and tools leave.

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
