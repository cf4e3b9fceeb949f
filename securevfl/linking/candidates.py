"""Ranked candidates: what linkage finds before a secondary's secret samples choose among them."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.linkage.capped import EligiblePairs, eligible_pairs
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.sampling import filtered, list_length
from securevfl.linkage.spec import LinkSpec

# A coordinator ranks so many records that a sample leaves a row without K of them once in a
# billion: unlike a secondary that has the keys, nobody can search such a row anew.
_SURVIVAL: Final = 1 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Who may be linked to whom; exactly one of the two forms is there."""

    ranked: LinkTable | None = None
    """The nearest records of every row, nearest first."""

    pairs: EligiblePairs | None = None
    """Under a record-side cap: the pairs of a row and a record that picked it."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        if self.pairs is not None:
            return len(self.pairs.starts) - 1
        assert self.ranked is not None, "one of the two forms is there"
        return self.ranked.num_rows

    def link(
        self,
        rows: Int64[np.ndarray, " chosen"],
        sample: Bool[np.ndarray, " records"] | None,
        *,
        k: int,
    ) -> LinkTable:
        """Return the ``k`` nearest candidates of the chosen rows, among the sampled ones."""
        if self.pairs is not None:
            return self.pairs.links(rows, k, sample=sample)
        assert self.ranked is not None, "one of the two forms is there"
        if sample is None:
            return self.ranked.take(rows).first(k)
        return filtered(self.ranked, rows, k, sample)

    def without_distances(self) -> "Candidates":
        """Return the same with each distance replaced by its place: the order, and no more."""
        if self.pairs is not None:
            counts = np.diff(self.pairs.starts)
            place = np.arange(counts.sum()) - np.repeat(self.pairs.starts[:-1], counts)
            return Candidates(
                pairs=EligiblePairs(
                    starts=self.pairs.starts,
                    records=self.pairs.records,
                    distances=place.astype(np.float64),
                )
            )
        assert self.ranked is not None, "one of the two forms is there"
        return Candidates(ranked=places_of(self.ranked.indices))


def places_of(indices: Int64[np.ndarray, "rows links"]) -> LinkTable:
    """Return links whose distances are their places in the list, from 0."""
    table = np.broadcast_to(np.arange(indices.shape[1], dtype=np.float64), indices.shape)
    return LinkTable(indices=indices, distances=np.where(indices >= 0, table, np.inf))


def ranked_length(spec: LinkSpec, records: int) -> int:
    """Return how many records a coordinator ranks for each row."""
    return list_length(
        spec.choice.neighbours,
        rate=spec.choice.sampling_rate,
        records=records,
        survival=_SURVIVAL,
    )


def find_candidates(spec: LinkSpec, metric: KeyMetric) -> Candidates:
    """Find candidates where both parties' keys, codes or shares are at hand.

    Raises:
        DataError: If keys are not what the metric needs, or K exceeds the records.
    """
    cap, limit = spec.choice.links_per_record, spec.choice.max_distance
    if cap is not None:
        return Candidates(pairs=eligible_pairs(metric, cap=cap).within(limit))
    ranked = metric.nearest(None, ranked_length(spec, metric.num_records))
    return Candidates(ranked=ranked.within(limit))
