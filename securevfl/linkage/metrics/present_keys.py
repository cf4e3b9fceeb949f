"""Keys that are there: a row or record without any key is linked to nothing, by every metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.linkage.links import Chosen, LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys, Keys, KeySpec
from securevfl.linkage.text import normalise_text

_NO_KEY: Final = -1


def compare_present(
    spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int
) -> ComparedKeys:
    """Compare two parties' keys by the file's metric; rows and records without a key link nowhere.

    Args:
        spec: Which keys are compared, and how.
        primary: The primary's keys.
        records: The secondary's.
        neighbours: K.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    metric = spec.metric.compare(spec, primary, records, neighbours=neighbours)
    mine, theirs = have_keys(primary), have_keys(records)
    if mine.all() and theirs.all():
        return metric
    rows, numbers = (
        np.where(present, np.arange(len(present)), _NO_KEY) for present in (mine, theirs)
    )
    return PresentKeys(metric=metric, primary=rows, records=numbers)


def have_keys(keys: Keys) -> Bool[np.ndarray, " rows"]:
    """Return which rows have a value in some key column; a blank text counts as missing."""
    columns = [
        ~np.isnan(column)
        if isinstance(column, np.ndarray) and column.dtype != object
        else np.array([text is not None and _says_something(text) for text in column])
        for column in keys.columns.values()
    ]
    return np.asarray(np.any(columns, axis=0))


def _says_something(text: str) -> bool:
    # Most texts are plain, and normalising a million of them takes seconds.
    return bool(text.strip()) and (text.isascii() or normalise_text(text) != "")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PresentKeys(ComparedKeys):
    """Keys where some rows or records are missing: these are linked to nothing."""

    primary: Int64[np.ndarray, " rows"]
    """Each row's number; -1 where it has no key."""

    records: Int64[np.ndarray, " records"]
    """Each record's number; -1 where it has no key."""

    metric: ComparedKeys
    """Distances of all keys, in which a missing one is some text or number."""

    def nearest_of(self, keys: Int64[np.ndarray, " rows"], ids: Chosen, k: int) -> LinkTable:
        """Link the rows that have a key to the nearest of those records that have one."""
        links, there = LinkTable.empty(len(keys), k), keys >= 0
        if there.any():
            eligible = np.zeros(self.num_records, dtype=np.bool_)
            eligible[ids] = self.records[ids] >= 0
            links.put(there, self.metric.nearest(keys[there], k, eligible=eligible))
        return links

    def swap_roles(self) -> "PresentKeys":
        """Exchange the parties' roles."""
        return PresentKeys(
            metric=self.metric.swap_roles(), primary=self.records, records=self.primary
        )

    def figures(self) -> Mapping[str, Any]:
        """Return figures for the log on how keys were compared."""
        return self.metric.figures()
