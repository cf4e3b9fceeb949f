"""Links under a record-side cap: every record is eligible for its own m nearest primary rows.

Adding or removing one record then changes the links of at most m primary rows, which is what the
accounting of the unit ``secondary-record`` needs (docs/privacy.md, section 3). A cap applied
greedily during top-K, or by dropping surplus links afterwards, does not bound the change: a record
that goes frees places, which free further ones.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.linkage.links import LinkTable, fill_slots
from securevfl.linkage.metrics.metric import KeyMetric


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EligiblePairs:
    """All pairs of a primary row and a record that picked it, by (row, distance, record)."""

    starts: Int64[np.ndarray, " rows_plus_1"]
    """Row ``i`` has the pairs from ``starts[i]`` up to, not including, ``starts[i + 1]``."""

    records: Int64[np.ndarray, " pairs"]
    """Record of each pair."""

    distances: Float64[np.ndarray, " pairs"]
    """Distance of each pair."""

    def within(self, limit: float) -> "EligiblePairs":
        """Return the pairs of at most that distance."""
        if limit == math.inf:
            return self
        near = self.distances <= limit
        before = np.concatenate([[0], np.cumsum(near)])
        return EligiblePairs(
            starts=before[self.starts],
            records=self.records[near],
            distances=self.distances[near],
        )

    def links(
        self,
        rows: Int64[np.ndarray, " chosen"],
        k: int,
        *,
        sample: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Return the ``k`` nearest eligible records of the chosen rows, among the sampled ones.

        They ascend by (distance, record number); a row that fewer records picked has fewer.

        Raises:
            ConfigError: If ``k`` is below 1.
        """
        checks.at_least(1, k=k)
        counts = self.starts[rows + 1] - self.starts[rows]
        begins = np.cumsum(counts) - counts
        pair = np.arange(counts.sum()) + np.repeat(self.starts[rows] - begins, counts)
        row = np.repeat(np.arange(len(rows)), counts)
        if sample is not None:
            kept = sample[self.records[pair]]
            pair, row = pair[kept], row[kept]
        return fill_slots(len(rows), k, row, self.records[pair], self.distances[pair])


def eligible_pairs(metric: KeyMetric, *, cap: int) -> EligiblePairs:
    """Let every record pick its ``cap`` nearest primary rows, by (distance, row number).

    Every row may then keep its nearest of the records that picked it (:meth:`EligiblePairs.links`).

    Guarantee: a record's choice does not depend on other records. Adding or removing one record
    therefore changes the links of at most ``cap`` rows, and in each of them takes one record out
    and lets at most one in. Adding or removing a *primary row* may change other rows: the cap
    speaks of records only.

    Args:
        metric: The keys of *all* primary rows that will ever be linked under this cap (training,
            validation and test rows together), and the secondary's. Rows that come later need an
            accounting of their own.
        cap: m, the most rows that a record may be linked to, >= 1.

    Raises:
        ConfigError: If ``cap`` is below 1.
        DataError: If keys are not what the metric needs.
    """
    checks.at_least(1, cap=cap)
    picked = metric.swapped().nearest(None, min(cap, metric.num_rows))
    return pairs_of_picks(picked, num_rows=metric.num_rows)


def pairs_of_picks(picked: LinkTable, *, num_rows: int) -> EligiblePairs:
    """Turn the rows that each record picked into the pairs of each row.

    Args:
        picked: Links of records to rows.
        num_rows: Primary rows.
    """
    present = picked.present
    row = picked.indices[present]
    record = np.nonzero(present)[0]
    distance = picked.distances[present]
    order = np.lexsort((record, distance, row))
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=starts[1:])
    return EligiblePairs(starts=starts, records=record[order], distances=distance[order])
