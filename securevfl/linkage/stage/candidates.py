"""Ranked candidates, and what a secondary's rounds choose among them with its secret samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float32, Int64

from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable
from securevfl.linkage.capped import EligiblePairs, eligible_pairs
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.sampling import (
    FixedLinks,
    FreshlySampledLinks,
    LinkSource,
    PickedLinks,
    PoissonSampler,
    RoundLinker,
    filtered,
    list_length,
)
from securevfl.linkage.similarities import SimilarityScale
from securevfl.linkage.spec import LinkedSecondary, LinkSpec
from securevfl.linkage.stage.party_keys import model_keys, scale_of

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

    apart: bool = False
    """Whether some row's first record has another key than the row, where that is told
    (:func:`tells_apart`)."""

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

    def nearest(self, k: int) -> LinkTable:
        """Return the ``k`` nearest candidates of every row."""
        if self.pairs is not None:
            return self.pairs.links(np.arange(self.num_rows), k)
        assert self.ranked is not None, "one of the two forms is there"
        return self.ranked.first(k)

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


def tells_apart(spec: LinkSpec, links: LinkTable) -> bool:
    """Return whether some row's first link has another key, where it decides what is aligned.

    With a largest distance, or where nobody asks which rows are linked, nobody is told, and it
    returns False.

    Args:
        spec: What linking needs.
        links: Links with their distances.
    """
    if not spec.tells_rows or spec.choice.max_distance < math.inf:
        return False
    # Similarities may have another order than distances: the nearest counts.
    nearest = links.distances.min(axis=1)
    return bool((nearest[np.isfinite(nearest)] > 0).any())


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


class CandidateLinker:
    """Links within a round's sample, from candidates that a coordinator found."""

    def __init__(self, candidates: Candidates, k: int) -> None:
        self._candidates = candidates
        self._k = k

    def link(
        self, rows: Int64[np.ndarray, " chosen"], sample: Bool[np.ndarray, " records"]
    ) -> LinkTable:
        """Return the nearest sampled candidates of the chosen rows."""
        return self._candidates.link(rows, sample, k=self._k)


class NearLinker:
    """Links within a round's sample, of at most some distance."""

    def __init__(self, linker: RoundLinker, max_distance: float) -> None:
        self._linker = linker
        self._max_distance = max_distance

    def link(
        self, rows: Int64[np.ndarray, " chosen"], sample: Bool[np.ndarray, " records"]
    ) -> LinkTable:
        """Return the nearest sampled records of the chosen rows, as far as the limit goes."""
        return self._linker.link(rows, sample).within(self._max_distance)


def source_of_metric(spec: LinkSpec, metric: KeyMetric) -> LinkSource:
    """Link by distance, under the cap and from the secret samples that the promise rests on.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    rate, cap = spec.choice.sampling_rate, spec.choice.links_per_record
    if spec.choice.by == "records":
        assert cap is not None, "checked with the federation file"
        sampler = PoissonSampler(metric.num_records, rate)
        pairs = eligible_pairs(metric, cap=cap).within(spec.choice.max_distance)
        return PickedLinks(pairs=pairs, sample=sampler.draw())
    linker = RoundLinker(
        metric,
        spec.choice.neighbours,
        rate=rate,
        cap=cap,
        # All rows are linked once: a search costs less than a list to filter.
        method="rebuild" if spec.choice.once else "auto",
    )
    near = NearLinker(linker, spec.choice.max_distance)
    return _source(spec, near, rows=metric.num_rows, records=metric.num_records)


def source_of_candidates(
    spec: LinkSpec, candidates: Candidates, *, rows: int, records: int
) -> LinkSource:
    """Link as :func:`source_of_metric` does, where a coordinator has found the candidates."""
    if spec.choice.by == "records":
        assert candidates.pairs is not None, "a cap goes with this choice"
        sampler = PoissonSampler(records, spec.choice.sampling_rate)
        return PickedLinks(pairs=candidates.pairs, sample=sampler.draw())
    linker = CandidateLinker(candidates, spec.choice.neighbours)
    return _source(spec, linker, rows=rows, records=records)


def _source(
    spec: LinkSpec, linker: NearLinker | CandidateLinker, *, rows: int, records: int
) -> LinkSource:
    sampler = PoissonSampler(records, spec.choice.sampling_rate)
    if spec.choice.sampling_rate < 1 and not spec.choice.once:
        return FreshlySampledLinks(linker=linker, sampler=sampler)
    # A frozen encoder answers each row once, from one sample for the whole pass.
    return FixedLinks(table=linker.link(np.arange(rows, dtype=np.int64), sampler.draw()))


def linked_secondary(
    own: KeyTable,
    source: LinkSource,
    scaler: KeyScaler | None,
    *,
    rows: int,
    similarities: Float32[np.ndarray, "rows links"] | None = None,
    similarity_scale: SimilarityScale | None = None,
    apart: bool = False,
    meet: bool = True,
    figures: Mapping[str, Any] | None = None,
) -> LinkedSecondary:
    """Return what linking leaves at a secondary.

    Args:
        own: Its keys.
        source: Where its rounds get links from.
        scaler: How keys are scaled for models; None for texts.
        rows: How many rows the primary has.
        similarities: What the primary gets, where the secondary makes it.
        similarity_scale: What they were scaled by.
        apart: What :func:`tells_apart` says.
        meet: Whether numeric keys of both parties have common ranges.
        figures: What its log says beside counts of links.
    """
    return LinkedSecondary(
        source=source,
        keys=model_keys(scaler, own),
        key_scale=scale_of(scaler),
        primary_rows=rows,
        similarities=similarities,
        similarity_scale=similarity_scale,
        apart=apart,
        meet=meet,
        figures={**_figures(rows, own.num_rows, source), **(figures or {})},
    )


def _figures(rows: int, records: int, source: LinkSource) -> dict[str, Any]:
    figures: dict[str, Any] = {"rows": rows, "records": records}
    if isinstance(source, FixedLinks):
        present = source.table.present
        figures["links"] = int(present.sum())
        figures["rows_without_links"] = int((~present.any(axis=1)).sum())
        figures["most_uses_of_a_record"] = source.table.most_uses(records)
    return figures
