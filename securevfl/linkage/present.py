"""Keys that are there: a row or record without any key is linked to nothing, by every metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.metrics.metric import KeyMetric, Keys, KeySpec
from securevfl.linkage.text import normalise_text


def compare_present(spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int) -> KeyMetric:
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
    return PresentKeys(metric=metric, rows_there=mine, records_there=theirs)


def have_keys(keys: Keys) -> Bool[np.ndarray, " rows"]:
    """Return which rows have a value in some key column; a blank text is none."""
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
class PresentKeys:
    """A :class:`KeyMetric` of which some rows or records have no key."""

    metric: KeyMetric
    """Distances of all keys, in which a missing one is some text or number."""

    rows_there: Bool[np.ndarray, " rows"]
    """Rows that have a key."""

    records_there: Bool[np.ndarray, " records"]
    """Records that have one."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self.metric.num_rows

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return self.metric.num_records

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows that have a key to their nearest eligible records that have one."""
        chosen = np.arange(self.num_rows, dtype=np.int64) if rows is None else rows
        there = self.rows_there[chosen]
        indices, distances = empty_links(len(chosen), k)
        records = self.records_there if eligible is None else self.records_there & eligible
        if there.any():
            found = self.metric.nearest(chosen[there], k, eligible=records)
            indices[there], distances[there] = found.indices, found.distances
        return LinkTable(indices=indices, distances=distances)

    def swapped(self) -> "PresentKeys":
        """Exchange the parties' roles."""
        return PresentKeys(
            metric=self.metric.swapped(),
            rows_there=self.records_there,
            records_there=self.rows_there,
        )

    def figures(self) -> Mapping[str, Any]:
        """Return what a log says of how keys were compared."""
        return self.metric.figures()
