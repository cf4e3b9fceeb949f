"""Sources of links: record-side caps, Poisson samples of records, and fixed tables.

Under a cap, every record is eligible for its own m nearest primary rows. Adding or removing one
record then changes the links of at most m primary rows, which is what the accounting of the unit
``secondary-record`` needs (docs/privacy.md, section 3). A cap applied greedily during top-K, or by
dropping surplus links afterwards, does not bound the change: a record that goes frees places, which
free further ones.

The sample is what amplification by sampling rests on (docs/privacy.md, section 3): every record is
in it with probability q, independently, freshly each round, and only the secondary ever learns
which. Lists and samples therefore never leave the secondary, and samples come from the operating
system.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import scipy  # special functions load when they are first named
from jaxtyping import Float64, Int64

from securevfl.core import checks
from securevfl.linkage.links import (
    Chosen,
    LinkTable,
    Sample,
    eligible_ids,
    fill_slots,
    place_in_run,
)
from securevfl.linkage.metrics.metric import ComparedKeys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EligiblePairs:
    """All pairs of a primary row and a record that picked it, by (row, distance, record)."""

    starts: Int64[np.ndarray, " rows_plus_1"]
    """Row ``i`` has the pairs from ``starts[i]`` up to, not including, ``starts[i + 1]``."""

    records: Int64[np.ndarray, " pairs"]
    """Record of each pair."""

    distances: Float64[np.ndarray, " pairs"]
    """Distance of each pair."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.starts) - 1

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

    def links(self, rows: Chosen | None, k: int, *, sample: Sample | None = None) -> LinkTable:
        """Return the ``k`` nearest eligible records of the chosen rows (None: all).

        They ascend by (distance, record number); a row that fewer records picked has fewer.

        Args:
            rows: Primary rows.
            k: Links a row, at most.
            sample: Records that may be linked; None allows all.

        Raises:
            ConfigError: If ``k`` is below 1.
        """
        checks.at_least(1, k=k)
        rows = np.arange(self.num_rows, dtype=np.int64) if rows is None else rows
        counts = self.starts[rows + 1] - self.starts[rows]
        pair = np.repeat(self.starts[rows], counts) + place_in_run(counts)
        row = np.repeat(np.arange(len(rows)), counts)
        if sample is not None:
            kept = sample[self.records[pair]]
            pair, row = pair[kept], row[kept]
        return fill_slots(len(rows), k, row, self.records[pair], self.distances[pair])

    def without_distances(self) -> "EligiblePairs":
        """Return the same pairs with each distance replaced by its place in its row, from 0."""
        places = place_in_run(np.diff(self.starts))
        return replace(self, distances=places.astype(np.float64))


def eligible_pairs(metric: ComparedKeys, *, cap: int) -> EligiblePairs:
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
    picked = metric.swap_roles().nearest(None, min(cap, metric.num_rows))
    return pairs_of_picks(picked, num_rows=metric.num_rows)


def most_pairs(*, rows: int, records: int, cap: int | None) -> int:
    """Return the largest number of pairs of two tables; ``cap`` None bounds none."""
    return records * min(cap or rows, rows)


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


# Share of rows whose ranked list holds K sampled records; the others are linked anew.
_SURVIVAL: Final = 0.999

# Below this rate a list of K / q records costs more than a small tree a round
# (research/linkage/linkage.py measures where the two meet).
_LOWEST_LIST_RATE: Final = 0.1

# Longest ranked lists that are kept: 2^25 links of 16 bytes are 512 MiB.
_LARGEST_LIST_CELLS: Final = 2**25

Method = Literal["auto", "list", "rebuild"]


class PoissonSampler:
    """Draw a round's sample: each record on its own, with probability ``rate``."""

    def __init__(self, num_records: int, rate: float, *, insecure_seed: int | None = None) -> None:
        """Make a sampler.

        Args:
            num_records: Records of the secondary, >= 1.
            rate: q, in (0, 1].
            insecure_seed: Makes samples predictable, which voids amplification: tests only.

        Raises:
            ConfigError: If an argument is out of range.
        """
        checks.at_least(1, num_records=num_records)
        checks.rate(sampling_rate=rate)
        self.num_records = num_records
        """Records of the secondary."""
        # Rounded down, so that no record is drawn with more than probability q.
        self._threshold = int(rate * 2**64)
        self._insecure = None if insecure_seed is None else np.random.default_rng(insecure_seed)

    def draw(self) -> Sample:
        """Return a fresh sample: True for the records that are in it."""
        if self._threshold >= 2**64:
            return np.ones(self.num_records, dtype=np.bool_)
        size = 8 * self.num_records
        entropy = os.urandom(size) if self._insecure is None else self._insecure.bytes(size)
        return np.frombuffer(entropy, dtype="<u8") < np.uint64(self._threshold)

    def __repr__(self) -> str:
        return f"PoissonSampler({self.num_records} records)"


