"""Where a secondary's rounds get their links from, as the federation file chooses."""

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.linkage.capped import eligible_pairs
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.sampling import PoissonSampler, RoundLinker
from securevfl.linkage.sources import FixedLinks, FreshlySampledLinks, LinkSource, PickedLinks
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.candidates import Candidates


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
        return PickedLinks(pairs=eligible_pairs(metric, cap=cap), sample=sampler.draw())
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
