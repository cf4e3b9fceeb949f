"""Ranked candidates, the links that a secondary's rounds choose among them, and their counts."""

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core.progress import LinksCounted
from securevfl.data.tables import KeyTable
from securevfl.linkage import sampling
from securevfl.linkage.links import Chosen, LinkTable, Sample, first_of_key
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec
from securevfl.linkage.spec import LinkedSecondary, LinkSpec
from securevfl.linkage.text import normalise_text, trimmed_text

# A coordinator ranks so many records that a sample leaves a row without K of them once in a
# billion: unlike with a secondary that has the keys, such a row cannot be searched anew.
_SURVIVAL: Final = 1 - 1e-9

# Below this share of rows with a record, a warning.


Candidates = LinkTable | sampling.EligiblePairs
"""The records that each row may be linked to: ranked lists or, under a record-side cap, the pairs
of a row and a record that picked it."""


def tells_apart(spec: LinkSpec, links: LinkTable) -> bool:
    """Return whether some row's first link has another key, where it decides what is aligned.

    Returns False with a largest distance, or where linked rows are not reported.

    Args:
        spec: Settings of the linkage.
        links: Links with their distances.
    """
    if not spec.tells_rows or spec.choice.max_distance < math.inf:
        return False
    # Similarities may have another order than distances: the nearest counts.
    nearest = links.distances.min(axis=1)
    return bool((nearest[np.isfinite(nearest)] > 0).any())


def ranked_length(spec: LinkSpec, records: int) -> int:
    """Return how many records a coordinator ranks for each row."""
    return sampling.list_length(
        spec.choice.neighbours,
        rate=spec.choice.sampling_rate,
        records=records,
        survival=_SURVIVAL,
    )


def find_candidates(spec: LinkSpec, metric: ComparedKeys) -> Candidates:
    """Find candidates where both parties' keys, codes or shares are at hand.

    Raises:
        DataError: If keys are not what the metric needs, or K exceeds the records.
    """
    cap, limit = spec.choice.links_per_record, spec.choice.max_distance
    if cap is not None:
        return sampling.eligible_pairs(metric, cap=cap).within(limit)
    return metric.nearest(None, ranked_length(spec, metric.num_records)).within(limit)


