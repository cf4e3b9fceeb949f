"""Link tables, aligned rows, and similarities of links.

Similarities are FedSim's: negative distances, normalised by the training links, noised once. The
noise bounds one greedy attacker (tau, ``dp/sensitivity.py``); it is not differential privacy. It is
drawn once and kept with the values it was added to: fresh noise over the same similarities in every
run, as in the published code, averages out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped

from securevfl.core import checks
from securevfl.core.conventions import unseeded_normal
from securevfl.core.errors import ConfigError, DataError

# Links of ranked lists that are filtered together.
_FILTERED_CELLS: Final = 2**20

Chosen: TypeAlias = Int64[np.ndarray, " chosen"]
"""Numbers of some rows or records."""

Sample: TypeAlias = Bool[np.ndarray, " records"]
"""Mask of the records that may be linked."""

NO_RECORD: Final = -1
"""Record number where a row has fewer than K links; its distance is infinite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class LinkTable:
    """K links a primary row, ascending by (distance, record number); missing ones come last."""

    indices: Int64[np.ndarray, "rows links"]
    """Record numbers at the secondary, from 0; :data:`NO_RECORD` for none."""

    distances: Float64[np.ndarray, "rows links"]
    """Distances in the metric's unit; infinite for none."""

    def __post_init__(self) -> None:
        if self.indices.shape != self.distances.shape or self.indices.ndim != 2:
            raise DataError(
                f"links: indices {self.indices.shape} and distances {self.distances.shape} "
                f"must be matrices of one shape"
            )

    @classmethod
    def empty(cls, rows: int, links: int) -> "LinkTable":
        """Return a table without links, to write into."""
        return cls(
            indices=np.full((rows, links), NO_RECORD, dtype=np.int64),
            distances=np.full((rows, links), np.inf, dtype=np.float64),
        )

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self.indices.shape[0]

    @property
    def num_links(self) -> int:
        """K, the slots of a row, filled or not."""
        return self.indices.shape[1]

    @property
    def present(self) -> Bool[np.ndarray, "rows links"]:
        """Which slots hold a record."""
        return self.indices != NO_RECORD

    def take(self, rows: Chosen) -> "LinkTable":
        """Return the links of the chosen rows, in that order."""
        return LinkTable(indices=self.indices[rows], distances=self.distances[rows])

    def links(self, rows: Chosen | None, k: int, *, sample: Sample | None = None) -> "LinkTable":
        """Return the first ``k`` links of the chosen rows (None: all), among the sampled records.

        Memory: filtering holds a few dozen MiB at a time.
        """
        if sample is None:
            ranked = self if rows is None else self.take(rows)
            return LinkTable(indices=ranked.indices[:, :k], distances=ranked.distances[:, :k])
        chosen = np.arange(self.num_rows, dtype=np.int64) if rows is None else rows
        links = LinkTable.empty(len(chosen), k)
        step = max(1, _FILTERED_CELLS // self.num_links)
        for start in range(0, len(chosen), step):
            part = self.take(chosen[start : start + step])
            kept = sample[np.where(part.present, part.indices, 0)] & part.present
            row, column = np.nonzero(kept)
            near = fill_slots(
                part.num_rows, k, row, part.indices[row, column], part.distances[row, column]
            )
            links.put(slice(start, start + step), near)
        return links

    def put(
        self,
        rows: "slice | Int64[np.ndarray, ' some'] | Bool[np.ndarray, ' all']",
        links: "LinkTable",
    ) -> None:
        """Write the links of some rows, in place."""
        self.indices[rows], self.distances[rows] = links.indices, links.distances

    def renumber(self, ids: Chosen) -> "LinkTable":
        """Return the table of records that have these numbers instead of 0, 1, ..."""
        records = np.where(self.present, ids[np.where(self.present, self.indices, 0)], NO_RECORD)
        return LinkTable(indices=records, distances=self.distances)

    def without_distances(self) -> "LinkTable":
        """Return the same links with each distance replaced by its place, from 0."""
        places = np.broadcast_to(np.arange(self.num_links, dtype=np.float64), self.indices.shape)
        return LinkTable(indices=self.indices, distances=np.where(self.present, places, np.inf))

    def within(self, limit: float) -> "LinkTable":
        """Return the links of at most that distance; the others' slots hold no record."""
        if limit == math.inf:
            return self  # no link is farther, and a copy of many links takes much memory
        return self.only(self.distances <= limit)

    def only(self, kept: Bool[np.ndarray, "rows links"]) -> "LinkTable":
        """Return some of the links; the others' slots hold no record, wherever they are."""
        return LinkTable(
            indices=np.where(kept, self.indices, NO_RECORD),
            distances=np.where(kept, self.distances, np.inf),
        )

    def most_uses(self, num_records: int) -> int:
        """Return the most rows that any one of ``num_records`` records is linked to."""
        used = self.indices[self.present]
        return int(np.bincount(used, minlength=num_records).max()) if used.size else 0

    def __repr__(self) -> str:
        return f"LinkTable({self.num_rows} rows, {self.num_links} links each)"


def place_in_run(counts: Int64[np.ndarray, " runs"]) -> Int64[np.ndarray, " items"]:
    """Return each item's position in its run, from 0; runs of these lengths are in a row."""
    begin = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(begin, counts)


def first_of_key(numbers: Int64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
    """Return the first row of each row's key.

    Args:
        numbers: A number for each row, equal for equal keys; below 0 without a key, which no other
            row has.
    """
    firsts = np.arange(len(numbers), dtype=np.int64)
    there = np.flatnonzero(numbers >= 0)
    _, first, key = np.unique(numbers[there], return_index=True, return_inverse=True)
    firsts[there] = there[first][key]
    return firsts


def fill_slots(
    rows: int,
    links: int,
    row: Int64[np.ndarray, " pairs"],
    record: Int64[np.ndarray, " pairs"],
    distance: Float64[np.ndarray, " pairs"],
) -> LinkTable:
    """Make a link table of pairs that are sorted by row, and within a row nearest first."""
    slot = place_in_run(np.bincount(row, minlength=rows))
    kept = slot < links
    table = LinkTable.empty(rows, links)
    table.indices[row[kept], slot[kept]] = record[kept]
    table.distances[row[kept], slot[kept]] = distance[kept]
    return table


def nearest_pairs(
    rows: int,
    k: int,
    row: Int64[np.ndarray, " pairs"],
    record: Int64[np.ndarray, " pairs"],
    distance: Float64[np.ndarray, " pairs"],
) -> LinkTable:
    """Return the ``k`` nearest of each row's pairs, whose order does not matter."""
    order = np.lexsort((record, distance, row))
    return fill_slots(rows, k, row[order], record[order], distance[order])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordsByKey:
    """Records in the order of their keys, to find those of equal keys."""

    keys: Shaped[np.ndarray, " records"]
    """A number for each record, ascending."""

    ids: Int64[np.ndarray, " records"]
    """Record numbers, ascending among equal keys."""

    @classmethod
    def of(
        cls, keys: Shaped[np.ndarray, " all_records"], ids: Int64[np.ndarray, " records"]
    ) -> "RecordsByKey":
        """Sort the records with these numbers, which ascend."""
        ids = ids[np.argsort(keys[ids], kind="stable")]
        return cls(keys=keys[ids], ids=ids)

    def spans(
        self, keys: Shaped[np.ndarray, " rows"]
    ) -> tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Return where the records of each row's key begin, and how many there are."""
        first = np.searchsorted(self.keys, keys, side="left")
        return first, np.searchsorted(self.keys, keys, side="right") - first

    def pairs(
        self, first: Int64[np.ndarray, " rows"], count: Int64[np.ndarray, " rows"]
    ) -> tuple[Int64[np.ndarray, " pairs"], Int64[np.ndarray, " pairs"]]:
        """Return row and record of every pair of these spans, row by row."""
        row = np.repeat(np.arange(len(count)), count)
        return row, self.ids[np.repeat(first, count) + place_in_run(count)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alignment:
    """Which of the primary's rows are linked, without records and distances."""

    names: Sequence[str]
    """The secondaries, by rank."""

    linked: Bool[np.ndarray, "rows secondaries"]
    """Mask of the rows that have a link at each secondary."""

    apart: Sequence[str]
    """Secondaries at which some row's nearest record has another key, and no largest distance says
    whether the two are one."""

    @property
    def everywhere(self) -> Bool[np.ndarray, " rows"]:
        """Which rows are linked at every secondary: the aligned ones."""
        return np.asarray(self.linked.all(axis=1))

    def warning(self, *, unit: str) -> str | None:
        """Return a one-line warning for the user, or None.

        Args:
            unit: Unit of distances.
        """
        if not self.apart:
            return None
        return (
            f"linkage.max_distance is not set, and at {', '.join(self.apart)} nearest keys are not "
            f"all equal, so every row that has a link counts as aligned; set it to the farthest "
            f"that a true match may be (unit: {unit})"
        )

    def figures(self, *, max_distance: float | None, unit: str) -> dict[str, Any]:
        """Return figures for run folders: counts, never a row.

        Args:
            max_distance: The farthest that a link may be; None for no limit.
            unit: Unit of distances.
        """
        return {
            "rows": len(self.linked),
            "aligned": int(self.everywhere.sum()),
            "by_secondary": dict(zip(self.names, self.linked.sum(axis=0).tolist(), strict=True)),
            "max_distance": max_distance,
            "distance_unit": unit,
            "warning": self.warning(unit=unit),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SimilarityScale:
    """mu_0 and sigma_0, from the training links; validation, test and later rows use the same."""

    mean: float
    """mu_0, the mean negative distance of training links, in the metric's unit."""

    deviation: float
    """sigma_0, their standard deviation, > 0."""

    whole_distances: bool
    """True if all distances were whole numbers, as of differing bits; tau applies to no others."""

    def __post_init__(self) -> None:
        checks.positive(deviation=self.deviation)
        if not math.isfinite(self.mean):
            raise ConfigError(f"mean must be finite, got {self.mean!r}")

    @classmethod
    def fit(cls, training_links: LinkTable) -> "SimilarityScale":
        """Take mean and deviation over all links of the training rows.

        Where all are equally long, as the nearest of exact ids are, the deviation is 1, one unit of
        the distance: similarities are then 0, and a link of another length differs by its own.

        Raises:
            DataError: If there is no link.

        References:
            [FedSim] section 4.1, eq. (1).
        """
        distances = training_links.distances[training_links.present]
        if not distances.size:
            raise DataError(
                "similarities: no training row has a link, so there is nothing to scale by; check "
                "the keys and linkage.max_distance"
            )
        equal = not distances.max() > distances.min()
        return cls(
            mean=float(-distances.mean()),
            deviation=1.0 if equal else float(distances.std()),
            whole_distances=bool((distances == np.round(distances)).all()),
        )


def noised_similarities(
    links: LinkTable,
    scale: SimilarityScale,
    *,
    noise_std: float,
    insecure_seed: int | None = None,
) -> Float32[np.ndarray, "rows links"]:
    """Return normalised similarities with the noise that stays with them.

    ``s_ij = (-distance_ij - mu_0) / sigma_0 + N(0, noise_std^2)``

    Args:
        links: All links that will ever be used, so that each is noised once.
        scale: From the training links.
        noise_std: sigma, >= 0, in units of sigma_0.
        insecure_seed: Makes the noise predictable: tests only. By default it comes from the
            operating system.

    Returns:
        One value a link, its noise included; 0 where a slot holds no record.

    Raises:
        ConfigError: If ``noise_std`` is negative or not finite.

    Reveals:
        Nothing until they are sent. With record numbers, many values locate records by
        trilateration; sorted and without numbers they reveal less.

    References:
        [FedSim] section 4.1, eq. (1) and (2).
    """
    checks.non_negative(noise_std=noise_std)
    present = links.present
    exact = (-links.distances[present] - scale.mean) / scale.deviation
    if insecure_seed is None:
        drawn = unseeded_normal(*exact.shape)
    else:
        drawn = np.random.default_rng(insecure_seed).standard_normal(exact.shape)
    values = np.zeros(links.indices.shape, dtype=np.float32)
    values[present] = exact + noise_std * drawn
    return values


# Candidates that are sorted together, each taking about 60 bytes meanwhile.
_SORTED_CELLS: Final = 2**20

# A tree's distance and the canonical one differ by a few roundings, far below this fraction.
_RELATIVE_SLACK: Final = 1e-9

# Squares below 1e-300 lose their precision, so distances below 1e-150 may come out equal.
_ABSOLUTE_SLACK: Final = 1e-150

DistanceBlock = Callable[[int, int], Shaped[np.ndarray, "chunk records"]]
"""Distances of the primary rows from a start to an end, to all eligible records."""


def nearest_by_block(
    block: DistanceBlock, *, rows: int, ids: Chosen, k: int, chunk_cells: int
) -> LinkTable:
    """Link rows chunk by chunk, from dense blocks of distances.

    Args:
        block: Computes a block; its columns are the records ``ids``.
        rows: Primary rows.
        ids: Eligible records, ascending.
        k: Links a row.
        chunk_cells: Most distances in memory at a time.

    Returns:
        Links, ascending by (distance, record number).
    """
    links = LinkTable.empty(rows, k)
    if len(ids):
        step = max(1, chunk_cells // len(ids))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            links.put(slice(start, end), nearest_in_block(block(start, end), k).renumber(ids))
    return links


def nearest_in_block(block: Shaped[np.ndarray, "chunk records"], k: int) -> LinkTable:
    """Return each row's ``k`` smallest distances by (distance, column).

    Memory: a byte a cell, and at most :data:`_SORTED_CELLS` cells (or one row) that are sorted
    together, however many distances tie.
    """
    rows, records = block.shape
    links = LinkTable.empty(rows, k)
    # Everything up to the k-th distance is sorted; ties beyond the k-th fall off the end.
    near = block <= _kth_smallest(block, k) if k < records else np.ones(block.shape, np.bool_)
    for start, end in batches(np.count_nonzero(near, axis=1), _SORTED_CELLS):
        row, column = np.divmod(np.flatnonzero(near[start:end]), records)
        distance = block[start + row, column].astype(np.float64)
        links.put(slice(start, end), nearest_pairs(end - start, k, row, column, distance))
    return links


def write_nearest(
    links: LinkTable,
    rows: Chosen,
    ids: Int64[np.ndarray, " eligible"],
    search: Callable[[np.ndarray, int], tuple[Any, Any]],
    measure: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    *,
    width: int,
    chunk_cells: int,
) -> None:
    """Write the exact links of some rows, with an index that breaks ties as it likes.

    Args:
        links: Where they are written.
        rows: Rows that are searched for.
        ids: Record numbers of what the index holds, ascending; at least one.
        search: Returns distances and positions in the index of so many nearest, a line each of
            some rows; distances ascend and are off by less than a rounding or two.
        measure: Returns the exact distances of some rows to positions, given those of ``search``.
        width: How many are asked for at first.
        chunk_cells: Most candidates (rows times width) that are looked at together.
    """
    wanted, count = min(links.num_links, len(ids)), len(ids)
    width = min(width, count)
    while len(rows):
        undecided = []
        step = max(1, chunk_cells // width)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            near, position = map(np.asarray, search(some, width))
            # If the last candidate is as far as the k-th, others as far may be still outside.
            limit = near[:, wanted - 1] * (1 + _RELATIVE_SLACK) + _ABSOLUTE_SLACK
            decided = (near[:, -1] > limit) | (width == count)
            undecided.append(some[~decided])
            some, position = some[decided], position[decided]
            exact = measure(some, position, near[decided])
            _put_in_order(position, exact)
            links.indices[some, :wanted] = ids[position[:, :wanted]]
            links.distances[some, :wanted] = exact[:, :wanted]
        rows = np.concatenate(undecided)
        width = min(2 * width, count)


def _put_in_order(
    position: Int64[np.ndarray, "rows width"], exact: Shaped[np.ndarray, "rows width"]
) -> None:
    """Sort candidates by (distance, position), in place."""
    # Most rows come in order from an index; sorting all of them would cost as much as it.
    unsorted = np.flatnonzero((exact[:, 1:] <= exact[:, :-1]).any(axis=1))
    # Positions ascend with record numbers, so they break ties the same way.
    order = np.lexsort((position[unsorted], exact[unsorted]), axis=1)
    position[unsorted] = np.take_along_axis(position[unsorted], order, axis=1)
    exact[unsorted] = np.take_along_axis(exact[unsorted], order, axis=1)


def batches(sizes: Int64[np.ndarray, " rows"], most: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of runs of rows whose sizes add up to at most ``most``, or of one row."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        done = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield start, end
        start = end


def _kth_smallest(
    block: Shaped[np.ndarray, "chunk records"], k: int
) -> Shaped[np.ndarray, "chunk 1"]:
    """Return each row's k-th smallest distance, as a column."""
    if block.dtype not in (np.uint8, np.uint16):
        return np.partition(block, k - 1, axis=1)[:, k - 1 : k]
    # Short whole numbers are counted, which takes a quarter of the time of partitioning them.
    limits = [np.searchsorted(np.cumsum(np.bincount(row)), k) for row in block]
    return np.array(limits, dtype=block.dtype)[:, None]


def eligible_ids(records: int, k: int, eligible: Sample | None) -> Chosen:
    """Check K and eligibility, and return the records that may be linked.

    Raises:
        ConfigError: If ``k`` is below 1 or ``eligible`` has another length.
        DataError: If there are no records or fewer than ``k``.
    """
    checks.at_least(1, k=k)
    if k > records:
        raise DataError(
            f"K = {k} links were asked for, but the table has only {records} records; "
            f"lower model.neighbours"
        )
    if eligible is None:
        return np.arange(records, dtype=np.int64)
    if eligible.shape != (records,):
        raise ConfigError(f"eligible: must have the length {records}, got {eligible.shape}")
    return np.flatnonzero(eligible)
