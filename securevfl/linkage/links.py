"""Link tables, aligned rows, and similarities of links.

Similarities are FedSim's: negative distances, normalised by the training links, noised once. The
noise bounds one greedy attacker (tau, ``dp/sensitivity.py``); it is not differential privacy. It is
drawn once and kept with the values it was added to: fresh noise over the same similarities in every
run, as in the published code, averages out.
"""

import math
from collections.abc import Sequence
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
