"""Equal keys: texts, or numbers in their spelling.

Keys go through no floating point, so ids of 16 digits and more stay distinct. Links are found by
hashing and sorting, in time that grows with the tables and not with their product. Memory: both
tables' keys as texts once more while they are numbered, then 8 bytes a key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Int64

from securevfl.core.errors import DataError
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, RecordsByKey, fill_slots
from securevfl.linkage.metrics.metric import Columns, ComparedKeys, KeyKind, KeySpec, Metric
from securevfl.linkage.text import normalise_text, trimmed_text

_MISSING: Final = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactKeys(ComparedKeys):
    """One number a row: equal numbers are equal keys, whichever party has them."""

    primary: Int64[np.ndarray, " rows"]
    """The primary's; -1 where the key is missing."""

    records: Int64[np.ndarray, " records"]
    """The secondary's; -1 where the key is missing."""

    def nearest_of(self, keys: Int64[np.ndarray, " rows"], ids: Chosen, k: int) -> LinkTable:
        """Link each row to the first ``k`` records of the same key, by number, at distance 0."""
        whole = len(ids) == self.num_records
        records = self._all_records if whole else RecordsByKey.of(self.records, ids)
        first, equal = records.spans(keys)
        row, record = records.pairs(first, np.where(keys == _MISSING, 0, np.minimum(equal, k)))
        return fill_slots(len(keys), k, row, record, np.zeros(len(row)))

    @cached_property
    def _all_records(self) -> RecordsByKey:
        """Kept because rows are often linked part by part."""
        return RecordsByKey.of(self.records, np.arange(self.num_records, dtype=np.int64))


class Exact(Metric):
    """Equal or not: rows are linked to records of the very same key, and to no others."""

    name: ClassVar[str] = "exact"
    unit: ClassVar[str] = "none: linked keys are equal"
    whole: ClassVar[bool] = True
    largest: ClassVar[float] = 0.0
    quick: ClassVar[bool] = True
    coded: ClassVar[bool] = False
    equal_only: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"fold", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:
        """Return that keys are texts, numbers in their spelling."""
        return "text"

    def compare(
        self, spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> ExactKeys:
        """Number the different keys of both tables."""
        return numbered_keys(exact_texts(spec, primary), exact_texts(spec, records))


def exact_texts(spec: KeySpec, keys: KeyTable) -> list[str | None]:
    """Return all key columns of a row as one text, equal if and only if every column is.

    Blanks at both ends and format characters (Unicode Cf) do not count, and a letter with a
    combining accent equals its one-character form (Unicode NFC); with ``linkage.fold``, texts are
    compared as :func:`~securevfl.linkage.text.normalise_text` gives them.

    Args:
        spec: Which keys are compared.
        keys: A party's.

    Returns:
        One text a row; None where a column is missing or blank.

    Raises:
        DataError: If there are no rows, or a value is no text.
    """
    form = normalise_text if spec.fold else trimmed_text
    columns = [_form_texts(keys.columns, name, form, whose=keys.name) for name in keys.columns]
    if not columns or not columns[0]:
        raise DataError(f"keys of {keys.name}: has no rows")
    # With its length before it, a text's end is where it is: "a b", "c" is not "a", "b c".
    return [
        "".join(f"{len(text)}:{text}" for text in row) if all(row) else None
        for row in zip(*columns, strict=True)
    ]


def numbered_keys(primary: Sequence[Any], records: Sequence[Any]) -> ExactKeys:
    """Return two tables of keys as numbers: equal keys have equal ones, and missing ones none.

    Args:
        primary: One hashable key a row; None where it is missing.
        records: The same of the secondary.
    """
    import pandas as pd  # slow to load, and this metric's alone

    both = np.empty(len(primary) + len(records), dtype=object)
    both[: len(primary)], both[len(primary) :] = primary, records
    numbers = pd.factorize(both)[0].astype(np.int64)
    return ExactKeys(primary=numbers[: len(primary)], records=numbers[len(primary) :])


def _form_texts(columns: Columns, name: str, form: Any, *, whose: str) -> list[str]:
    """Return a column's texts in their form, empty where one is missing."""
    for row, text in enumerate(columns[name], 1):
        if not (text is None or isinstance(text, str)):
            raise DataError(
                f"keys of {whose}: column {name!r}, row {row}: must be text, got "
                f"{type(text).__name__}"
            )
    return ["" if text is None else form(text) for text in columns[name]]
