"""What a party declares of its columns, and what was taken from its records instead.

Nothing here reads a table: federation files are read by processes that have none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from securevfl.core.errors import DataError
from securevfl.data.scaling import Bounds

MAX_CATEGORIES: Final = 50
"""Of a column of words, so many get a 0/1 column each; the others share one. More would let a model
memorise rows."""

Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSettings:
    """What a party declares of its columns."""

    categories: Mapping[str, Sequence[str]] | None = None
    """Words by column."""

    bounds: Bounds | None = None
    """``[low, high]`` of every column of numbers, or such a pair by column, of dates as texts."""

    missing: Literal["fill", "refuse"] = "fill"
    """What becomes of a missing value."""

    missing_columns: Sequence[str] = ()
    """Columns of which it is known, without looking, that values may be missing."""

    max_categories: int = MAX_CATEGORIES
    """Words of a column without a list that get a feature of their own."""

    own_statistics: bool = True
    """Whether a missing value may be filled in with the table's own median; not under a promise."""

    def pair(self, column: str) -> Sequence[float | str] | None:
        """Return the declared bounds of a column."""
        if isinstance(self.bounds, Mapping):
            return self.bounds.get(column)
        return self.bounds

    def words(self, column: str) -> tuple[str, ...] | None:
        """Return the declared words of a column."""
        words = (self.categories or {}).get(column)
        return None if words is None else tuple(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """Something that was taken from the records of a table, so that features rest on them."""

    column: str
    """Of which column."""

    what: str
    """What was taken, as the subject of a sentence."""

    declare: str
    """What the party would write into the federation file instead."""


def declared_range(pair: Sequence[float | str]) -> Pair:
    """Return declared bounds as numbers; dates as days since 1970-01-01.

    Raises:
        DataError: If they are not two numbers or two dates, the first below the second.
    """
    ends = [_day_number(end) if isinstance(end, str) else float(end) for end in pair]
    if (
        len(ends) != 2
        or isinstance(pair[0], str) != isinstance(pair[1], str)
        or not -np.inf < ends[0] < ends[1] < np.inf
    ):
        raise DataError(f"must be [low, high], got {list(pair)}")
    return ends[0], ends[1]


def _day_number(text: str) -> float:
    # Imported here: it reads dates with pandas, which loads for as long as CrypTen.
    from securevfl.data.cells import day_number

    return day_number(text)