class RoundLinker:
    """Link primary rows to their nearest records of a sample, as if linked to the sample alone.

    With a cap, every record picks its rows once, sampled or not; so a record's rows, and with them
    the bound on its influence, are the same in every round. Without one, either a ranked list a row
    is made once, and filtered each round (rows whose list runs dry are linked anew), or the sample
    is searched anew each round. The links are the same; only the cost differs.
    """

    def __init__(
        self,
        metric: ComparedKeys,
        k: int,
        *,
        rate: float,
        cap: int | None = None,
        method: Method = "auto",
    ) -> None:
        """Prepare what all rounds share.

        Args:
            metric: Keys of all primary rows and of the secondary's records.
            k: Links a row, at most the number of records.
            rate: q, in (0, 1]; samples given to :meth:`link` should be drawn at it.
            cap: m, the most rows that a record may be linked to; None for no cap.
            method: How to link without a cap; ``auto`` decides by rate and memory, for many rounds.
                To link all rows once in one sample, ``rebuild`` is the cheapest.

        Raises:
            ConfigError: If an argument is out of range.
            DataError: If keys are not what the metric needs, or ``k`` exceeds the records.
        """
        checks.rate(sampling_rate=rate)
        checks.one_of(("auto", "list", "rebuild"), method=method)
        eligible_ids(metric.num_records, k, None)
        self._metric = metric
        self._k = k
        self._pairs: EligiblePairs | None = None
        self._ranked: LinkTable | None = None
        self.redone = 0
        """Rows so far whose ranked list held too few sampled records."""
        if cap is not None:
            self._pairs = eligible_pairs(metric, cap=cap)
            return
        length = list_length(k, rate=rate, records=metric.num_records)
        affordable = metric.num_rows * length <= _LARGEST_LIST_CELLS
        if method == "list" or (method == "auto" and rate > _LOWEST_LIST_RATE and affordable):
            self._ranked = metric.nearest(None, length)

    @property
    def method(self) -> str:
        """``pairs`` under a cap, else ``list`` or ``rebuild``."""
        if self._pairs is not None:
            return "pairs"
        return "rebuild" if self._ranked is None else "list"

    def link(self, rows: Chosen, sample: Sample) -> LinkTable:
        """Return the nearest sampled records of the chosen rows.

        Args:
            rows: Primary rows of this round.
            sample: The round's records, from :meth:`PoissonSampler.draw`.

        Returns:
            Links, ascending by (distance, record number); a row has fewer than K if the sample, or
            what is eligible in it, holds fewer.
        """
        if self._pairs is not None:
            return self._pairs.links(rows, self._k, sample=sample)
        if self._ranked is None:
            return self._metric.nearest(rows, self._k, eligible=sample)
        links = self._ranked.links(rows, self._k, sample=sample)
        if self._ranked.num_links < self._metric.num_records:
            short = np.flatnonzero(~links.present[:, -1])
            if len(short):
                self.redone += len(short)
                links.put(short, self._metric.nearest(rows[short], self._k, eligible=sample))
        return links


def list_length(k: int, *, rate: float, records: int, survival: float = _SURVIVAL) -> int:
    """Return how many nearest records to rank, so that ``k`` of them are sampled almost surely.

    Args:
        k: Links wanted, >= 1.
        rate: q, in (0, 1].
        records: Records of the secondary: no list is longer.
        survival: Wanted probability of Binomial(length, q) >= k, in (0, 1).

    Returns:
        The smallest such length, at most ``records``.
    """
    checks.at_least(1, k=k, records=records)
    checks.rate(sampling_rate=rate)
    checks.open_unit(survival=survival)
    low, high = k - 1, k
    while high < records and scipy.special.bdtrc(k - 1, high, rate) < survival:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if scipy.special.bdtrc(k - 1, middle, rate) < survival:
            low = middle
        else:
            high = middle
    return min(high, records)


@runtime_checkable
class LinkSource(Protocol):
    """Where a round's links come from."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return the links of the given primary rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLinks:
    """One link table for every round."""

    table: LinkTable
    """Links of all primary rows."""

    unsampled: npt.NDArray[np.bool_] | None = None
    """Mask of rows that would have a link with every record; for a ``table`` of a secret sample."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return the links of the given primary rows."""
        return self.table.take(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedLinks:
    """All records that picked a row: as many slots as the fullest row of the batch needs."""

    pairs: EligiblePairs
    """Pairs of a row and a record that picked it."""

    sample: npt.NDArray[np.bool_]
    """The secret sample; drawn once, for one pass over all rows."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Return every sampled record that picked one of the rows."""
        counts = self.pairs.starts[rows + 1] - self.pairs.starts[rows]
        return self.pairs.links(rows, max(1, int(counts.max())), sample=self.sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshlySampledLinks:
    """A new secret sample of the secondary's records in every round ([FeT] Algorithm 1, line 5)."""

    find: Callable[[npt.NDArray[np.int64], npt.NDArray[np.bool_]], LinkTable]
    """Links of the given primary rows within a sample."""

    sampler: PoissonSampler
    """Draws the samples."""

    def link(self, rows: npt.NDArray[np.int64]) -> LinkTable:
        """Draw a sample and return the links of the given primary rows within it."""
        return self.find(rows, self.sampler.draw())


def has_candidate(source: LinkSource, rows: Chosen) -> npt.NDArray[np.bool_]:
    """Return which rows have a record that may be linked to them, in the secret sample or not.

    Under a cap of m rows a record, one record more or less changes at most m of them.
    """
    match source:
        case PickedLinks(pairs=pairs):
            return np.asarray(np.diff(pairs.starts)[rows] > 0)
        case FreshlySampledLinks(find=find, sampler=sampler):
            links = find(rows, np.ones(sampler.num_records, dtype=np.bool_))
        case FixedLinks(unsampled=np.ndarray() as unsampled):
            return np.asarray(unsampled[rows])
        case _:
            links = source.link(rows)
    return np.asarray(links.present.any(axis=1))
