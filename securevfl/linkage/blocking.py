"""Nearest keys among candidates: fewer pairs are compared, and some links are lost.

Whether a pair is a candidate depends on the keys of that pair alone: never on other rows or records
of a table, on how common a value is, or on how many candidates there are already. So a record's
choice of rows does not depend on other records, and caps (:mod:`securevfl.linkage.capped`) and
samples keep their promises, on which the accounting of records stands (docs/privacy.md, section 3).
Whatever implements :class:`CandidatePairs` must keep to that.

What blocking loses is measured when it is set up and stays with the keys
(:class:`BlockingQuality`): there is no way to block without it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.linkage.links import LinkTable, empty_links, fill_slots
from securevfl.linkage.metrics.metric import KeyMetric
from securevfl.linkage.topk import eligible_ids

_ROWS_MEASURED: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pairs:
    """The candidate pairs of a run of chosen rows."""

    start: int
    """Place of the first row of the run among the chosen ones."""

    end: int
    """Place behind its last row."""

    row: Int64[np.ndarray, " pairs"]
    """Place of each pair's row, counted from ``start``."""

    record: Int64[np.ndarray, " pairs"]
    """Record of each pair; no pair occurs twice."""


@runtime_checkable
class CandidatePairs(Protocol):
    """Which pairs are compared, decided by the keys of a pair alone."""

    def pairs(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        eligible: Bool[np.ndarray, " records"] | None,
    ) -> Iterator[Pairs]:
        """Yield the candidates of the chosen rows (None: all) among the eligible records.

        Runs of rows come in order, and are as long as memory for their pairs allows. Rows without
        a candidate may be left out.
        """
        ...

    def swapped(self) -> "CandidatePairs":
        """Return the same with the parties' roles exchanged: the very same pairs."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """Return what a log says of them beside :class:`BlockingQuality`."""
        ...


@runtime_checkable
class PairwiseKeys(KeyMetric, Protocol):
    """Keys that can be compared pair by pair."""

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the distance of each row to the record at its place, as :meth:`nearest` has it."""
        ...

    def swapped(self) -> "PairwiseKeys":
        """Return the same with the parties' roles exchanged."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockingQuality:
    """What blocking found and spared, on rows that were linked both ways."""

    rows_measured: int
    """Rows that were also compared with every record."""

    links_per_row: int
    """K."""

    recall_at_1: float
    """Share of those rows whose nearest link is as near as the nearest record."""

    recall_at_k: float
    """Share of their K nearest that were found; others as near as the K-th count as well."""

    candidates_per_row: float
    """Records that a row was compared with, on average."""

    reduction_ratio: float
    """Share of all pairs that were not compared."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


class BlockedKeys:
    """Keys that are compared with candidates alone; a row may have fewer than K links.

    Make it with :func:`blocked_keys`.
    """

    def __init__(
        self, keys: PairwiseKeys, candidates: CandidatePairs, quality: BlockingQuality
    ) -> None:
        self.quality = quality
        """What blocking loses; also of the swapped keys, as candidates are symmetric."""
        self._keys = keys
        self._candidates = candidates

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return self._keys.num_rows

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return self._keys.num_records

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible candidates."""
        return _nearest_candidates(self._keys, self._candidates, rows, k, eligible=eligible)[0]

    def swapped(self) -> "BlockedKeys":
        """Exchange the parties' roles."""
        return BlockedKeys(self._keys.swapped(), self._candidates.swapped(), self.quality)

    def figures(self) -> Mapping[str, Any]:
        """Return what blocking lost and spared."""
        return {"blocking": {**self.quality.as_json(), **self._candidates.figures()}}

    def __repr__(self) -> str:
        return f"BlockedKeys({self.num_rows} rows, {self.num_records} records, {self.quality})"


def blocked_keys(
    keys: PairwiseKeys,
    candidates: CandidatePairs,
    k: int,
    *,
    rows_measured: int = _ROWS_MEASURED,
) -> BlockedKeys:
    """Link by candidates, and measure what that loses.

    Args:
        keys: Both parties' keys.
        candidates: Which pairs of them are compared.
        k: Links a row for which recall is measured.
        rows_measured: Rows, evenly spread over the table, that are compared with every record.

    Raises:
        ConfigError: If ``rows_measured`` is below 1.
        DataError: If there are fewer than ``k`` records.
    """
    checks.at_least(1, rows_measured=rows_measured)
    chosen = np.unique(np.linspace(0, keys.num_rows - 1, rows_measured).astype(np.int64))
    exact = keys.nearest(chosen, k)
    found, pairs = _nearest_candidates(keys, candidates, chosen, k)
    per_row = pairs / len(chosen)
    quality = BlockingQuality(
        rows_measured=len(chosen),
        links_per_row=k,
        recall_at_1=float((found.distances[:, 0] == exact.distances[:, 0]).mean()),
        recall_at_k=float((found.distances <= exact.distances[:, -1:]).mean()),
        candidates_per_row=per_row,
        reduction_ratio=1 - per_row / keys.num_records,
    )
    return BlockedKeys(keys, candidates, quality)


def _nearest_candidates(
    keys: PairwiseKeys,
    candidates: CandidatePairs,
    rows: Int64[np.ndarray, " chosen"] | None,
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
) -> tuple[LinkTable, int]:
    """Return the ``k`` nearest candidates of each row, and how many pairs were compared."""
    eligible_ids(keys.num_records, k, eligible)
    indices, distances = empty_links(keys.num_rows if rows is None else len(rows), k)
    compared = 0
    for pairs in candidates.pairs(rows, eligible):
        place = pairs.start + pairs.row
        apart = keys.distances(place if rows is None else rows[place], pairs.record)
        order = np.lexsort((pairs.record, apart, pairs.row))
        links = fill_slots(
            pairs.end - pairs.start, k, pairs.row[order], pairs.record[order], apart[order]
        )
        indices[pairs.start : pairs.end] = links.indices
        distances[pairs.start : pairs.end] = links.distances
        compared += len(apart)
    return LinkTable(indices=indices, distances=distances), compared