def source_of_metric(spec: LinkSpec, metric: ComparedKeys) -> sampling.LinkSource:
    """Link by distance, under the cap and from the secret samples that the promise rests on.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    records, limit = metric.num_records, spec.choice.max_distance
    if spec.choice.by == "records":
        return source_of_candidates(spec, find_candidates(spec, metric), records=records)
    linker = sampling.RoundLinker(
        metric,
        spec.choice.neighbours,
        rate=spec.choice.sampling_rate,
        cap=spec.choice.links_per_record,
        # All rows are linked once: a search costs less than a list to filter.
        method="rebuild" if spec.choice.once else "auto",
    )
    return _source(
        spec,
        lambda rows, sample: linker.link(rows, sample).within(limit),
        rows=metric.num_rows,
        records=records,
    )


def source_of_candidates(
    spec: LinkSpec, candidates: Candidates, *, records: int
) -> sampling.LinkSource:
    """Link as :func:`source_of_metric` does, where a coordinator has found the candidates."""
    if spec.choice.by == "records":
        assert isinstance(candidates, sampling.EligiblePairs), "a cap goes with this choice"
        sampler = sampling.PoissonSampler(records, spec.choice.sampling_rate)
        return sampling.PickedLinks(pairs=candidates, sample=sampler.draw())
    k = spec.choice.neighbours
    return _source(
        spec,
        lambda rows, sample: candidates.links(rows, k, sample=sample),
        rows=candidates.num_rows,
        records=records,
    )


def _source(
    spec: LinkSpec,
    find: Callable[[Chosen, Sample], LinkTable],
    *,
    rows: int,
    records: int,
) -> sampling.LinkSource:
    sampler = sampling.PoissonSampler(records, spec.choice.sampling_rate)
    if spec.choice.sampling_rate < 1 and not spec.choice.once:
        return sampling.FreshlySampledLinks(find=find, sampler=sampler)
    # A frozen encoder answers each row once, from one sample for the whole pass.
    every, unsampled = np.arange(rows, dtype=np.int64), None
    if spec.choice.sampling_rate < 1:
        links = find(every, np.ones(records, dtype=np.bool_))
        unsampled = np.asarray(links.present.any(axis=1))
    return sampling.FixedLinks(table=find(every, sampler.draw()), unsampled=unsampled)


def count_links(
    spec: LinkSpec, own: KeyTable, linked: LinkedSecondary, *, unit: str | None
) -> LinksCounted:
    """Count one secondary's links, as far as its secret samples let records take part.

    Args:
        spec: Settings of the linkage.
        own: The secondary's keys.
        linked: What linking left there.
        unit: Of distances; None where the secondary does not know them.
    """
    groups = same_keys(spec.keys, own)
    tied = 0
    if isinstance(linked.source, sampling.PickedLinks):
        pairs = linked.source.pairs
        taken = linked.source.sample[pairs.records]
        row = np.repeat(np.arange(linked.primary_rows), np.diff(pairs.starts))[taken]
        record, distance = pairs.records[taken], pairs.distances[taken]
    else:
        table = linked.source.link(np.arange(linked.primary_rows, dtype=np.int64))
        tied = int(tied_beyond(table, groups).sum())
        row, record = np.nonzero(table.present)[0], table.indices[table.present]
        distance = table.distances[table.present]
    nearest = np.full(linked.primary_rows, np.inf)
    np.minimum.at(nearest, row, distance)
    nearest = nearest[np.isfinite(nearest)]
    return LinksCounted(
        name=own.name,
        rows=linked.primary_rows,
        records=own.num_rows,
        rows_linked=len(np.unique(row)),
        records_linked=len(np.unique(record)),
        tied_rows=tied,
        repeated_records=_count_shared_keys(groups),
        median_distance=None if unit is None or not len(nearest) else float(np.median(nearest)),
        unit="" if spec.keys.metric.equal_only else unit or "",
    )


def link_warnings(spec: LinkSpec, own: KeyTable, counts: LinksCounted, *, meet: bool) -> list[str]:
    """Return warnings about links before training on them, one sentence each.

    Args:
        spec: Settings of the linkage.
        own: The secondary's keys.
        counts: Its links, or those of some of its records.
        meet: Whether both parties' numeric keys have values in common ranges.
    """
    doubts, name, median = [], counts.name, counts.median_distance
    if not meet:
        doubts.append(
            f"{name}: all values of a key column are below or above those of the primary, so the "
            f"nearest record is far from every row; compare units, the order of key columns and "
            f"where the data are from"
        )
    if median is not None and median > spec.keys.metric.far_distance(own):
        doubts.append(
            f"{name}: half of the linked rows have no record within {median:.4g} {counts.unit}, "
            f"and that is as far as keys of different people are apart; compare how both parties "
            f"write them (the order of words, dates), or set linkage.max_distance"
        )
    counted = counts.repeated_records if counts.records == own.num_rows else None
    return [*doubts, *repeated_key_warnings(spec, own, repeated=counted)]


def repeated_key_warnings(
    spec: LinkSpec, own: KeyTable, *, repeated: int | None = None
) -> list[str]:
    """Return a warning where several of a secondary's records have one key.

    Args:
        spec: Settings of the linkage.
        own: The secondary's keys.
        repeated: Records that share their key with another one; None: they are counted.
    """
    if spec.keys.are_numbers:
        return []
    if repeated is None:
        repeated = _count_shared_keys(same_keys(spec.keys, own))
    if not repeated:
        return []
    return [
        f"{own.name}: {repeated:,} of {own.num_rows:,} records have a key that another record has "
        f"too, and a row has K = {spec.choice.neighbours} of them; where keys name people, a "
        f"person of two records changes twice as much as the promise counts, and "
        f'privacy.unit = "entity" counts one record at each secondary too: merge such records into '
        f"one"
    ]


def _count_shared_keys(groups: Int64[np.ndarray, " records"]) -> int:
    """Return how many records share their key with another one."""
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    return int((sizes[groups[groups >= 0]] > 1).sum())


def tied_beyond(
    table: LinkTable, groups: Int64[np.ndarray, " records"]
) -> Bool[np.ndarray, " rows"]:
    """Return which rows have K links, the last of them one of several records of the same key.

    Args:
        table: Links of all rows.
        groups: What :func:`same_keys` returns of the secondary's keys.
    """
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    last = groups[table.indices[:, -1]]
    same = (groups[table.indices] == last[:, None]) & table.present
    full = table.present[:, -1] & (last >= 0)
    return np.asarray(full & (sizes[np.maximum(last, 0)] > same.sum(axis=1)))


def rows_of_keys(spec: LinkSpec, primary: KeyTable) -> Int64[np.ndarray, " rows"] | None:
    """Return the first row of each row's key, where records choose rows; else None."""
    return first_of_key(same_keys(spec.keys, primary)) if spec.choice.by == "records" else None


def same_keys(spec: KeySpec, keys: KeyTable) -> Int64[np.ndarray, " records"]:
    """Return a number for each record, equal where all key columns are; -1 without a key."""
    import pandas as pd  # a party that only helps to link has no table

    strict = spec.metric.equal_only and not spec.fold
    form = trimmed_text if strict else normalise_text
    groups = np.zeros(keys.num_rows, dtype=np.int64)
    for column in keys.columns.values():
        values = np.asarray(column)
        if values.dtype == object:
            texts = (None if value is None else form(value) or None for value in values)
            values = np.fromiter(texts, dtype=object, count=len(values))
        codes = pd.factorize(values)[0].astype(np.int64)
        both = groups * (codes.max(initial=0) + 1) + codes
        groups = np.where((groups < 0) | (codes < 0), -1, both)
        groups = np.where(groups < 0, -1, pd.factorize(groups)[0])
    return np.where(groups < 0, -1, np.unique(groups, return_inverse=True)[1])
